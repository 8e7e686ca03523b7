"""Attention rollout: how far rows of attention reach when layers pass on what they have read.

Abnar, Zuidema 2020, section 3: with A the mean of a layer's heads and a residual share a, layer l
turns inputs to outputs by a I + (1 - a) A; the product of these matrices over the layers tells how
much of a position's state came along from each input token. A row of that product needs no
product of matrices: the row vector passes through the layers from the top down, and each layer's
part is formed block by block from its queries, keys and lse. Nothing of size N x N is kept.

Shape suffixes: m row that is asked for, q query, k key, h head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ArgumentError
from ...nn import Pruned
from ...ops.problem import Problem
from ...ops.sweep import sweep
from ...ops.weights import Places, place_index, weights_at
from ..forward import LayerObserver, one_text, run
from ..watching.lazy_weights import Copies, KeptCall
from ..watching.numbers import heads_before, pruned_layers

# Weights formed at a time: 4M float32 are 16 MiB.
_BLOCK_ELEMENTS = 1 << 22
# The native sweep forms all weights again for each row, in a quarter of the time of torch's blocks.
_FEW_ROWS = 3


@dataclass(frozen=True, eq=False)
class Rollout:
    """How much of each input token attention carries to some rows.

    Attributes:
        rows: int64 [rows], the positions that were asked for.
        shares: [rows, N], the share of each input token; float32 (float64 for a float64 model).
            Rows sum to 1 less what learned sinks took on the way.
        residual: the share that each layer passes on without attention.
        layers: the attention modules by name, the lowest first.
        heads: for each layer the heads whose mean was taken, by their first numbers.
    """

    rows: Tensor
    shares: Tensor = field(repr=False)
    residual: float
    layers: tuple[str, ...]
    heads: tuple[tuple[int, ...], ...]

    def top(self, count: int = 5) -> tuple[Tensor, Tensor]:
        """The tokens with the largest shares, int64 [rows, count], and these, largest first."""
        shares, tokens = self.shares.topk(min(count, self.shares.shape[1]))
        return tokens, shares


@torch.no_grad()
def rollout(
    model: nn.Module,
    input_ids: Tensor | Sequence[int],
    rows: int | Places,
    *,
    residual: float = 0.5,
    heads: Mapping[int, Sequence[int]] | None = None,
) -> Rollout:
    """Roll the attention of chosen rows out to the input tokens (Abnar, Zuidema 2020).

    Args:
        model: a transformers model or one of ours with one stack of layers.
        input_ids: the tokens of one text, [N] or [1, N].
        rows: positions at the top whose shares are wanted: an int, a slice, integers or an integer
            tensor, negative ones from the end.
        residual: the share that the residual stream keeps at each layer; the paper has 0.5. At 0
            attention alone passes on, at 1 nothing moves.
        heads: for some layers (numbers in the order in which they run) the heads whose mean is
            taken, by the numbers that they had before any were pruned; of the others, and unless
            given of all, that of all heads that are left.

    Memory is O(layers x N x width) for queries and keys and O(rows x N) beside them; time is that
    of one pass over all pairs below the highest row. Rollout follows weights alone: it knows
    neither values nor feed-forward layers, and in a causal model shares drift to the first tokens
    with depth, since all rows see these. What it gives is a description, not an importance.

    Raises:
        ArgumentError: tokens, rows, a residual, layers or heads that there are not.
        ModelError: a model that cannot be run or watched so, or that shortens the text.
    """
    if not 0 <= residual <= 1:
        raise ArgumentError(
            f"residual must be the share from 0 to 1 that passes a layer unchanged; got {residual}."
        )
    token_ids = one_text(model, input_ids)
    length = token_ids.shape[1]
    chosen = [int(rows)] if isinstance(rows, int | np.integer) else rows
    index_m = place_index(chosen, length, "rows", token_ids.device)
    recorder = _Recorder((1, length))
    run(model, token_ids, recorder)
    calls = recorder.calls
    pruned = pruned_layers(model)
    had = [
        heads_before(pruned.get(name), kept.call.heads)
        for name, kept in zip(recorder.layers, calls, strict=True)
    ]
    taken = _checked_heads(had, heads or {})
    share_mk = torch.zeros(
        (len(index_m), length), dtype=calls[-1].call.compute_dtype, device=token_ids.device
    )
    share_mk[torch.arange(len(index_m)), index_m] = 1.0
    for kept, before, chosen_heads in zip(calls[::-1], had[::-1], taken[::-1], strict=True):
        if not chosen_heads:
            continue  # of a layer without heads the stream alone is left
        places = [before.kept.index(head) for head in chosen_heads]
        attended_mk = passed_down(kept, share_mk, places)
        share_mk = residual * share_mk + (1 - residual) * attended_mk
    return Rollout(
        rows=index_m,
        shares=share_mk,
        residual=float(residual),
        layers=tuple(recorder.layers),
        heads=taken,
    )


def passed_down(kept: KeptCall, share_mq: Tensor, heads: Sequence[int]) -> Tensor:
    """`share_mq @ A`, [m, k], where A [q, k] is the mean of `heads` of a call of one sample.

    `heads` are places among those of the call.

    Queries without a share in any row are not looked at.
    """
    passed_mk = share_mq.new_zeros(len(share_mq), kept.call.key_length)
    queries = (share_mq != 0).any(0).nonzero()[:, 0]
    if not len(queries):
        return passed_mk
    one_way = _by_sweeps if len(share_mq) <= _FEW_ROWS else _by_blocks
    one_way(kept, share_mq, list(heads), queries, passed_mk)
    return passed_mk


def _by_sweeps(
    kept: KeptCall, share_mq: Tensor, heads: list[int], queries: Tensor, passed_mk: Tensor
) -> None:
    """One sweep for each row: its sums of e^(s - lse) are of share e^(s - lse) for another lse."""
    edges = [int(queries[0]), int(queries[-1]) + 1]
    for row, share_q in enumerate(share_mq):
        for part in sweep(kept.call, kept.lse - share_q.log(), edges):
            passed_mk[row] += part.sums[0, heads, 0].mean(0)


def _by_blocks(
    kept: KeptCall, share_mq: Tensor, heads: list[int], queries: Tensor, passed_mk: Tensor
) -> None:
    """A block of weights, and its product with all rows at once."""
    call = kept.call
    for block in queries.split(max(1, _BLOCK_ELEMENTS // (call.heads * call.key_length))):
        begin, end = call.parts.key_bounds(slice(int(block[0]), int(block[-1]) + 1))
        columns = torch.arange(begin, end, device=block.device)
        weights_hqk = weights_at(call, kept.lse, block, columns)[0]
        if len(heads) < call.heads:
            weights_hqk = weights_hqk[heads]
        passed_mk[:, begin:end] += share_mq[:, block] @ weights_hqk.mean(0).to(share_mq.dtype)


class _Recorder(LayerObserver):
    """Keeps queries, keys and lse of every layer."""

    def __init__(self, shape: tuple[int, int]) -> None:
        super().__init__(shape)
        self.calls: list[KeptCall] = []
        self._copies = Copies()

    def wants(self, problem: Problem) -> tuple[str, ...]:
        return ("lse",)

    def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
        self.next_layer(problem)
        self.calls.append(KeptCall.of(problem, stats["lse"], self._copies))


def _checked_heads(
    had: Sequence[Pruned], heads: Mapping[int, Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The heads of every layer: those named, else all that are left."""
    for layer, named in heads.items():
        if layer not in range(len(had)):
            raise ArgumentError(
                f"heads names layer {layer!r}; the model has layers 0 to {len(had) - 1}."
            )
        wrong = [it for it in named if it not in had[layer].kept]
        if wrong or not len(named):
            gone = had[layer].heads
            raise ArgumentError(
                f"heads[{layer}] must name heads from 0 to {had[layer].num_heads - 1}, at least "
                f"one{f', none of the pruned {list(gone)}' if gone else ''}; got {list(named)}."
            )
    return tuple(
        tuple(sorted(set(map(int, heads[layer])))) if layer in heads else before.kept
        for layer, before in enumerate(had)
    )
