"""Named keys of each query: exact weights along diagonals and columns, in O(N) memory.

Shape suffixes: b batch, h head, g KV head, q query row, k named key, d width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cells import cells_at, keys_at, visible_at
from .problem import ALiBi, Logits
from .sweep import finite_where_empty

# Products of queries and keys formed at a time: 1 MiB in float32, which stays in a core's cache.
_ELEMENTS = 1 << 18


def weights_along(call: Logits, lse: Tensor, columns_bqk: Tensor) -> tuple[Tensor, Tensor]:
    """The weights that each query gives to the key columns named for it.

    `columns_bqk` is int64 [B|1, Lq, k]; a number outside the matrix stands for no key. Returns the
    weights [B, H, Lq, k], 0 where the key is hidden, and whether it is visible, [B|1, H|1, Lq, k].
    """
    exists_bqk = (columns_bqk >= 0) & (columns_bqk < call.key_length)
    columns_bqk = torch.where(exists_bqk, columns_bqk, 0)
    row_q = torch.arange(call.query_length, device=columns_bqk.device)
    visible_bhqk = visible_at(call.parts, row_q, columns_bqk) & exists_bqk[:, None]
    scores_bhqk = _scores(call, columns_bqk) * call.scale
    if call.softcap is not None:
        scores_bhqk = call.softcap * torch.tanh(scores_bhqk / call.softcap)
    if isinstance(call.bias, ALiBi):
        position_bq = call.parts.query_position(slice(0, call.query_length))[:, 0]
        key_position_bk = call.parts.key_position(slice(0, call.key_length))[:, 0, 0]
        distance_bqk = (position_bq[..., None] - keys_at(key_position_bk, columns_bqk)).abs()
        slopes_h11 = call.bias.slopes.detach().to(scores_bhqk.dtype)[:, None, None]
        scores_bhqk = scores_bhqk - slopes_h11 * distance_bqk[:, None]
    elif call.bias is not None:
        bias_bhqk = cells_at(call.bias.detach(), row_q, columns_bqk).to(scores_bhqk.dtype)
        visible_bhqk = visible_bhqk & (bias_bhqk != -torch.inf)
        scores_bhqk = scores_bhqk + bias_bhqk
    lse_bhq1 = finite_where_empty(lse.detach().to(scores_bhqk.dtype))[..., None]
    return torch.exp(scores_bhqk - lse_bhq1).masked_fill(~visible_bhqk, 0.0), visible_bhqk


def _scores(call: Logits, columns_bqk: Tensor) -> Tensor:
    """q.k of each query and its keys: [B, H, Lq, k], of all heads for some rows at a time."""
    dtype, device = call.compute_dtype, call.query.device
    shape_bhqk = (call.batch, call.heads, *columns_bqk.shape[1:])
    scores_bhqk = torch.empty(shape_bhqk, dtype=dtype, device=device)
    query_bghqd = call.query.detach().unflatten(1, (call.kv_heads, call.group))
    key_bgkd = call.key.detach()
    sample_b111 = torch.arange(call.batch, device=device).view(-1, 1, 1, 1)
    kv_head_g11 = torch.arange(call.kv_heads, device=device).view(-1, 1, 1)
    per_row = call.batch * call.heads * columns_bqk.shape[2] * call.head_dim
    step = max(1, _ELEMENTS // max(1, per_row))
    for row in range(0, call.query_length, step):
        rows = slice(row, row + step)
        key_bgqkd = key_bgkd[sample_b111, kv_head_g11, columns_bqk[:, None, rows]].to(dtype)
        query_bghq1d = query_bghqd[:, :, :, rows, None].to(dtype)
        scores_bghqk = (query_bghq1d * key_bgqkd[:, :, None]).sum(-1)
        scores_bhqk[:, :, rows] = scores_bghqk.flatten(1, 2)
    return scores_bhqk
