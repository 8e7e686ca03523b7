"""What pruning removed, cost and gained, as text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from multihead.cli.numbers import rate, short_bytes, short_count
from multihead.cli.terminal.style import QUIET, flow, plain_table, room, show
from multihead.cli.tokens import fit, visible


def print_removal(console: Console, document: Mapping[str, Any]) -> None:
    """Print the document of `multihead prune`."""
    width = room(console)
    name = fit(visible(str(document["model"]), spaces=False), width)
    console.print(Text(name, style="bold"))
    show(console, flow(_what(document), width))
    console.print()
    show(console, _table(document))
    console.print()
    show(console, flow(_loss(document), width))
    console.print()
    removed = [
        f"L{layer}: {', '.join(map(str, heads))}" for layer, heads in document["removed"].items()
    ]
    show(console, Text("Heads that are gone, by layer", style=QUIET))
    show(console, flow(removed, width))
    console.print()
    out = visible(str(document["out"]), spaces=False)
    console.print(f"Written: {out}")
    show(console, Text(f"multihead generate --model {out} 'Once upon a time'", style=QUIET))


def _what(document: Mapping[str, Any]) -> list[str]:
    units, gone = document["units"], document["removed_units"]
    heads, heads_gone = document["heads"], document["removed_heads"]
    if document["kind"] == "head":
        parts = [f"{heads - heads_gone} of {heads} heads kept"]
    else:
        parts = [
            f"{units - gone} of {units} KV groups kept",
            f"{heads - heads_gone} of {heads} query heads",
        ]
    parts.append(f"chosen by {document['by'].replace('-', ' ')}")
    if document["scored_tokens"]:
        parts.append(f"scored on {document['scored_tokens']:,} tokens")
    source = visible(str(document["text"]), spaces=False)
    parts.append(f"tested on {document['tested_tokens']:,} others of {source}")
    parts.append(f"rows of {document['row']}")
    return parts


def _table(document: Mapping[str, Any]) -> Any:
    before, after = document["before"], document["after"]
    table = plain_table()
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    losses = document["loss_before"], document["loss_after"]
    table.add_row(
        "loss, nats a token", *(f"{loss:.3f}" for loss in losses), f"{losses[1] - losses[0]:+.3f}"
    )
    rows = (
        ("parameters", "parameters", short_count),
        ("of them attention", "attention_parameters", short_count),
        ("weights", "bytes", short_bytes),
        ("KV cache a token", "cache_bytes_per_token", short_bytes),
        ("prefill, tokens/s", "prefill_tokens_per_s", rate),
        ("decode, tokens/s", "decode_tokens_per_s", rate),
    )
    for label, key, shown in rows:
        change = 100 * (after[key] / before[key] - 1)
        table.add_row(label, shown(before[key]), shown(after[key]), f"{change:+.1f} %")
    return table


def _loss(document: Mapping[str, Any]) -> list[str]:
    rises = [loss - document["loss_before"] for loss in document["control_losses"]]
    listed = ", ".join(f"{rise:+.3f}" for rise in rises)
    parts = [
        f"as many groups at random: loss {statistics.median(rises):+.3f} "
        f"({listed} in {len(rises)} draws)"
    ]
    agreement = document["halves_correlation"]
    if agreement is not None:
        parts.append(f"rank correlation of the scores of the text's two halves {agreement:.2f}")
    return parts
