"""Exact pieces of the matrix of attention weights, from q, k and the forward pass' lse.

The matrix is never whole: a rectangle is computed where it is asked for, and maps and sums are
pooled while the matrix is swept block by block (`sweep.py`). Memory is that of the result and a
block; time is that of the cells asked for. Results are detached.

Shape suffixes: b batch, h head, q query row, k key column, r row bin, c column bin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import ArgumentError, DeviceError, DtypeError
from ..masks import Mask, MaskParts
from .cells import cells_at, visible_at
from .pooling import Bins, bin_edges, lift, uniform_mass
from .problem import ALiBi, Logits, checked_bins, describe_logits
from .scores import Rectangle, rectangle
from .sweep import finite_where_empty, mask_shape, sweep

Stage = Literal["scores", "capped", "biased", "softmax"]
Pool = Literal["mass", "peak", "lift"]
Places = slice | Sequence[int] | Tensor


def attention_weights(
    query: Tensor,
    key: Tensor,
    lse: Tensor | None,
    *,
    rows: Places,
    columns: Places,
    mask: Mask | Tensor | None = None,
    bias: Tensor | ALiBi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    stage: Stage = "softmax",
) -> Tensor:
    """The rectangle `rows` x `columns` of the matrix of attention weights.

    query [B, H, Lq, D], key [B, Hkv, Lk, D] and `lse` [B, H, Lq] of the same call of
    `attention_with_stats`, whose mask, bias, scale and softcap must be given again. `rows` and
    `columns` are slices, integers or 1-D integer tensors; negative ones count from the end.

    Returns [B, H, rows, columns] in float32 (float64 for float64 input), 0 where a key is hidden.
    `stage` stops earlier, each step after the one before: "scores" (scale * q.k), "capped"
    (softcap), "biased" (bias). These come before the mask, hence need no lse (it may be None)
    and show hidden keys too.

    Raises ArgumentError for an index outside the matrix, otherwise what `attention` raises.
    """
    if stage not in get_args(Stage):
        raise ArgumentError(f"stage must be one of {', '.join(get_args(Stage))}; got {stage!r}.")
    call = describe_logits(query, key, mask=mask, bias=bias, scale=scale, softcap=softcap)
    row_index = place_index(rows, call.query_length, "rows", query.device)
    column_index = place_index(columns, call.key_length, "columns", query.device)
    with torch.no_grad():
        if stage == "softmax":
            return weights_at(call, _checked_lse(call, lse), row_index, column_index)
        cells = rectangle_at(call, row_index, column_index)
        return {"scores": cells.qk, "capped": cells.capped, "biased": cells.biased}[stage]


@torch.no_grad()
def attention_map(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | ALiBi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bins: int = 64,
    pool: Pool = "mass",
) -> Tensor:
    """The whole matrix of weights, pooled to `bins` x `bins` cells, in O(N) memory.

    Arguments as for `attention_weights`. Bin i of n holds the places from `i N // n` up to,
    without, `(i + 1) N // n`; an axis shorter than `bins` has one place a bin. `pool` is

    * "mass": the mean over a row bin's queries of the weight that they give to all keys of a
      column bin. A row of the map sums to 1 at any length (less what a sink takes). Queries that
      see nothing are left out.
    * "peak": the largest single weight.
    * "lift": log2 of the mass over what a uniform head would give under the same mask, clipped
      to -6 .. 6.

    Returns [B, H, bins, bins] in float32 (float64 for float64 input); NaN marks cells in which
    the mask hides every pair. Raises what `attention` raises.
    """
    if pool not in get_args(Pool):
        raise ArgumentError(f"pool must be one of {', '.join(get_args(Pool))}; got {pool!r}.")
    call = describe_logits(query, key, mask=mask, bias=bias, scale=scale, softcap=softcap)
    return pooled_map(call, _checked_lse(call, lse), checked_bins(bins), pool)


@torch.no_grad()
def received_attention(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | ALiBi | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """What each key receives, in O(N) memory: `(received, mean)`, both [B, H, Lk].

    `received` is the sum of the weights that all queries give the key, `mean` the same over the
    number of queries that could see it, NaN where none could. Arguments as for
    `attention_weights`; float32 (float64 for float64 input). Raises what `attention` raises.
    """
    call = describe_logits(query, key, mask=mask, bias=bias, scale=scale, softcap=softcap)
    lse = _checked_lse(call, lse)
    shape = (call.batch, call.heads, call.key_length)
    received = torch.zeros(shape, dtype=call.compute_dtype, device=query.device)
    viewers = torch.zeros((*mask_shape(call), shape[2]), dtype=torch.long, device=query.device)
    for part in sweep(call, lse, bin_edges(call.query_length, 1)):
        received += part.sums.sum(-2)
        viewers += part.viewers.sum(-2)
    return received, received / viewers


@torch.no_grad()
def pooled_map(call: Logits, lse: Tensor, bins: int, pool: Pool = "mass") -> Tensor:
    """`attention_map` of a checked call."""
    row_edges = bin_edges(call.query_length, bins)
    column_bins = Bins(call.key_length, bins, lse.device)
    shape = (call.batch, call.heads, len(row_edges) - 1, column_bins.count)
    cells_bhrc = torch.empty(shape, dtype=call.compute_dtype, device=lse.device)
    for part in sweep(call, lse, row_edges, peaks=pool == "peak"):
        if part.peaks is not None:
            cells = column_bins.max(part.peaks)
        else:
            cells = column_bins.sum(part.sums) / part.live[..., None]
        hidden = column_bins.max(part.viewers) == 0
        cells_bhrc[:, :, part.bins] = cells.masked_fill(hidden, torch.nan)
    return lift(cells_bhrc, uniform_mass(call, bins)) if pool == "lift" else cells_bhrc


def weights_at(call: Logits, lse: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """`attention_weights` of a checked call, with index tensors: [B, H, rows, columns]."""
    cells = rectangle_at(call, rows, columns)
    lse_bhq = finite_where_empty(lse.detach()[:, :, rows, None].to(call.compute_dtype))
    # In place: the fresh pages of many heads' tiles cost more than the arithmetic.
    weights = cells.biased.detach().sub_(lse_bhq).exp_()
    return weights if cells.visible is None else weights.masked_fill_(~cells.visible, 0.0)


def top_keys(call: Logits, lse: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` keys to which each of these rows gives most, strongest first.

    Returns columns int64 and weights, both [B, H, rows, count], with column -1 and weight 0 where
    a row sees fewer keys; and the mean over heads of the rows' weights, [B, rows, Lk].
    """
    cells = rectangle_at(call, rows, torch.arange(call.key_length, device=rows.device))
    logits = cells.logits
    values, columns = logits.topk(min(count, call.key_length), dim=-1)
    lse_bhq = finite_where_empty(lse.detach()[:, :, rows, None].to(call.compute_dtype))
    weights = cells.hide(torch.exp(logits - lse_bhq))
    hidden = values == -torch.inf
    strongest = weights.gather(-1, columns).masked_fill(hidden, 0.0)
    return columns.masked_fill(hidden, -1), strongest, weights.mean(1)


