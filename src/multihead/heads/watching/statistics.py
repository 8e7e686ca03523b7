"""What each head does, query by query.

Definitions: `attention_with_stats` for those that the forward pass yields; and

* `entropy_share`: entropy over the log of the number of visible keys (a learned sink is one more),
  for queries that see more than one
* `previous_token`: weight on the key before the query's own, for queries that see it
* `first_key`: weight on the first key of the query's text, as `queries_of` names it
* `sink_mass`: share of the keys' weight on that key: the same without a learned sink

Shape suffixes: b batch, h head, q query row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...ops import library
from ...ops.diagonal import weights_along
from ...ops.problem import Problem
from .queries import Queries, has_other_firsts, queries_of, with_hiding_bias

# What to ask of the forward pass; `lse` is what the exact weights are made from.
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

_MADE_FROM = {
    "entropy_share": ("entropy",),
    "previous_token": ("lse",),
    "first_key": ("lse",),
    "sink_mass": ("sink_mass", "lse"),
}


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """Statistics of every query of a call, [B, H, Lq], and the queries that count for each."""

    values: Mapping[str, Tensor]
    counted: Mapping[str, Tensor]
    queries: Queries
    shape: tuple[int, int, int]

    @property
    def alike(self) -> int:
        """How many samples one row of `queries` stands for."""
        return self.shape[0] // max(1, self.queries.real.shape[0])


def checked_statistics(names: Sequence[str] | str | None) -> tuple[str, ...]:
    """The names in the order of STATISTICS, all for None.

    Raises ArgumentError for an unknown name, with the list of those there are.
    """
    if names is None:
        return STATISTICS
    names = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (names,)
    for name in names:
        if name not in STATISTICS:
            raise ArgumentError(f"Unknown statistic {name!r}; a head has {', '.join(STATISTICS)}.")
    return tuple(name for name in STATISTICS if name in names)


def asked_of_forward(names: Sequence[str]) -> tuple[str, ...]:
    """What the forward pass must yield for these statistics of heads."""
    needed = {part for name in names for part in _MADE_FROM.get(name, (name,))}
    return tuple(name for name in FROM_FORWARD if name in needed)


def row_statistics(
    problem: Problem,
    stats: Mapping[str, Tensor],
    *,
    self_attention: bool = True,
    names: Sequence[str] = STATISTICS,
) -> RowStatistics:
    """The statistics `names` of every query, from `stats`, which `asked_of_forward` lists.

    Those that the forward pass did not yield come from q, k and lse. Which queries count is said
    at `queries_of`.
    """
    given, problem = problem, with_hiding_bias(problem)
    queries = queries_of(problem, self_attention=self_attention)
    values = {name: stats[name] for name in names if name in stats}
    if "max_qk" in names and problem is not given:
        values["max_qk"] = _again(problem, "max_qk")  # the kernels count what such a bias hides
    counted = dict.fromkeys(names, queries.real)
    if "entropy_share" in names:
        outcomes_bhq = queries.keys + (problem.sinks is not None)
        log_bhq = outcomes_bhq.clamp(min=2).to(stats["entropy"].dtype).log()
        values["entropy_share"] = stats["entropy"] / log_bhq
        counted["entropy_share"] = queries.real & (outcomes_bhq > 1)
    columns = {"previous_token": queries.previous, "first_key": queries.first}
    columns = {name: column_bq for name, column_bq in columns.items() if name in names}
    if columns:
        columns_bqk = torch.stack(torch.broadcast_tensors(*columns.values()), -1)
        weights_bhqk, seen_bhqk = weights_along(problem, stats["lse"], columns_bqk)
        values |= dict(zip(columns, weights_bhqk.unbind(-1), strict=True))
        if "previous_token" in columns:
            counted["previous_token"] = queries.real & seen_bhqk[..., 0]
    if "sink_mass" in names and has_other_firsts(problem):
        values["sink_mass"] = _first_share(problem, stats["lse"], queries)
    shape = (problem.batch, problem.heads, problem.query_length)
    return RowStatistics(values, counted, queries, shape)


def _first_share(problem: Problem, lse_bhq: Tensor, queries: Queries) -> Tensor:
    """The share of the keys' weight on each query's first key, where the kernels name another."""
    if problem.sinks is not None:
        lse_bhq = _again(replace(problem, sinks=None), "lse")
    share_bhq1, _ = weights_along(problem, lse_bhq, queries.first[..., None])
    return share_bhq1[..., 0]


def _again(problem: Problem, name: str) -> Tensor:
    """One statistic of a call that differs a little from the one that was computed."""
    alone = replace(problem, stats=(name,), bins=None, dropout=None)
    return library.run(alone, "auto")[1][name]
