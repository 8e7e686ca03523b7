"""*What does this token read?*: the keys that heads rank first, beside what one softmax would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len
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
    from multihead.heads.inspecting.inspection import Inspection, TokenView

_ROWS = 8
_WIDE = 120
_NAME = 20


@dataclass(frozen=True, slots=True)
class Reader:
    """One key that the token reads, by the heads that rank it first.

    `strongest` is the (layer, head) that gives the key its largest weight, whether or not it ranks
    it first there. `mean_layers` counts layers whose mean over heads, a single softmax's picture,
    ranks the key first; `mean_weight` is the key's largest weight in such a mean.
    """

    key: int
    heads: int
    strongest: tuple[int, int]
    weight: float
    mean_layers: int
    mean_weight: float


def readers(token: TokenView) -> list[Reader]:
    """The keys that some head or some layer's mean ranks first, by number of heads, then weight."""
    first, mean_first = token.top_keys[..., 0], token.mean_top_keys[..., 0]
    heads_of = dict(zip(*np.unique(first, return_counts=True), strict=True))
    layers_of = dict(zip(*np.unique(mean_first, return_counts=True), strict=True))
    found = []
    for key in sorted({*heads_of, *layers_of} - {-1}):  # of a head that is not there
        weights = np.where(token.top_keys == key, token.top_weights, 0.0).max(axis=-1)
        layer, head = np.unravel_index(weights.argmax(), weights.shape)
        means = np.where(token.mean_top_keys == key, token.mean_top_weights, 0.0)
        found.append(
            Reader(
                key=int(key),
                heads=int(heads_of.get(key, 0)),
                strongest=(int(layer), int(head)),
                weight=float(weights.max()),
                mean_layers=int(layers_of.get(key, 0)),
                mean_weight=float(means.max()),
            )
        )
    return sorted(found, key=lambda reader: (-reader.heads, -reader.weight, reader.key))


def print_readers(console: Console, inspection: Inspection) -> None:
    """Print the token in its text, the keys it reads and how many heads rank each first."""
    tokens, token = inspection.tokens, inspection.token
    show(console, _in_context(tokens, token.index, room(console)))
    show(
        console,
        Text(
            f"token {token.index} of {len(tokens):,}, counted from 0; --token names another",
            style=QUIET,
        ),
    )
    rows = readers(token)
    total = int((token.top_keys[..., 0] >= 0).sum())
    ranked = sum(reader.heads > 0 for reader in rows)
    means = sum(reader.mean_layers > 0 for reader in rows)
    console.print()
    show(
        console,
        f"Its {total} heads rank {ranked} different {'key' if ranked == 1 else 'keys'} first. One "
        f"softmax a layer, the mean of its heads, would rank {means}.",
    )
    console.print()

    wide = room(console) >= _WIDE
    name_width, bar_width = (32, 30) if wide else (14, 10)
    table = plain_table()
    table.add_column("\nkey", no_wrap=True)
    table.add_column("\nat", justify="right", no_wrap=True)
    table.add_column("heads that\nrank it first", no_wrap=True)
    table.add_column("strongest\nhead", no_wrap=True)
    table.add_column("\nweight", justify="right", no_wrap=True)
    table.add_column("one softmax\nranks it first", justify="right", no_wrap=True)
    table.add_column("\nweight", justify="right", no_wrap=True)
    for reader in rows[:_ROWS]:
        quiet = "" if reader.mean_layers else QUIET
        table.add_row(
            Text(fit(visible(tokens[reader.key]), name_width), style=TOKEN),
            str(reader.key),
            Text.assemble(f"{reader.heads:>4} ", (bar(reader.heads / total, bar_width), BAR)),
            Text(head_name(*reader.strongest), style=HEAD),
            weight(reader.weight),
            Text(f"in {_count(reader.mean_layers, 'layer')}", style=quiet),
            Text(weight(reader.mean_weight), style=quiet),
        )
    show(console, table)
    rest = rows[_ROWS:]
    if rest:
        heads = sum(reader.heads for reader in rest)
        show(
            console,
            Text(
                f"and {_count(len(rest), 'more key')}, ranked first by {_count(heads, 'head')}",
                style=QUIET,
            ),
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _in_context(tokens: Sequence[str], index: int, width: int) -> Text:
    """The token in brackets within its text: `width` cells, most of them for what it can read."""
    token, space = tokens[index], ""
    if token.startswith(" ") and len(token) > 1:
        token, space = token[1:], " "
    shown = Text(f"[{fit(visible(token), _NAME)}]", style="bold reverse")
    space_left = max(width - shown.cell_len, 0)
    before = "".join(tokens[max(0, index - width) : index]) + space
    after = "".join(tokens[index + 1 : index + 1 + width])
    left = fit_left(visible(before, spaces=False) if before else "", space_left * 4 // 5)
    right = fit(visible(after, spaces=False) if after else "", space_left - cell_len(left))
    return Text.assemble(left, shown, right, no_wrap=True)
