"""Means, extremes and histograms of one layer's heads, streamed over calls.

Sums are in float64 and kept as arrays, so that they neither depend on how queries came in batches
nor on the mode (inference, autograd) in which they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .histogram import BINS, Counts, Table, places
from .statistics import MAXIMA, RowStatistics


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

    def add(self, rows: RowStatistics, heads: tuple[int, ...] | None = None) -> None:
        """Count the queries of one call; of `heads` alone, if given."""
        real_bhq = rows.queries.real
        self.tokens += int(real_bhq.any(1).sum()) * rows.alike
        self.texts += int(rows.queries.starts.sum()) * rows.alike
        self.rows = max(self.rows, int(real_bhq.any(-1).any(-1).sum()) * rows.alike)
        counted_bhq = _chosen(real_bhq.expand(rows.shape), heads)
        self._queries = self._queries + counted_bhq.sum((0, 2)).cpu().numpy()
        self._names = tuple(rows.values)
        if self._names:
            values = [_chosen(it, heads).double() for it in rows.values.values()]
            counted = [_chosen(rows.counted[it].expand(rows.shape), heads) for it in self._names]
            new = _totals(self._names, torch.stack(values), torch.stack(counted))
            self._all = new if self._all is None else self._all.plus(new)

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
        return {name: self._of(place) for place, name in enumerate(self._names)}

    def result(self) -> dict[str, Tensor]:
        """Each statistic as float64 [H]: the mean, or for MAXIMA the largest; NaN for none."""
        return {name: torch.from_numpy(it.result(name)) for name, it in self.totals.items()}

    def _of(self, place: int) -> StatisticTotals:
        return StatisticTotals(
            *(getattr(self._all, array)[place] for array in StatisticTotals.arrays())
        )


def _chosen(values_bhq: Tensor, heads: tuple[int, ...] | None) -> Tensor:
    return values_bhq if heads is None else values_bhq[:, list(heads)]


def _totals(names: Sequence[str], value_sbhq: Tensor, counted_sbhq: Tensor) -> StatisticTotals:
    """The totals of statistics s, arrays [s, H]: all at once, since a decoding step has few rows
    and pays for each operation.
    """
    statistics, batch, heads, length = value_sbhq.shape
    shape = (statistics, heads)
    if batch == 0 or length == 0:
        return StatisticTotals(
            count=np.zeros(shape, np.int64),
            sum=np.zeros(shape),
            lowest=np.full(shape, np.inf),
            highest=np.full(shape, -np.inf),
            histogram=np.zeros((*shape, BINS), np.int64),
        )
    left_out_sbhq = ~counted_sbhq
    cells = statistics * heads * BINS
    offset_sh = BINS * torch.arange(statistics * heads, device=value_sbhq.device).view(shape)
    cell_sbhq = places(names, value_sbhq) + offset_sh[:, None, :, None]
    cell_sbhq.masked_fill_(left_out_sbhq | value_sbhq.isnan(), cells)
    histogram = torch.bincount(cell_sbhq.flatten(), minlength=cells + 1)[:-1]
    return StatisticTotals(
        count=counted_sbhq.sum((1, 3)).cpu().numpy(),
        sum=value_sbhq.masked_fill(left_out_sbhq, 0.0).sum((1, 3)).cpu().numpy(),
        lowest=value_sbhq.masked_fill(left_out_sbhq, torch.inf).amin((1, 3)).cpu().numpy(),
        highest=value_sbhq.masked_fill(left_out_sbhq, -torch.inf).amax((1, 3)).cpu().numpy(),
        histogram=histogram.view(*shape, BINS).cpu().numpy(),
    )
