"""One key for each query: exact weights along a diagonal or a column, in O(N) memory.

Shape suffixes: b batch, h head, g KV head, q query row, d width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cells import cells_at, keys_at, visible_at
from .problem import ALiBi, Logits
from .sweep import finite_where_empty


def weights_along(call: Logits, lse: Tensor, columns_bq: Tensor) -> tuple[Tensor, Tensor]:
    """The weight that each query gives to the one key column named for it.

    `columns_bq` is int64 [B|1, Lq]; a number outside the matrix stands for no key. Returns the
    weights [B, H, Lq], 0 where the key is hidden, and whether it is visible, [B|1, H|1, Lq].
    """
    exists_bq = (columns_bq >= 0) & (columns_bq < call.key_length)
    columns_bq = torch.where(exists_bq, columns_bq, 0)
    row_q = torch.arange(call.query_length, device=columns_bq.device)
    column_bq1 = columns_bq[..., None]
    visible_bhq = visible_at(call.parts, row_q, column_bq1)[..., 0] & exists_bq[:, None]
    scores_bhq = _scores(call, columns_bq) * call.scale
    if call.softcap is not None:
        scores_bhq = call.softcap * torch.tanh(scores_bhq / call.softcap)
    if isinstance(call.bias, ALiBi):
        position_bq = call.parts.query_position(slice(0, call.query_length))[:, 0]
        key_position_bk = call.parts.key_position(slice(0, call.key_length))[:, 0, 0]
        distance_bq = (position_bq - keys_at(key_position_bk, column_bq1)[..., 0]).abs()
        slopes_h1 = call.bias.slopes.detach().to(scores_bhq.dtype)[:, None]
        scores_bhq = scores_bhq - slopes_h1 * distance_bq[:, None]
    elif call.bias is not None:
        bias_bhq = cells_at(call.bias.detach(), row_q, column_bq1)[..., 0].to(scores_bhq.dtype)
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
