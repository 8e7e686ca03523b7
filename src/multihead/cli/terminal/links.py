"""The strongest links of one head: from a token that reads to the token it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from multihead.cli.numbers import bar, weight
from multihead.cli.terminal.style import (
    BAR,
    HEAD,
    QUIET,
    TOKEN,
    head_name,
    plain_table,
    room,
    show,
)
from multihead.cli.tokens import fit, fit_left, visible

if TYPE_CHECKING:
    from multihead.heads.inspecting.inspection import Inspection

_ROWS = 8
_WIDE = 120
_RULE = (
    "Chosen since it gives most to keys other than the first, the previous and the token's own; "
    "--head names another."
)


@dataclass(frozen=True, slots=True)
class Link:
    """One query position, one key position and the weight between them."""

    query: int
    key: int
    weight: float


def choose_head(inspection: Inspection) -> tuple[int, int]:
    """The head that reads most elsewhere: (layer, head).

    Elsewhere is every key but the first, the previous and the token's own, where most heads put
    most of their weight; summed over the links that are kept.
    """
    links = inspection.links
    back = links.rows[:, None, None, None] - links.keys
    elsewhere = (links.keys > 0) & (back > 1)
    mass = np.where(elsewhere, links.weights, 0.0).sum(axis=(0, 3))
    layer, head = np.unravel_index(int(mass.argmax()), mass.shape)
    return int(layer), int(head)


def strongest_links(inspection: Inspection, layer: int, head: int) -> list[Link]:
    """The links kept for this head, strongest first."""
    stored = inspection.links
    found = [
        Link(int(query), int(key), float(value))
        for row, query in enumerate(stored.rows)
        for key, value in zip(
            stored.keys[row, layer, head], stored.weights[row, layer, head], strict=True
        )
        if key >= 0 and value > 0
    ]
    return sorted(found, key=lambda link: (-link.weight, link.query, link.key))


def print_links(console: Console, inspection: Inspection, chosen: tuple[int, int] | None) -> None:
    """Print the strongest links of the chosen head, or of the one that the rule chooses."""
    place = chosen or choose_head(inspection)
    links = strongest_links(inspection, *place)
    show(
        console,
        Text.assemble(
            "Strongest links of ",
            (head_name(*place), HEAD),
            f" among {len(inspection.links.rows)} tokens of the text",
        ),
    )
    if chosen is None:
        show(console, Text(_RULE, style=QUIET))
    console.print()
    if not links:
        show(console, Text("none", style=QUIET))
        return
    wide = room(console) >= _WIDE
    context = (room(console) - 58) // 2 if wide else 0
    table = plain_table()
    table.add_column("token", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("reads", no_wrap=True)
    table.add_column("weight", no_wrap=True)
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("to", justify="right", no_wrap=True)
    table.add_column("back", justify="right", no_wrap=True)
    for link in links[:_ROWS]:
        table.add_row(
            _token(inspection.tokens, link.query, 16, context),
            Text("→", style=QUIET),
            _token(inspection.tokens, link.key, 16, context),
            Text.assemble(f"{weight(link.weight)} ", (bar(link.weight, 8), BAR)),
            str(link.query),
            str(link.key),
            str(link.query - link.key),
        )
    show(console, table)


def _token(tokens: list[str], index: int, width: int, context: int) -> Text:
    """The token, after as much of the text before it as `context` cells hold."""
    text = Text(no_wrap=True)
    if context:
        before = "".join(tokens[max(0, index - context) : index])
        if before:
            text.append(fit_left(visible(before, spaces=False), context), QUIET)
    return text.append(fit(visible(tokens[index]), width), TOKEN)