def rectangle_at(call: Logits, rows: Tensor, columns: Tensor) -> Rectangle:
    """The cells of any rows and columns: those of a call that has no others."""
    parts = call.parts
    visible = None
    if not parts.hides_nothing:
        visible = visible_at(parts, rows, columns[None, None])
    taken = MaskParts(
        query_length=len(rows),
        key_length=len(columns),
        device=rows.device,
        query_positions=parts.query_position(slice(0, call.query_length))[:, 0, rows],
        key_positions=parts.key_position(slice(0, call.key_length))[:, 0, 0, columns],
        dense=visible,
    )
    bias = call.bias
    if isinstance(bias, Tensor):
        bias = cells_at(bias.detach(), rows, columns[None, None])
    selected = Logits(
        query=call.query.detach()[:, :, rows],
        key=call.key.detach()[:, :, columns],
        parts=taken,
        bias=bias,
        scale=call.scale,
        softcap=call.softcap,
    )
    return rectangle(selected, slice(0, len(rows)), slice(0, len(columns)))


def place_index(places: Places, length: int, name: str, device: torch.device) -> Tensor:
    """A slice, integers or an integer tensor as int64 indices in [0, length)."""
    if isinstance(places, slice):
        return torch.arange(*places.indices(length), device=device)
    index = torch.as_tensor(places, device=device)
    if index.numel() == 0:
        return torch.empty(0, dtype=torch.long, device=device)
    if index.dtype == torch.bool or index.is_floating_point() or index.is_complex():
        raise DtypeError(
            f"{name} must be a slice, integers or an integer tensor; got {index.dtype}. "
            f"For the True places of a bool tensor x write {name}=x.nonzero()[:, 0]."
        )
    if index.ndim != 1:
        raise ArgumentError(f"{name} must have one dimension; got shape {tuple(index.shape)}.")
    lowest, highest = int(index.min()), int(index.max())
    if lowest < -length or highest >= length:
        raise ArgumentError(
            f"{name} must lie between {-length} and {length - 1}, since this call has {length} of "
            f"them; got {lowest if lowest < -length else highest}."
        )
    return index.long() % length


def _checked_lse(call: Logits, lse: object) -> Tensor:
    if not isinstance(lse, Tensor) or not lse.is_floating_point():
        kind = lse.dtype if isinstance(lse, Tensor) else type(lse).__name__
        raise DtypeError(
            "lse must be the float tensor [B, H, Lq] that attention_with_stats returns; got "
            f"{kind}."
        )
    expected = (call.batch, call.heads, call.query_length)
    if tuple(lse.shape) != expected:
        raise ArgumentError(
            f"lse must be [B, H, Lq] = {list(expected)} for this query; got {list(lse.shape)}. "
            "Pass the lse of the same call of attention_with_stats."
        )
    if lse.device != call.query.device:
        raise DeviceError(f"lse is on {lse.device}, but query is on {call.query.device}.")
    return lse
