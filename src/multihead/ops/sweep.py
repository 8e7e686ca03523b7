"""The whole matrix of weights, formed again block by block from q, k and lse, and never kept.

`sweep` goes through the query rows once and hands out, for each bin of rows, what every key got
from them. Maps, what a key receives and the strips of single keys are all made from these sums,
so that one pass feeds them all. Blocks of keys that the mask hides from a bin are never formed.

Shape suffixes: b batch, h head, q query row, k key column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import ALiBi, Logits
from .scores import bias_rectangle, distances, grouped_matmul

# Weights formed at a time. 512k float32 are 2 MiB: the block stays in a core's cache between the
# product, the exponential and the sums, and is large enough to hide what a torch call costs.
BLOCK_ELEMENTS = 1 << 19
BLOCK_ROWS = 256
_BLOCK_COLUMNS = 1024


@dataclass(frozen=True, eq=False)
class RowBin:
    """What the keys got from one bin of query rows.

    `sums` and `peaks` are [B, H, Lk], the sum and the largest of the weights, 0 where a key is
    hidden from all of the rows; `peaks` is None unless asked for. `viewers` counts the rows that
    see each key, [B|1, H|1, Lk]; `live` the rows that see any key, [B|1, H|1]. The tensors are
    written again for the next bin: use or copy them before going on.
    """

    rows: slice
    sums: Tensor
    peaks: Tensor | None
    viewers: Tensor
    live: Tensor


def sweep(
    call: Logits, lse_bhq: Tensor, edges: Sequence[int], *, peaks: bool = False
) -> Iterator[RowBin]:
    """Sum the exact softmax weights over each bin of query rows, `edges[i]` to `edges[i + 1]`.

    `lse_bhq` is the log-sum-exp of the forward pass, sinks included. Time is that of the visible
    pairs; memory is one block of weights and a few [B, H, Lk].
    """
    lse_bhq = finite_where_empty(lse_bhq.detach().to(call.compute_dtype))
    device = call.query.device
    shape = (call.batch, call.heads, call.key_length)
    sums_bhk = torch.empty(shape, dtype=call.compute_dtype, device=device)
    peaks_bhk = torch.empty_like(sums_bhk) if peaks else None
    mask_bh = mask_shape(call)
    viewers_bhk = torch.empty((*mask_bh, call.key_length), dtype=torch.long, device=device)
    for begin, stop in zip(edges[:-1], edges[1:], strict=True):
        sums_bhk.zero_()
        viewers_bhk.zero_()
        if peaks_bhk is not None:
            peaks_bhk.zero_()
        live_bh = torch.zeros(mask_bh, dtype=torch.long, device=device)
        for rows in row_blocks(begin, stop):
            height = rows.stop - rows.start
            seen_bhq = torch.zeros((*mask_bh, height), dtype=torch.bool, device=device)
            for columns, visible in visible_blocks(call, rows):
                if visible is None:
                    seen_bhq.fill_(True)
                    viewers_bhk[..., columns] += height
                else:
                    seen_bhq |= visible.any(-1)
                    viewers_bhk[..., columns] += visible.sum(-2)
                for sample, heads in _head_blocks(call, rows, columns):
                    weights = _logits(call, sample, heads, rows, columns)
                    weights.sub_(lse_bhq[sample, heads, rows, None]).exp_()
                    if visible is not None:
                        weights.masked_fill_(~_part(visible, sample, heads), 0.0)
                    sums_bhk[sample, heads, columns] += weights.sum(-2)
                    if peaks_bhk is not None:
                        highest = peaks_bhk[sample, heads, columns]
                        highest.copy_(torch.maximum(highest, weights.amax(-2)))
            live_bh += seen_bhq.sum(-1)
        yield RowBin(slice(begin, stop), sums_bhk, peaks_bhk, viewers_bhk, live_bh)


def visible_blocks(call: Logits, rows: slice) -> Iterator[tuple[slice, Tensor | None]]:
    """The column blocks that `rows` may see, with what is visible in them, [B|1, H|1, q, k].

    None stands for a block that is visible throughout. A -inf in a bias tensor hides its key.
    """
    begin, end = call.parts.key_bounds(rows)
    whole_begin, whole_end = _seen_by_all(call, rows)
    for column in range(begin, end, _BLOCK_COLUMNS):
        columns = slice(column, min(column + _BLOCK_COLUMNS, end))
        visible = None
        if columns.start < whole_begin or columns.stop > whole_end:
            visible = call.parts.visible(rows, columns)
        if isinstance(call.bias, Tensor):
            hidden = bias_rectangle(call.bias.detach(), rows, columns) == -torch.inf
            if hidden.any():
                shown = hidden.logical_not().expand(
                    -1, -1, rows.stop - rows.start, columns.stop - columns.start
                )
                visible = shown if visible is None else visible & shown
        yield columns, visible


def visible_keys(call: Logits) -> Tensor:
    """How many keys each query row sees: int64 [B|1, H|1, Lq]; O(Lq) where rows are intervals."""
    parts = call.parts
    rows = slice(0, call.query_length)
    shape_bhq = (*mask_shape(call), call.query_length)
    counts_bhq = torch.zeros(shape_bhq, dtype=torch.long, device=call.query.device)
    if parts.rows_are_intervals and not isinstance(call.bias, Tensor):
        for begin_bhq, end_bhq in parts.intervals(rows):
            begin_bhq = begin_bhq.clamp(0, call.key_length).expand(shape_bhq)
            end_bhq = torch.maximum(begin_bhq, end_bhq)
            if parts.key_visible is None:
                counts_bhq += end_bhq - begin_bhq
            else:
                before_bk = torch.nn.functional.pad(parts.key_visible.long().cumsum(-1), (1, 0))
                before_bhk = before_bk[:, None].expand(*shape_bhq[:2], -1)
                counts_bhq += before_bhk.gather(-1, end_bhq) - before_bhk.gather(-1, begin_bhq)
        return counts_bhq
    for block in row_blocks(0, call.query_length):
        for columns, visible in visible_blocks(call, block):
            width = columns.stop - columns.start
            counts_bhq[..., block] += width if visible is None else visible.sum(-1)
    return counts_bhq


def row_blocks(begin: int, stop: int) -> Iterator[slice]:
    """Rows `begin` to `stop`, at most BLOCK_ROWS at a time."""
    for row in range(begin, stop, BLOCK_ROWS):
        yield slice(row, min(row + BLOCK_ROWS, stop))


def mask_shape(call: Logits) -> tuple[int, int]:
    """How many samples and heads the mask (a bias' -inf included) tells apart: (B|1, H|1)."""
    corner = slice(0, min(1, call.query_length)), slice(0, min(1, call.key_length))
    shape = call.parts.visible(*corner).shape[:2]
    if isinstance(call.bias, Tensor):
        shape = torch.broadcast_shapes(shape, call.bias.shape[:2])
    return shape[0], shape[1]


def finite_where_empty(lse: Tensor) -> Tensor:
    """`lse` with +inf for rows that see nothing, so that exp(s - lse) is 0 there and not NaN."""
    return torch.where(lse == -torch.inf, torch.inf, lse)


def _seen_by_all(call: Logits, rows: slice) -> tuple[int, int]:
    """Columns in [begin, end) are visible to every one of these rows, a bias' -inf aside."""
    parts = call.parts
    if parts.rows_are_intervals and parts.key_visible is None:
        intervals = parts.intervals(rows)
        if len(intervals) == 1:
            begin_bhq, end_bhq = intervals[0]
            return int(begin_bhq.max()), int(end_bhq.min())
    return 0, 0


def _head_blocks(call: Logits, rows: slice, columns: slice) -> Iterator[tuple[slice, slice]]:
    """Samples and query heads whose weights are formed together: whole groups of one KV head."""
    weights = call.group * (rows.stop - rows.start) * (columns.stop - columns.start)
    step = call.group * max(1, BLOCK_ELEMENTS // max(1, weights))
    for sample in range(call.batch):
        for head in range(0, call.heads, step):
            yield slice(sample, sample + 1), slice(head, min(head + step, call.heads))


def _logits(call: Logits, sample: slice, heads: slice, rows: slice, columns: slice) -> Tensor:
    """The logits of one sample's heads before the mask: a new tensor [1, h, q, k]."""
    kv_heads = slice(heads.start // call.group, heads.stop // call.group)
    query_bhqd = call.query.detach()[sample, heads, rows].to(call.compute_dtype)
    key_bhkd = call.key.detach()[sample, kv_heads, columns].to(call.compute_dtype)
    scores = grouped_matmul(query_bhqd * call.scale, key_bhkd.mT)
    if call.softcap is not None:
        scores.div_(call.softcap).tanh_().mul_(call.softcap)
    if isinstance(call.bias, ALiBi):
        slopes_h11 = call.bias.slopes.detach()[heads].to(scores.dtype)[:, None, None]
        scores -= slopes_h11 * _part(distances(call, rows, columns), sample, heads)
    elif call.bias is not None:
        block = bias_rectangle(call.bias.detach(), rows, columns)
        scores += _part(block, sample, heads).to(scores.dtype)
    return scores


def _part(tensor_bhqk: Tensor, sample: slice, heads: slice) -> Tensor:
    """One sample's heads of a tensor whose first two axes may be broadcast."""
    if tensor_bhqk.shape[0] > 1:
        tensor_bhqk = tensor_bhqk[sample]
    return tensor_bhqk[:, heads] if tensor_bhqk.shape[1] > 1 else tensor_bhqk
