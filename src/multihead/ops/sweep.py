"""The whole matrix of weights, formed again block by block from q, k and lse, and never kept.

`sweep` goes through the query rows once and hands out, for each bin of rows, what every key got
from them. Maps, what a key receives and the strips of single keys are all made from these sums,
so that one pass feeds them all. Keys that the mask hides from all rows of a block are left out.

Shape suffixes: b batch, h head, r row bin, q query row, k key column.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..masks import common_size
from . import dispatch
from .backends import native
from .problem import ALiBi, Logits
from .scores import bias_rectangle, distances, full_precision
from .tracing import PLAIN, intercepted

# Weights formed at a time: 2M float32 are 8 MiB. Blocks eight times smaller, which fit a core's
# cache, take the same time on a quiet machine but wait eight times as often on a busy one.
BLOCK_ELEMENTS = 1 << 21
BLOCK_ROWS = 256
_BLOCK_COLUMNS = 2048
_BUFFER_ELEMENTS = 1 << 22


@dataclass(frozen=True, eq=False)
class RowBins:
    """What the keys got from some bins of query rows, those numbered `bins`.

    `sums` and `peaks` are [B, H, bins, Lk], the sum and the largest of the weights, 0 where a key
    is hidden from all of a bin's rows; `peaks` is None unless asked for. `viewers` counts the rows
    that see each key, [B|1, H|1, bins, Lk]; `live` those that see any key, [B|1, H|1, bins].
    """

    bins: slice
    sums: Tensor
    peaks: Tensor | None
    viewers: Tensor
    live: Tensor


def sweep(
    call: Logits, lse: Tensor, edges: Sequence[int], *, peaks: bool = False
) -> Iterator[RowBins]:
    """Sum the exact softmax weights over bins of query rows, `edges[i]` to `edges[i + 1]`.

    `lse` [B, H, Lq] is the log-sum-exp of the forward pass, sinks included. Time is that of the
    visible pairs; memory is one block of weights and a few [B, H, Lk]. The native kernels serve
    where they can, torch operations elsewhere.
    """
    one_pass = _native_bins if _has_memory(call, lse) else _torch_bins
    return one_pass(call, lse, edges, peaks)


def _has_memory(call: Logits, lse: Tensor) -> bool:
    """Whether the native kernels serve, and every tensor holds its numbers where it says."""
    bias = call.bias.slopes if isinstance(call.bias, ALiBi) else call.bias
    tensors = (call.query, call.key, lse) if bias is None else (call.query, call.key, lse, bias)
    return not (
        intercepted()
        or dispatch.transformed()
        or any(type(tensor) not in PLAIN for tensor in tensors)
        or native.reasons(call)
    )


def _native_bins(call: Logits, lse: Tensor, edges: Sequence[int], peaks: bool) -> Iterator[RowBins]:
    mask_bh = mask_shape(call)
    for bins in _bins_together(call, edges, call.query_length):
        part = edges[bins.start : bins.stop + 1]
        sums, highest, viewers, seeing = native.sweep(call, lse, part, mask_bh, peaks=peaks)
        sizes = [stop - begin for begin, stop in itertools.pairwise(part)]
        live = _by_bin(seeing[..., None], sizes, torch.sum)[..., 0]
        yield RowBins(bins, sums, highest, viewers, live)


def _torch_bins(call: Logits, lse: Tensor, edges: Sequence[int], peaks: bool) -> Iterator[RowBins]:
    lse_bhq = finite_where_empty(lse.detach().to(call.compute_dtype))
    mask_bh = mask_shape(call)
    for bins in _bins_together(call, edges, BLOCK_ROWS):
        sizes = [edges[i + 1] - edges[i] for i in range(bins.start, bins.stop)]
        shape_bhrk = (call.batch, call.heads, len(sizes), call.key_length)
        sums = torch.zeros(shape_bhrk, dtype=call.compute_dtype, device=call.query.device)
        highest = torch.zeros_like(sums) if peaks else None
        viewers = sums.new_zeros((*mask_bh, *shape_bhrk[2:]), dtype=torch.long)
        live = sums.new_zeros((*mask_bh, len(sizes)), dtype=torch.long)
        for rows in row_blocks(edges[bins.start], edges[bins.stop]):
            height = rows.stop - rows.start
            block_sizes = sizes if len(sizes) > 1 else [height]
            seen = viewers.new_zeros((*mask_bh, height, 1), dtype=torch.bool)
            for columns, visible in visible_blocks(call, rows):
                hidden = None
                if visible is None:
                    seen.fill_(True)
                    viewers[..., columns] += viewers.new_tensor(block_sizes)[:, None]
                else:
                    hidden = visible.logical_not()
                    seen |= visible.any(-1, keepdim=True)
                    viewers[..., columns] += _by_bin(visible, block_sizes, torch.sum)
                for sample, heads in _head_blocks(call, rows, columns):
                    weights = _logits(call, sample, heads, rows, columns)
                    weights.sub_(lse_bhq[sample, heads, rows, None]).exp_()
                    if hidden is not None:
                        weights.masked_fill_(_part(hidden, sample, heads), 0.0)
                    sums[sample, heads, :, columns] += _by_bin(weights, block_sizes, torch.sum)
                    if highest is not None:
                        known = highest[sample, heads, :, columns]
                        known.copy_(known.maximum(_by_bin(weights, block_sizes, torch.amax)))
            live += _by_bin(seen, block_sizes, torch.sum)[..., 0]
        yield RowBins(bins, sums, highest, viewers, live)


def visible_blocks(call: Logits, rows: slice) -> Iterator[tuple[slice, Tensor | None]]:
    """The column blocks that `rows` may see, with what is visible in them, [B|1, H|1, q, k].

    None stands for a block that is visible throughout. A -inf in a bias tensor hides its key.
    """
    begin, end = call.parts.key_bounds(rows)
    whole_begin, whole_end = _seen_by_all(call, rows)
    borders = sorted({begin, end, *(x for x in (whole_begin, whole_end) if begin < x < end)})
    for left, right in itertools.pairwise(borders):
        for column in range(left, right, _BLOCK_COLUMNS):
            columns = slice(column, min(column + _BLOCK_COLUMNS, right))
            visible = None
            if columns.start < whole_begin or columns.stop > whole_end:
                visible = call.parts.visible(rows, columns)
            if isinstance(call.bias, Tensor):
                hidden = bias_rectangle(call.bias.detach(), rows, columns) == -torch.inf
                if hidden.any():
                    shape_qk = (rows.stop - rows.start, columns.stop - columns.start)
                    shown = hidden.logical_not().expand(-1, -1, *shape_qk)
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
    batch, heads = call.parts.visible(*corner).shape[:2]
    if isinstance(call.bias, Tensor):
        batch = common_size(batch, call.bias.shape[0])
        heads = common_size(heads, call.bias.shape[1])
    return batch, heads


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
            if not begin_bhq.numel() or not end_bhq.numel():
                return 0, 0
            return int(begin_bhq.max()), int(end_bhq.min())
    return 0, 0


def _bins_together(call: Logits, edges: Sequence[int], rows: int) -> Iterator[slice]:
    """Bins that are swept at once: as many as `rows` hold, or one, and the buffers allow."""
    per_bin = max(1, call.batch * call.heads * call.key_length)
    most = max(1, _BUFFER_ELEMENTS // per_bin)
    begin, count = 0, len(edges) - 1
    while begin < count:
        stop = begin + 1
        while stop < count and stop - begin < most and edges[stop + 1] - edges[begin] <= rows:
            stop += 1
        yield slice(begin, stop)
        begin = stop


def _by_bin(values: Tensor, sizes: list[int], reduce: Callable[..., Tensor]) -> Tensor:
    """Reduce [..., q, k] to [..., bins, k]; the bins' sizes add up to q."""
    if len(set(sizes)) == 1:
        return reduce(values.unflatten(-2, (len(sizes), sizes[0])), dim=-2)
    return torch.stack([reduce(part, dim=-2) for part in values.split(sizes, dim=-2)], dim=-2)


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
    query_hqd = call.query.detach()[sample, heads, rows][0].to(call.compute_dtype)
    key_gkd = call.key.detach()[sample, kv_heads, columns][0].to(call.compute_dtype)
    # A group's query heads are rows of one product, so that no key is repeated; scaling within
    # the product rounds once, where scaling the queries first would round twice.
    query_gqd = query_hqd.reshape(key_gkd.shape[0], -1, query_hqd.shape[-1])
    nothing = query_gqd.new_empty(1)
    with full_precision(query_gqd.device):
        scores = torch.baddbmm(nothing, query_gqd, key_gkd.mT, beta=0, alpha=call.scale)
    scores = scores.view(1, *query_hqd.shape[:2], -1)
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
