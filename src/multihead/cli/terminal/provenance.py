"""The last lines: how long it took, on what, and how far from exact it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from multihead.cli.numbers import seconds, short_bytes
from multihead.cli.terminal.style import QUIET, flow, room, show
from multihead.cli.tokens import visible

if TYPE_CHECKING:
    from multihead.heads.inspecting.inspection import Inspection

Facts = Mapping[str, str | int | float | None]


def print_provenance(console: Console, inspection: Inspection) -> None:
    """Print time, memory and backend, the checked error, and what the text was given as."""
    facts = inspection.provenance
    width = room(console)
    console.print()
    show(console, Text(flow(_run(facts), width), style="bold"))
    error = facts.get("dense_error_max")
    if error is not None:
        checked = (
            f"checked against the dense computation in float64 on {facts.get('dense_error_rows')} "
            f"rows: off by {float(error):.1e} at most"
        )
        baseline = facts.get("dense_error_baseline")
        if baseline is not None:
            checked += f" (torch's own attention: {float(baseline):.1e})"
        show(console, Text(checked, style=QUIET))
    show(console, Text(flow(_given(facts), width), style=QUIET))


def _run(facts: Facts) -> list[str]:
    parts = []
    if facts.get("seconds") is not None:
        parts.append(seconds(float(facts["seconds"] or 0)))
    if facts.get("forward_seconds") is not None:
        parts.append(f"forward {seconds(float(facts['forward_seconds'] or 0))}")
    if facts.get("peak_rss_bytes"):
        parts.append(f"peak memory {short_bytes(int(facts['peak_rss_bytes'] or 0))}")
    backend = [str(facts[key]) for key in ("backend", "instruction_set") if facts.get(key)]
    if backend:
        parts.append(" ".join(backend))
    if facts.get("dtype"):
        parts.append(str(facts["dtype"]))
    if facts.get("threads"):
        parts.append(f"{facts['threads']} threads" if facts["threads"] != 1 else "1 thread")
    return parts


def _given(facts: Facts) -> list[str]:
    parts = []
    for label, key in (("start token", "start_token"), ("chat template", "chat_template")):
        if facts.get(key):
            parts.append(f"{label}: {visible(str(facts[key]), spaces=False)}")
    if facts.get("processor"):
        parts.append(visible(str(facts["processor"]), spaces=False))
    if facts.get("versions"):
        parts += visible(str(facts["versions"]), spaces=False).split(", ")
    return parts
