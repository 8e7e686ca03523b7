"""Fixed bins for each statistic, so that quantiles come from counts that add up over batches.

Edges never depend on the data: histograms of any two records can be added. A quantile is known up
to the width of the bin that holds it; beyond the outermost edges, up to the extremes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

Table = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]

BINS = 256


@dataclass(frozen=True)
class Scale:
    """A monotonous function in which bins have one width, for tensors, and its inverse."""

    name: str
    forward: Callable[[Tensor], Tensor]
    inverse: Callable[[Table], Table]


LINEAR = Scale("linear", lambda x: x, lambda x: x)
SINH = Scale("sinh", torch.asinh, np.sinh)
LOG = Scale("log", torch.log1p, np.expm1)


@dataclass(frozen=True)
class Bins:
    """`BINS` bins of one width on `scale`, from `low` to `high` there; the outer two are open."""

    scale: Scale
    low: float
    high: float

    @property
    def width(self) -> float:
        """The width of a bin on `scale`: for SINH and LOG about the relative width of large ones"""
        return (self.high - self.low) / BINS

    @cached_property
    def edges(self) -> Table:
        """The bins' edges in the statistic's unit: float64 [BINS + 1]."""
        return self.scale.inverse(np.linspace(self.low, self.high, BINS + 1))


_SHARE = Bins(LINEAR, 0.0, 1.0)
_LOGIT = Bins(SINH, -10.0, 10.0)  # of +-11,013
_KEYS = Bins(LOG, 0.0, 16.0)  # of 8.9 million keys

BINS_OF = {
    "entropy": Bins(LINEAR, 0.0, 16.0),  # nats: of 8.9 million keys of one weight
    "entropy_share": _SHARE,
    "max_weight": _SHARE,
    "mean_distance": _KEYS,
    "sink_mass": _SHARE,
    "participation": _KEYS,
    "previous_token": _SHARE,
    "first_key": _SHARE,
    "max_logit": _LOGIT,
    "max_qk": _LOGIT,
}
"""The bins of each statistic."""


def places(names: Sequence[str], values: Tensor) -> Tensor:
    """The bin of each of the values [statistics, ...]: int64; NaN has none, but gets one here."""
    places = torch.empty_like(values)
    for scale in (LINEAR, SINH, LOG):
        rows = [row for row, name in enumerate(names) if BINS_OF[name].scale is scale]
        if rows:
            bins = [BINS_OF[names[row]] for row in rows]
            low, width = (
                torch.tensor(numbers, dtype=values.dtype, device=values.device)
                for numbers in ([it.low for it in bins], [it.width for it in bins])
            )
            column = (len(rows), *(1,) * (values.ndim - 1))
            scaled = scale.forward(values[rows])
            places[rows] = (scaled - low.view(column)) / width.view(column)
    return places.nan_to_num_().clamp_(0, BINS - 1).long()


@dataclass(frozen=True, eq=False)
class Quantile:
    """A quantile of each head: it lies between `low` and `high`, `value` is where a bin whose
    queries spread evenly would have it. float64 [layers, heads], NaN where nothing was counted.
    """

    value: Table
    low: Table
    high: Table


def quantile(bins: Bins, counts: Counts, lowest: Table, highest: Table, share: float) -> Quantile:
    """The smallest value that at least `share` of the queries have at most.

    `counts` is [..., BINS], `lowest` and `highest` [...], the exact extremes.
    """
    total = counts.sum(-1)
    rank = np.clip(np.ceil(share * total), 1, None)
    until = counts.cumsum(-1)
    place = np.minimum((until < rank[..., None]).sum(-1), BINS - 1)
    inside = np.take_along_axis(counts, place[..., None], -1)[..., 0]
    before = np.take_along_axis(until, place[..., None], -1)[..., 0] - inside
    edges = bins.edges
    low = np.where(place == 0, lowest, np.maximum(lowest, edges[place]))
    high = np.where(place == BINS - 1, highest, np.minimum(highest, edges[place + 1]))
    none = total == 0
    low, high = np.where(none, np.nan, low), np.where(none, np.nan, high)
    passed = (rank - before) / np.maximum(inside, 1)
    return Quantile(low + passed * (high - low), low, high)
