"""Single cells of the matrix: what a mask or a broadcast tensor says of chosen rows and columns.

Columns are the same for all rows (a rectangle), or each row has its own (a diagonal); either way
time and memory are those of the chosen cells and of one number a row.

Shape suffixes: b batch, h head, q chosen row, k chosen column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..masks import MaskParts, common_size


def visible_at(parts: MaskParts, rows_q: Tensor, columns_bqk: Tensor) -> Tensor:
    """Whether the mask lets row `rows[i]` see column `columns[b, i, j]`: bool [B|1, H|1, q, k].

    `rows_q` is int64 [q] and `columns_bqk` int64 [B|1, q|1, k], all inside of the matrix.
    """
    column_bhqk = columns_bqk[:, None]
    shape = (1, 1, len(rows_q), columns_bqk.shape[-1])
    if parts.key_positions is not None:
        position_q = parts.query_position(slice(0, parts.query_length))[..., rows_q, None]
        position_k = keys_at(parts.key_positions, columns_bqk)[:, None].long()
        visible = parts.visible_by_position(position_q, position_k)
    else:
        visible = torch.zeros(shape, dtype=torch.bool, device=rows_q.device)
        for bounds in parts.intervals(slice(0, parts.query_length)):
            begin, end = (bound_bhq[..., rows_q, None] for bound_bhq in bounds)
            visible = visible | ((column_bhqk >= begin) & (column_bhqk < end))
    if parts.key_visible is not None:
        visible = visible & keys_at(parts.key_visible, columns_bqk)[:, None]
    if parts.query_ids is not None and parts.key_ids is not None:
        ids_bq1 = parts.query_ids[:, rows_q, None]
        same_bqk = (ids_bq1 == keys_at(parts.key_ids, columns_bqk)) & (ids_bq1 >= 0)
        visible = visible & same_bqk[:, None]
    if parts.dense is not None:
        visible = visible & cells_at(parts.dense, rows_q, columns_bqk)
    return visible


def keys_at(values_bk: Tensor, columns_bqk: Tensor) -> Tensor:
    """`values[b, columns[b, i, j]]` of a tensor [B|1, Lk]: [B|1, q|1, k]."""
    batch = common_size(values_bk.shape[0], columns_bqk.shape[0])
    columns_bqk = columns_bqk.expand(batch, -1, -1)
    found = values_bk.expand(batch, -1).gather(-1, columns_bqk.flatten(1))
    return found.view(columns_bqk.shape)


def cells_at(values_bhqk: Tensor, rows_q: Tensor, columns_bqk: Tensor) -> Tensor:
    """`values[b, h, rows[i], columns[b, i, j]]` of a tensor of which any axis may have size 1.

    Returns [B|1, H|1, q|1, k|1]: an axis that `values` does not tell apart stays at 1.
    """
    batch, heads, rows, columns = values_bhqk.shape
    row_q1 = rows_q[:, None] if rows != 1 else rows_q.new_zeros((1, 1))
    column_bhqk = columns_bqk[:, None] if columns != 1 else columns_bqk.new_zeros((1, 1, 1, 1))
    sample_b111 = torch.arange(batch, device=rows_q.device).view(-1, 1, 1, 1)
    head_h11 = torch.arange(heads, device=rows_q.device).view(-1, 1, 1)
    return values_bhqk[sample_b111, head_h11, row_q1, column_bhqk]
