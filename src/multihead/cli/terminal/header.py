"""The header: which model, what was read, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from multihead.cli.numbers import short_bytes, short_count
from multihead.cli.terminal.style import QUIET, flow, plain_table, room, show
from multihead.cli.tokens import fit, visible

if TYPE_CHECKING:
    from multihead.heads.inspecting.inspection import Inspection

_PARAMETERS = (
    ("embeddings", "embeddings"),
    ("attention", "attention"),
    ("feed_forward", "feed-forward"),
    ("norms", "norms"),
    ("head", "head"),
)
_PRODUCTS = (
    ("projections", "projections"),
    ("scores", "scores QKᵀ"),
    ("values", "values PV"),
    ("feed_forward", "feed-forward"),
    ("head", "head"),
)

_LABELS = len("Multiply-adds") + len("1.00 TB") + 4  # the two columns before the parts, and gaps

# Why the head, the only part that can be 0, has nothing.
_NOTHING = {"parameters": "0 (tied)", "products": "0 (no logits)"}


def print_header(console: Console, inspection: Inspection) -> None:
    """Print the model's name, what was read, and the counts of `inspection.cost`."""
    facts = inspection.provenance
    width = room(console)
    title = Text(fit(visible(str(facts.get("model", "model")), spaces=False), width), style="bold")
    detail = [visible(str(facts[key]), spaces=False) for key in ("quantization",) if facts.get(key)]
    if detail:
        title.append("  " + " · ".join(detail), style=QUIET)
    console.print(title)
    heads = inspection.layers * inspection.heads
    shape = f"{inspection.layers} layers x {inspection.heads} heads = {heads} heads"
    if inspection.kv_heads != inspection.heads:
        shape += f" on {inspection.kv_heads} key-value heads a layer"
    pruned = int(np.isnan(inspection.statistics["entropy"]).sum())
    if pruned:
        shape += f", {pruned} pruned"
    show(console, shape)
    text = visible(str(facts.get("text", "text")), spaces=False)
    show(console, f"read {len(inspection.tokens):,} tokens of one text: {text}")
    console.print()

    cost = inspection.cost
    if not cost:
        return
    table = plain_table(show_header=False)
    width -= _LABELS
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1)
    table.add_row("Parameters", *_parts(cost, "parameters", _PARAMETERS, width))
    table.add_row("Multiply-adds", *_parts(cost, "products", _PRODUCTS, width))
    dtype, context = str(cost["dtype"]), int(cost["context"])
    table_parts = [
        f"not built: {context:,} x {context:,} in {dtype}",
        f"{short_bytes(int(cost['score_table_bytes_head']))} a head",
        f"{short_bytes(int(cost['score_table_bytes_layer']))} a layer",
    ]
    table.add_row(
        "KV cache",
        short_bytes(int(cost["kv_cache_bytes"])),
        Text(f"keys and values of {context:,} tokens in {dtype}", style=QUIET),
    )
    table.add_row(
        "N x N",
        short_bytes(int(cost["score_table_bytes_model"])),
        Text(flow(table_parts, width), style=QUIET),
    )
    show(console, table)


def _parts(
    cost: Mapping[str, int | str], kind: str, parts: tuple[tuple[str, str], ...], width: int
) -> tuple[str, Text]:
    """The total of a kind, and its parts, each kept on one line with its number."""
    shown = []
    for key, name in parts:
        count = int(cost[f"{kind}_{key}"])
        amount = short_count(count) if count else _NOTHING[kind]
        shown.append(f"{name} {amount}")
    return short_count(int(cost[f"{kind}_total"])), Text(flow(shown, width), style=QUIET)
