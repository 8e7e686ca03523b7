"""Means, extremes and histograms of one layer's heads, streamed over calls.

Sums are in float64 and kept as arrays, so that they neither depend on how queries came in batches
nor on the mode (inference, autograd) in which they came.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .histogram import BINS, BINS_OF, Counts, Table
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
    _totals: dict[str, StatisticTotals] = field(default_factory=dict)
    _queries: Any = 0

    def add(self, rows: RowStatistics, heads: tuple[int, ...] | None = None) -> None:
        """Count the queries of one call; of `heads` alone, if given."""
        real_bhq = rows.queries.real
        self.tokens += int(real_bhq.any(1).sum()) * rows.alike
        self.texts += int(rows.queries.starts.sum()) * rows.alike
        self.rows = max(self.rows, int(real_bhq.any(-1).any(-1).sum()) * rows.alike)
        counted_bhq = real_bhq.expand(rows.shape)
        self._queries = self._queries + _chosen(counted_bhq, heads).sum((0, 2)).cpu().numpy()
        for name, value_bhq in rows.values.items():
            counted_bhq = rows.counted[name].expand(rows.shape)
            new = _totals(name, _chosen(value_bhq, heads), _chosen(counted_bhq, heads))
            known = self._totals.get(name)
            self._totals[name] = new if known is None else known.plus(new)

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
        return dict(self._totals)

    def result(self) -> dict[str, Tensor]:
        """Each statistic as float64 [H]: the mean, or for MAXIMA the largest; NaN for none."""
        return {name: torch.from_numpy(total.result(name)) for name, total in self._totals.items()}


def _chosen(values_bhq: Tensor, heads: tuple[int, ...] | None) -> Tensor:
    return values_bhq if heads is None else values_bhq[:, list(heads)]


def _totals(name: str, value_bhq: Tensor, counted_bhq: Tensor) -> StatisticTotals:
    heads = value_bhq.shape[1]
    left_out_bhq = ~counted_bhq
    value_bhq = value_bhq.double()
    if not value_bhq.numel():
        return _nothing(heads)
    bin_bhq = BINS_OF[name].place(value_bhq)
    cell_bhq = bin_bhq + BINS * torch.arange(heads, device=bin_bhq.device)[:, None]
    cell_bhq = cell_bhq.masked_fill(left_out_bhq | value_bhq.isnan(), BINS * heads)
    histogram = torch.bincount(cell_bhq.flatten(), minlength=BINS * heads + 1)[:-1]
    return StatisticTotals(
        count=counted_bhq.sum((0, 2)).cpu().numpy(),
        sum=value_bhq.masked_fill(left_out_bhq, 0.0).sum((0, 2)).cpu().numpy(),
        lowest=value_bhq.masked_fill(left_out_bhq, torch.inf).amin((0, 2)).cpu().numpy(),
        highest=value_bhq.masked_fill(left_out_bhq, -torch.inf).amax((0, 2)).cpu().numpy(),
        histogram=histogram.view(heads, BINS).cpu().numpy(),
    )


def _nothing(heads: int) -> StatisticTotals:
    return StatisticTotals(
        count=np.zeros(heads, np.int64),
        sum=np.zeros(heads),
        lowest=np.full(heads, np.inf),
        highest=np.full(heads, -np.inf),
        histogram=np.zeros((heads, BINS), np.int64),
    )
