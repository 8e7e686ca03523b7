"""What an inspection keeps of each layer, taken from q, k and lse while the model runs.

Of each layer stay statistics, pooled maps and a few rows; nothing of size N x N is formed, and no
reference to q, k, v or the layer's output is kept.

Shape suffixes: h head, q query row, k key column, m sampled row, r row bin.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ModelError
from ...ops import dispatch
from ...ops.pooling import Bins, bin_edges, uniform_mass
from ...ops.problem import Problem
from ...ops.sweep import sweep
from ...ops.weights import top_keys
from ..watching.statistics import FROM_FORWARD, row_statistics
from ..watching.totals import HeadTotals
from .dense_error import DenseError, dense_error

MAP_BINS = 64
STRIP_BINS = 128
TOP_KEYS = 8
LINKS = 5
SAMPLED_ROWS = 16
STRIPS = ("entropy", "max_weight", "mean_distance", "sink_mass")

# Sinks are known only when the last layer has run, but their strips can be taken only while a layer
# runs: each keeps those of the columns that receive most in one of its heads. What a layer does not
# keep receives less than all of these, at most a 256th of the heads' weight.
SINK_CANDIDATES = 256

_ERROR_LAYERS = 4
_ERROR_ROWS = 8

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Call:
    """What the first layer's call tells of all of them."""

    heads: int
    kv_heads: int
    visible_pairs: int
    backend: str
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Sweep:
    """What one pass over the whole matrix of a layer leaves; float32 but for `candidates`.

    `mass` and `peak` [H, r, r]; `uniform` [H|1, r, r] as `ops.pooling.uniform_mass`; `received`
    [H, STRIP_BINS], `mean` [H, N] the mean weight that each key receives from all queries;
    `candidates` int64 [C], the columns whose share by row bin, `strips` [H, r, C], is kept.
    """

    mass: Tensor
    peak: Tensor
    uniform: Tensor
    received: Tensor
    mean: Tensor
    candidates: Tensor
    strips: Tensor


@dataclass(frozen=True, eq=False)
class Layer:
    """What is kept of a layer: statistics [H], strips [H, bins], strongest keys of sampled rows.

    `link_keys` and `link_weights` are [m, H, LINKS]; `token_keys` and `token_weights`
    [H, TOP_KEYS] are the chosen token's, `mean_keys` and `mean_weights` [TOP_KEYS] those of the
    mean of its heads.
    """

    statistics: Mapping[str, Tensor]
    strips: Mapping[str, Tensor]
    link_keys: Tensor
    link_weights: Tensor
    token_keys: Tensor
    token_weights: Tensor
    mean_keys: Tensor
    mean_weights: Tensor
    error: DenseError | None
    sweep: Sweep | None


