"""Means, extremes and histograms of one layer's heads, streamed over calls.

Sums are in float64 and kept as arrays, so that they neither depend on how queries came in batches
nor on the mode (inference, autograd) in which they came.

Shape suffixes: s statistic, b batch, h head, q query row, r row of any sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .histogram import BINS, Counts, Table, places
from .statistics import MAXIMA, RowStatistics

# Rows whose statistics wait to be added up together.
_ROWS_TOGETHER = 512


@dataclass(frozen=True, eq=False)
class StatisticTotals:
    """One statistic of some heads; arrays [..., heads], `histogram` [..., heads, BINS].

    `count` queries were counted; `sum`, `lowest` and `highest` are of these, 0, inf and -inf where
    there were none.
    """

    count: Counts
    sum: Table
    lowest: Table
    highest: Table
    histogram: Counts

    @classmethod
    def of_none(cls, shape: tuple[int, ...]) -> StatisticTotals:
        """Heads of which no query was counted."""
        return cls(
            count=np.zeros(shape, np.int64),
            sum=np.zeros(shape),
            lowest=np.full(shape, np.inf),
            highest=np.full(shape, -np.inf),
            histogram=np.zeros((*shape, BINS), np.int64),
        )

    def spread(self, columns: Sequence[int], heads: int) -> StatisticTotals:
        """These heads at some columns of a table of `heads`, no query counted for the others."""
        whole = StatisticTotals.of_none((heads,))
        for name in self.arrays():
            getattr(whole, name)[list(columns)] = getattr(self, name)
        return whole

    def plus(self, other: StatisticTotals) -> StatisticTotals:
        """Those of both."""
        return StatisticTotals(
            count=self.count + other.count,
            sum=self.sum + other.sum,
            lowest=np.minimum(self.lowest, other.lowest),
            highest=np.maximum(self.highest, other.highest),
            histogram=self.histogram + other.histogram,
        )

    @property
    def mean(self) -> Table:
        """The mean over the queries that were counted; NaN where none was."""
        return np.where(self.count > 0, self.sum / np.maximum(self.count, 1), np.nan)

    def result(self, name: str) -> Table:
        """What stands for the statistic `name`: the mean, or for MAXIMA the largest; or NaN."""
        if name in MAXIMA:
            return np.where(self.count > 0, self.highest, np.nan)
        return self.mean

    @staticmethod
    def arrays() -> tuple[str, ...]:
        """The names of the arrays."""
        return tuple(item.name for item in fields(StatisticTotals))


@dataclass(eq=False)
class HeadTotals:
    """The totals of one layer.

    `tokens` counts the real queries, whichever heads they have, `texts` those that begin a text,
    and `rows` is the largest number of samples with a real query in one call.
    """

    tokens: int = 0
    texts: int = 0
    rows: int = 0
    _names: tuple[str, ...] = ()
    _all: StatisticTotals | None = None
    _queries: Any = 0
    _waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _rows_waiting: int = 0

    def add(self, rows: RowStatistics, heads: tuple[int, ...] | None = None) -> None:
        """Count the queries of one call; of `heads` alone, if given."""
        queries = rows.queries
        self.tokens += queries.tokens * rows.alike
        self.texts += queries.texts * rows.alike
        self.rows = max(self.rows, queries.rows * rows.alike)
        by_head = np.broadcast_to(queries.by_head * rows.alike, (rows.shape[1],))
        self._queries = self._queries + (by_head if heads is None else by_head[list(heads)])
        self._names = tuple(rows.values)
        if not self._names:
            return
        values = torch.stack([_chosen(it, heads) for it in rows.values.values()])
        counted = [_chosen(rows.counted[it].expand(rows.shape), heads) for it in self._names]
        # A decoding step has one row a sample: some of them are added up together.
        self._waiting.append((_by_row(values), _by_row(torch.stack(counted))))
        self._rows_waiting += rows.shape[0] * rows.shape[2]
        if self._rows_waiting >= _ROWS_TOGETHER:
            self._add_up()

    @property
    def queries(self) -> Counts:
        """How many queries were counted: int64 [H]."""
        counts: Counts = np.atleast_1d(np.asarray(self._queries, dtype=np.int64))
        return counts

    @property
    def texts_or_rows(self) -> int:
        """How many texts there were: those that began, but no fewer than there were at a time."""
        return max(self.texts, self.rows)

    @property
    def totals(self) -> dict[str, StatisticTotals]:
        """The totals of each statistic, arrays [H]."""
        self._add_up()
        return {name: self._of(place) for place, name in enumerate(self._names)}

    def result(self) -> dict[str, Tensor]:
        """Each statistic as float64 [H]: the mean, or for MAXIMA the largest; NaN for none."""
        return {name: torch.from_numpy(it.result(name)) for name, it in self.totals.items()}

    def _add_up(self) -> None:
        if self._waiting:
            values_shr, counted_shr = (
                torch.cat(parts, -1) for parts in zip(*self._waiting, strict=True)
            )
            new = _totals(self._names, values_shr.double(), counted_shr)
            self._all = new if self._all is None else self._all.plus(new)
            self._waiting.clear()
            self._rows_waiting = 0

    def _of(self, place: int) -> StatisticTotals:
        return StatisticTotals(
            *(getattr(self._all, array)[place] for array in StatisticTotals.arrays())
        )


def _chosen(values_bhq: Tensor, heads: tuple[int, ...] | None) -> Tensor:
    return values_bhq if heads is None else values_bhq[:, list(heads)]


def _by_row(values_sbhq: Tensor) -> Tensor:
    """[statistics, heads, rows], the rows of all samples one behind the other."""
    return values_sbhq.transpose(1, 2).flatten(2)


def _totals(names: Sequence[str], value_shr: Tensor, counted_shr: Tensor) -> StatisticTotals:
    """The totals of statistics s over rows r: arrays [s, H]."""
    statistics, heads, rows = value_shr.shape
    shape = (statistics, heads)
    if not rows:
        return StatisticTotals.of_none(shape)
    left_out_shr = ~counted_shr
    cells = statistics * heads * BINS
    offset_sh = BINS * torch.arange(statistics * heads, device=value_shr.device).view(shape)
    cell_shr = places(names, value_shr) + offset_sh[..., None]
    cell_shr = cell_shr.masked_fill(left_out_shr | value_shr.isnan(), cells)
    histogram = torch.bincount(cell_shr.flatten(), minlength=cells + 1)[:-1]
    return StatisticTotals(
        count=counted_shr.sum(-1).cpu().numpy(),
        sum=value_shr.masked_fill(left_out_shr, 0.0).sum(-1).cpu().numpy(),
        lowest=value_shr.masked_fill(left_out_shr, torch.inf).amin(-1).cpu().numpy(),
        highest=value_shr.masked_fill(left_out_shr, -torch.inf).amax(-1).cpu().numpy(),
        histogram=histogram.view(*shape, BINS).cpu().numpy(),
    )
