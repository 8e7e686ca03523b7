"""The suite `inspect`: the whole inspection against its rivals, each in a process of its own."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from multihead.bench.case import Entry
from multihead.bench.contest import Setting
from multihead.bench.fresh import Usage, run_fresh
from multihead.bench.suites.row import Row

TOKENS, QUICK_TOKENS = 8192, 256


@dataclass(frozen=True)
class Contestant:
    """A program to run, what it is called in a table, and how often it runs."""

    name: str
    what: str
    arguments: tuple[str, ...]
    runs: int
    writes_page: bool = False


def rows(*, quick: bool) -> list[Row]:
    """A row for each program."""
    tokens = QUICK_TOKENS if quick else TOKENS
    programs = contestants(tokens)
    if quick:
        programs = tuple(replace(program, runs=1) for program in programs)
    return [Row(program.name, partial(measure, program, tokens)) for program in programs]


def contestants(tokens: int) -> tuple[Contestant, ...]:
    """Ours first. All load the same model in float32 and read the same tokens."""
    rivals = ("-m", "multihead.bench.rivals")
    inspect = ("-m", "multihead", "inspect", "--max-tokens", str(tokens), "--json")
    return (
        Contestant(
            "multihead",
            f"`multihead inspect --max-tokens {tokens}`: every statistic of every head",
            inspect,
            2,
        ),
        Contestant(
            "multihead maps",
            "every statistic and a map of 64 x 64 of every head, in the model's own pass",
            (*rivals, "maps", str(tokens)),
            2,
        ),
        Contestant(
            "multihead --report",
            "`multihead inspect --report`: peaks, sinks and what every key receives too, in a page",
            (*inspect, "--report"),
            1,
            writes_page=True,
        ),
        Contestant(
            "sdpa",
            "plain forward with torch's SDPA: no statistics at all",
            (*rivals, "sdpa", str(tokens)),
            2,
        ),
        Contestant(
            "dense",
            "one head's matrix formed and freed at a time: entropy, largest weight, its key",
            (*rivals, "dense", str(tokens)),
            1,
        ),
    )


def measure(contestant: Contestant, tokens: int, setting: Setting) -> Entry:
    """Run it to its end as often as it says; the median time and the largest peak.

    Raises:
        MultiheadError: it failed.
    """
    entry: Entry = {"name": contestant.name, "what": contestant.what, "tokens": tokens}
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "heads.html"
        arguments = contestant.arguments
        if contestant.writes_page:
            arguments = (*arguments, str(page))
        usages = [run_fresh(arguments, threads=setting.threads) for _ in range(contestant.runs)]
        if contestant.writes_page:
            entry["page_bytes"] = page.stat().st_size
    return entry | _summary(usages)


def _summary(usages: list[Usage]) -> dict[str, Any]:
    seconds = [usage.seconds for usage in usages]
    return {
        "seconds": statistics.median(seconds),
        "low": min(seconds),
        "high": max(seconds),
        "n": len(seconds),
        "peak_rss_bytes": max(usage.peak_rss_bytes for usage in usages),
    }
