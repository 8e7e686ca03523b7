"""What differs between the heads of two models on one text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from multihead.cli.statistics import STATISTICS
from multihead.cli.terminal.style import (
    HEAD,
    QUIET,
    head_name,
    plain_table,
    print_question,
    show,
)

if TYPE_CHECKING:
    from multihead.heads import Comparison, HeadRecord

_ROWS = 12


def print_comparison(
    console: Console, here: HeadRecord, there: HeadRecord, comparison: Comparison
) -> None:
    """Print what both read, how far each statistic moved, and the heads that moved most."""
    print_question(console, "What do the heads do differently?")
    for side, record in (("here", here), ("there", there)):
        texts = "one text" if record.one_text else f"{record.texts:,} texts"
        read = f": {record.tokens:,} tokens of {texts}, {record.dtype}, {record.backend}"
        show(console, Text.assemble((f"{side:<6}", QUIET), (record.model, "bold"), read))
    console.print()
    _print_statistics(console, here, there, comparison)
    changed = [it for it in comparison if it.difference]
    if not changed:
        show(console, "No head differs in any statistic.")
        return
    _print_heads(console, comparison, len(changed))


def _print_statistics(
    console: Console, here: HeadRecord, there: HeadRecord, comparison: Comparison
) -> None:
    table = plain_table()
    table.add_column("mean over heads", no_wrap=True)
    for name in ("here", "there", "mean |change|", "most in"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, statistic in STATISTICS.items():
        found = [it for it in comparison.of(name) if not math.isnan(it.difference)]
        if not found:
            continue
        most = max(found, key=lambda it: abs(it.difference))
        moved = float(np.mean([abs(it.difference) for it in found]))
        table.add_row(
            statistic.name,
            statistic.show(float(np.nanmean(here.statistics[name]))),
            statistic.show(float(np.nanmean(there.statistics[name]))),
            f"{moved:.3g}",
            Text(head_name(most.layer, most.head), style=HEAD) if most.difference else "-",
        )
    show(console, table)
    console.print()


def _print_heads(console: Console, comparison: Comparison, changed: int) -> None:
    table = plain_table()
    table.add_column("head", no_wrap=True)
    table.add_column("statistic", no_wrap=True)
    for name in ("here", "there", "change", "spreads"):
        table.add_column(name, justify="right", no_wrap=True)
    statistics = {str(name): statistic for name, statistic in STATISTICS.items()}
    for it in comparison.differences[: min(_ROWS, changed)]:
        statistic = statistics[it.statistic]
        gone = math.isnan(it.difference)
        table.add_row(
            Text(head_name(it.layer, it.head), style=HEAD),
            statistic.name,
            statistic.show(it.here),
            statistic.show(it.there),
            "-" if gone else f"{it.difference:+.3g}",
            "-" if gone else f"{it.spreads:.1f}",
        )
    show(console, "Largest changes")
    console.print()
    show(console, table)
    console.print()
    rest = changed - _ROWS
    more = f"{rest:,} more changes in --json. " if rest > 0 else ""
    show(
        console,
        Text(
            f"{more}A spread is the statistic's standard deviation among all heads of both.",
            style=QUIET,
        ),
    )