class Capture:
    """Sits in the observer slot while the model runs once over one text."""

    def __init__(
        self,
        length: int,
        token: int,
        *,
        layers: int,
        maps: bool,
        unequal: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.layers: list[Layer] = []
        self.first: Call | None = None
        self.seconds = 0.0
        self.rows = sorted({token, *torch.linspace(1, length - 1, SAMPLED_ROWS).long().tolist()})
        self._length = length
        self._token = token
        self._expected_layers = layers
        self._checked_layers = _spread(layers, _ERROR_LAYERS)
        self._maps = maps
        self._unequal = unequal  # whether layers may have different numbers of heads
        self._progress = progress
        self._row_edges = bin_edges(length, MAP_BINS)
        self._map_bins = Bins(length, MAP_BINS)
        self._strip_bins = Bins(length, STRIP_BINS)
        self._uniform: dict[tuple[int | None, ...], Tensor] = {}

    def wants(self, problem: Problem) -> tuple[str, ...]:
        return FROM_FORWARD

    @torch.no_grad()
    def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
        began = time.perf_counter()
        self._check(problem)
        self.first = self.first or _call(problem)
        rows = row_statistics(problem, stats)
        totals = HeadTotals()
        totals.add(rows)
        sampled = torch.tensor(self.rows, device=out.device)
        keys_bhmk, weights_bhmk, mean_bmk = top_keys(problem, stats["lse"], sampled, TOP_KEYS)
        token = self.rows.index(self._token)
        mean_weights, mean_keys = mean_bmk[0, token].topk(keys_bhmk.shape[-1])
        checked = len(self.layers) in self._checked_layers
        self.layers.append(
            Layer(
                statistics=totals.result(),
                strips={
                    name: self._strip_bins.mean(rows.values[name][0]).float() for name in STRIPS
                },
                link_keys=keys_bhmk[0, ..., :LINKS].transpose(0, 1),
                link_weights=weights_bhmk[0, ..., :LINKS].transpose(0, 1).float(),
                token_keys=keys_bhmk[0, :, token],
                token_weights=weights_bhmk[0, :, token].float(),
                mean_keys=mean_keys.masked_fill(mean_weights == 0, -1),
                mean_weights=mean_weights.float(),
                error=dense_error(problem, out, self._checked_rows()) if checked else None,
                sweep=self._sweep(problem, stats["lse"]) if self._maps else None,
            )
        )
        if self._progress is not None:
            self._progress(len(self.layers), self._expected_layers)
        self.seconds += time.perf_counter() - began

    def _check(self, problem: Problem) -> None:
        length, first = self._length, self.first
        shape = (problem.batch, problem.query_length, problem.key_length)
        if shape != (1, length, length):
            raise ModelError(
                f"An inspection reads {length} tokens at once, but a layer attended from "
                f"{problem.query_length} queries to {problem.key_length} keys in a batch of "
                f"{problem.batch}: models that shorten, split or repeat the text are not supported."
            )
        if first is not None and problem.heads != first.heads and not self._unequal:
            raise ModelError(
                f"The layers of this model have different numbers of heads ({first.heads} and "
                f"{problem.heads}), which is not supported."
            )

    def _checked_rows(self) -> Tensor:
        return torch.tensor(_spread(self._length, _ERROR_ROWS))

    def _sweep(self, problem: Problem, lse: Tensor) -> Sweep:
        row_edges, key_bins = self._row_edges, self._map_bins
        shape_hrk = (problem.heads, key_bins.count, self._length)
        share_hrk = torch.empty(shape_hrk, dtype=problem.compute_dtype)
        peak_hrc = torch.empty((*shape_hrk[:2], key_bins.count))
        viewers_hk = torch.zeros((1, self._length), dtype=torch.long)
        for part in sweep(problem, lse, row_edges, peaks=True):
            assert part.peaks is not None
            share_hrk[:, part.bins] = part.sums[0] / part.live[0, ..., None]
            peak_hrc[:, part.bins] = key_bins.max(part.peaks[0])
            viewers_hk = viewers_hk + part.viewers[0].sum(-2)
        uniform = self._uniform_mass(problem)
        hidden_hrc = uniform.isnan()
        received_hk = torch.tensor(row_edges).diff().to(share_hrk.dtype) @ share_hrk
        mean_hk = received_hk / self._length
        often_seen_k = (viewers_hk >= self._length / 2).any(0)
        ranked = torch.where(often_seen_k, mean_hk.amax(0), -1.0).argsort(descending=True)
        ranked = ranked[:SINK_CANDIDATES]
        candidates = ranked[often_seen_k[ranked]]
        return Sweep(
            mass=key_bins.sum(share_hrk).masked_fill(hidden_hrc, torch.nan).float(),
            peak=peak_hrc.masked_fill(hidden_hrc, torch.nan),
            uniform=uniform,
            received=self._strip_bins.mean(received_hk / viewers_hk.clamp(min=1)).float(),
            mean=mean_hk.float(),
            candidates=candidates,
            strips=share_hrk[..., candidates].float(),
        )

    def _uniform_mass(self, problem: Problem) -> Tensor:
        """Of the layer's mask; the same tensor again where layers share a mask of plain numbers."""
        key = _plain_mask(problem)
        if key is None or key not in self._uniform:
            uniform = uniform_mass(problem, MAP_BINS)[0].float()
            if key is None:
                return uniform
            self._uniform[key] = uniform
        return self._uniform[key]


def _call(problem: Problem) -> Call:
    return Call(
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        visible_pairs=problem.parts.count(),
        backend=dispatch.choose(problem).NAME,
        dtype=problem.query.dtype,
    )


def _plain_mask(problem: Problem) -> tuple[int | None, ...] | None:
    """What tells a mask without tensors from others like it; None for one that has tensors."""
    values = [value for name, value in vars(problem.parts).items() if name != "device"]
    if isinstance(problem.bias, Tensor) or any(isinstance(value, Tensor) for value in values):
        return None
    return tuple(values)


def _spread(length: int, count: int) -> list[int]:
    """At most `count` places over `length`, the first and the last among them."""
    return sorted(set(torch.linspace(0, length - 1, count).round().long().tolist()))
