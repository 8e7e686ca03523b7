"""What each head does, query by query and on the mean.

Definitions: `attention_with_stats` for those that the forward pass yields; and

* `entropy_share`: entropy over the log of the number of visible keys (a learned sink is one more),
  for queries that see more than one
* `previous_token`: weight on the key before the query's own, for queries that see it
* `first_key`: weight on the sequence's first key (its first visible one under padding)

Shape suffixes: b batch, h head, q query row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..ops.diagonal import weights_along
from ..ops.problem import Problem
from ..ops.sweep import visible_keys

# Asked of the forward pass; `lse` is what the exact weights are made from.
FROM_FORWARD = (
    "lse",
    "entropy",
    "max_logit",
    "max_qk",
    "max_weight",
    "mean_distance",
    "sink_mass",
    "participation",
)
MEANS = (
    "entropy",
    "entropy_share",
    "max_weight",
    "mean_distance",
    "sink_mass",
    "participation",
    "previous_token",
    "first_key",
)
MAXIMA = ("max_logit", "max_qk")
STATISTICS = (*MEANS, *MAXIMA)


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """STATISTICS of every query of a call, [B, H, Lq], and the queries that count for each."""

    values: Mapping[str, Tensor]
    counted: Mapping[str, Tensor]


def row_statistics(
    problem: Problem, stats: Mapping[str, Tensor], *, self_attention: bool = True
) -> RowStatistics:
    """STATISTICS of every query, from what the forward pass yielded and from q, k and lse.

    Queries that see nothing do not count, and neither do those of padding: in self-attention,
    queries whose own key is hidden by a KeyPadding mask.
    """
    first_bq, previous_bq = _named_columns(problem)
    first_key_bhq, _ = weights_along(problem, stats["lse"], first_bq)
    previous_bhq, sees_previous_bhq = weights_along(problem, stats["lse"], previous_bq)
    keys_bhq = visible_keys(problem)
    outcomes_bhq = keys_bhq + (problem.sinks is not None)
    several_bhq = outcomes_bhq > 1
    share_bhq = stats["entropy"] / outcomes_bhq.clamp(min=2).to(stats["entropy"].dtype).log()
    real_bhq = keys_bhq > 0
    if self_attention:
        real_bhq = real_bhq & _own_key_visible(problem)
    values = {
        **{name: stats[name] for name in FROM_FORWARD if name != "lse"},
        "entropy_share": share_bhq,
        "previous_token": previous_bhq,
        "first_key": first_key_bhq,
    }
    counted = dict.fromkeys(values, real_bhq)
    counted["entropy_share"] = real_bhq & several_bhq
    counted["previous_token"] = real_bhq & sees_previous_bhq
    return RowStatistics(values, counted)


@dataclass(eq=False)
class HeadTotals:
    """Means and maxima over the queries of one layer's heads, streamed over calls.

    Sums are in float64, so that the mean does not depend on how queries came in batches.
    """

    _sums: dict[str, Tensor] = field(default_factory=dict)
    _counts: dict[str, Tensor] = field(default_factory=dict)
    _maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, rows: RowStatistics) -> None:
        """Count the queries of one call."""
        for name, value_bhq in rows.values.items():
            counted_bhq = rows.counted[name].expand_as(value_bhq)
            if name in MAXIMA:
                highest_h = value_bhq.masked_fill(~counted_bhq, -torch.inf).amax((0, 2)).double()
                known = self._maxima.get(name)
                self._maxima[name] = highest_h if known is None else known.maximum(highest_h)
            else:
                sum_h = value_bhq.double().masked_fill(~counted_bhq, 0.0).sum((0, 2))
                self._sums[name] = sum_h + self._sums.get(name, 0.0)
            self._counts[name] = counted_bhq.sum((0, 2)) + self._counts.get(name, 0)

    @property
    def queries(self) -> Tensor:
        """How many queries were counted: int64 [H]."""
        return self._counts["entropy"]

    def result(self) -> dict[str, Tensor]:
        """STATISTICS as float64 [H]: means, or for MAXIMA the largest; NaN where none counted."""
        values = {}
        for name in STATISTICS:
            if name in MAXIMA:
                none = self._counts[name] == 0
                values[name] = self._maxima[name].masked_fill(none, torch.nan)
            else:
                values[name] = self._sums[name] / self._counts[name]
        return values


def _named_columns(problem: Problem) -> tuple[Tensor, Tensor]:
    """The columns [B|1, Lq] of each query's first key and of the key before its own.

    Under explicit key positions columns have no order, and no key is named as the one before.
    """
    parts = problem.parts
    position_bq = parts.query_position(slice(0, problem.query_length))[:, 0]
    first = torch.as_tensor(parts.first, device=position_bq.device).long().reshape(-1, 1)
    first_bq = first.expand(-1, problem.query_length)
    if parts.key_positions is not None:
        return first_bq, torch.full_like(position_bq, -1)
    return first_bq, position_bq - 1


def _own_key_visible(problem: Problem) -> Tensor:
    """False for queries whose own key a KeyPadding mask hides: bool [B|1, 1, Lq]."""
    parts = problem.parts
    position_bq = parts.query_position(slice(0, problem.query_length))[:, 0]
    if parts.key_visible is None or parts.key_positions is not None:
        return torch.ones_like(position_bq, dtype=torch.bool)[:, None]
    batch = max(position_bq.shape[0], parts.key_visible.shape[0])
    position_bq = position_bq.expand(batch, -1)
    inside_bq = (position_bq >= 0) & (position_bq < problem.key_length)
    column_bq = position_bq.clamp(0, max(0, problem.key_length - 1))
    own_bq = parts.key_visible.expand(batch, -1).gather(-1, column_bq)
    return (own_bq | ~inside_bq)[:, None]
