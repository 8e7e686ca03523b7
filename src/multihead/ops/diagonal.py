"""One key for each query: exact weights along a diagonal or a column, in O(N) memory.

Shape suffixes: b batch, h head, g KV head, q query row, d width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import ALiBi, Logits
from .sweep import finite_where_empty


def weights_along(call: Logits, lse: Tensor, columns_bq: Tensor) -> tuple[Tensor, Tensor]:
    """The weight that each query gives to the one key column named for it.

    `columns_bq` is int64 [B|1, Lq]; a number outside the matrix stands for no key. Returns the
    weights [B, H, Lq], 0 where the key is hidden, and whether it is visible, [B|1, H|1, Lq].
    """
    exists_bq = (columns_bq >= 0) & (columns_bq < call.key_length)
    columns_bq = torch.where(exists_bq, columns_bq, 0)
    visible_bhq = _visible(call, columns_bq) & exists_bq[:, None]
    scores_bhq = _scores(call, columns_bq) * call.scale
    if call.softcap is not None:
        scores_bhq = call.softcap * torch.tanh(scores_bhq / call.softcap)
    if isinstance(call.bias, ALiBi):
        rows = slice(0, call.query_length)
        position_bq = call.parts.query_position(rows)[:, 0]
        key_position_bk = call.parts.key_position(slice(0, call.key_length))[:, 0, 0]
        distance_bq = (position_bq - _at(key_position_bk, columns_bq)).abs()
        slopes_h1 = call.bias.slopes.detach().to(scores_bhq.dtype)[:, None]
        scores_bhq = scores_bhq - slopes_h1 * distance_bq[:, None]
    elif call.bias is not None:
        bias_bhq = _cells(call.bias.detach(), columns_bq).to(scores_bhq.dtype)
        visible_bhq = visible_bhq & (bias_bhq != -torch.inf)
        scores_bhq = scores_bhq + bias_bhq
    lse_bhq = finite_where_empty(lse.detach().to(scores_bhq.dtype))
    return torch.exp(scores_bhq - lse_bhq).masked_fill(~visible_bhq, 0.0), visible_bhq


def _scores(call: Logits, columns_bq: Tensor) -> Tensor:
    """q.k of each query and its key: [B, H, Lq]."""
    scores_bhq = torch.empty(
        (call.batch, call.heads, call.query_length),
        dtype=call.compute_dtype,
        device=call.query.device,
    )
    query_bhqd, key_bgkd = call.query.detach(), call.key.detach()
    for sample in range(call.batch):
        columns_q = columns_bq[sample if columns_bq.shape[0] > 1 else 0]
        for kv_head in range(call.kv_heads):
            heads = slice(kv_head * call.group, (kv_head + 1) * call.group)
            key_qd = key_bgkd[sample, kv_head, columns_q].to(call.compute_dtype)
            query_hqd = query_bhqd[sample, heads].to(call.compute_dtype)
            scores_bhq[sample, heads] = (query_hqd * key_qd).sum(-1)
    return scores_bhq


def _visible(call: Logits, columns_bq: Tensor) -> Tensor:
    """Whether row i sees column `columns[b, i]`: [B|1, H|1, Lq]."""
    parts = call.parts
    rows = slice(0, call.query_length)
    column_b1q = columns_bq[:, None]
    if parts.key_positions is not None:
        # Positions compare elementwise and rows have no intervals: take the cells row by row.
        everything = slice(0, call.key_length)
        cells = [
            _cells(parts.visible(slice(row, row + 1), everything), columns_bq[:, row : row + 1])
            for row in range(call.query_length)
        ]
        return torch.cat(cells, -1)
    visible_bhq = torch.zeros_like(column_b1q, dtype=torch.bool)
    for begin_bhq, end_bhq in parts.intervals(rows):
        visible_bhq = visible_bhq | ((column_b1q >= begin_bhq) & (column_b1q < end_bhq))
    if parts.key_visible is not None:
        visible_bhq = visible_bhq & _at(parts.key_visible, columns_bq)[:, None]
    if parts.query_ids is not None and parts.key_ids is not None:
        same_bq = parts.query_ids == _at(parts.key_ids, columns_bq)
        visible_bhq = visible_bhq & (same_bq & (parts.query_ids >= 0))[:, None]
    if parts.dense is not None:
        visible_bhq = visible_bhq & _cells(parts.dense, columns_bq)
    return visible_bhq


def _at(values_bk: Tensor, columns_bq: Tensor) -> Tensor:
    """`values[b, columns[b, i]]` with both batch axes broadcast: [B|1, Lq]."""
    batch = max(values_bk.shape[0], columns_bq.shape[0])
    return values_bk.expand(batch, -1).gather(-1, columns_bq.expand(batch, -1))


def _cells(values_bhqk: Tensor, columns_bq: Tensor) -> Tensor:
    """`values[b, h, i, columns[b, i]]` of a tensor that may be broadcast: [B|1, H|1, Lq]."""
    if values_bhqk.shape[-1] == 1:
        return values_bhqk[..., 0].expand(-1, -1, columns_bq.shape[-1])
    batch = max(values_bhqk.shape[0], columns_bq.shape[0])
    shape = (batch, values_bhqk.shape[1], columns_bq.shape[-1])
    values_bhqk = values_bhqk.expand(*shape, -1)
    return values_bhqk.gather(-1, columns_bq[:, None, :, None].expand(*shape, 1))[..., 0]
