"""The ranked table: the heads at both ends of one statistic, with their other statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from multihead.cli.statistics import RANKED, STATISTICS, StatisticName
from multihead.cli.terminal.style import HEAD, QUIET, head_name, plain_table, show

_END = 5


class HeadStatistics(Protocol):
    """What has a table [layers, heads] of each statistic: an inspection or a record."""

    @property
    def statistics(self) -> Mapping[str, Any]:
        """By name; NaN where there is no head."""


def ranked(inspection: HeadStatistics, name: StatisticName) -> list[tuple[int, int]]:
    """All (layer, head), the largest value of `name` first; heads without a value last."""
    values = np.asarray(inspection.statistics[name], dtype=np.float64)
    order = np.argsort(np.where(np.isnan(values), np.inf, -values), axis=None, kind="stable")
    return [(int(index) // values.shape[1], int(index) % values.shape[1]) for index in order]


def print_ranking(console: Console, inspection: HeadStatistics, sort: StatisticName) -> None:
    """Print the first and last heads by `sort`; all of them where they are few."""
    statistics = inspection.statistics
    values = statistics[sort]
    places = ranked(inspection, sort)
    order = [place for place in places if not np.isnan(values[place])] or places
    columns = [sort, *(name for name in RANKED if name != sort)]
    table = plain_table()
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("head", no_wrap=True)
    for name in columns:
        title = "\n".join(STATISTICS[name].title).rstrip()
        table.add_column(
            Text(title, style="bold" if name == sort else QUIET, justify="right"),
            justify="right",
            no_wrap=True,
            style="bold" if name == sort else "",
        )
    few = len(order) <= 2 * _END + 1
    for rank, place in enumerate(order):
        if few or rank < _END or rank >= len(order) - _END:
            _add(table, statistics, rank + 1, place, columns)
        elif rank == _END:
            table.add_row(*[Text("⋮", style=QUIET)] * (len(columns) + 2))
    ends = "" if few else f": first and last {_END} of {len(order)} heads"
    show(
        console,
        Text.assemble(
            f"Ranked by {STATISTICS[sort].name}{ends}", ("; --sort names another", QUIET)
        ),
    )
    console.print()
    show(console, table)
    console.print()


def _add(
    table: Table,
    statistics: Mapping[str, Any],
    rank: int,
    place: tuple[int, int],
    columns: list[StatisticName],
) -> None:
    shown = (STATISTICS[n].show(float(statistics[n][place])) for n in columns)
    table.add_row(str(rank), Text(head_name(*place), style=HEAD), *shown)
