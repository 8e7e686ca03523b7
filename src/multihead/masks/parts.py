"""What a mask lowers to: the few numbers and small tensors that a kernel reads.

Shape suffixes: b batch, h head, q query row, k key column, r range.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# Rows that are expanded to booleans at a time where pairs must be enumerated: 64 MiB at 64k keys.
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True, eq=False)
class MaskParts:
    """One mask, lowered for one call; every part is O(L) but `dense`.

    Key column j is visible to query row i of batch row b and head h if all of these hold:

    * `pos >= p - left` or `pos < first + keep_first`, unless `left` is None
    * `pos <= p + right` or `pos < first + prefix`, unless `right` is None
    * `j < key_lengths[b]` and `i < query_lengths[b]`
    * `key_visible[b, j]`
    * `query_ids[b, i] == key_ids[b, j]`, and neither is negative
    * `ranges[b, h, i, r, 0] <= j < ranges[b, h, i, r, 1]` for some r
    * `dense[b, h, i, j]`

    where `p` is `query_positions[b, i]` or `start + i`, `pos` is `key_positions[b, j]` or j, and
    a part that is None asks for nothing; so do `keep_first` and `prefix` where they are 0. With
    `key_positions` they let in keys by position alone: `first` counts as 0.

    Integers are Python ints or int32 tensors: `start`, `first`, `prefix` [B], `left`, `right` [H],
    lengths [B], ids and positions [B|1, L], ranges [B|1, H|1, Lq, R, 2], disjoint and ascending.
    `key_visible` is bool [B|1, Lk], `dense` bool [B|1, H|1, Lq|1, Lk|1].
    """

    query_length: int
    key_length: int
    device: torch.device
    start: int | Tensor = 0
    first: int | Tensor = 0
    left: int | Tensor | None = None
    right: int | Tensor | None = None
    keep_first: int = 0
    prefix: int | Tensor = 0
    key_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    key_visible: Tensor | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None
    query_positions: Tensor | None = None
    key_positions: Tensor | None = None
    ranges: Tensor | None = None
    dense: Tensor | None = None

    @cached_property
    def closed_form(self) -> tuple[int, int, int | None, int | None, int, int] | None:
        """start, first, left, right, keep_first and prefix if these are the mask and are ints."""
        numbers = (self.start, self.first, self.left, self.right, self.keep_first, self.prefix)
        tensors = (
            self.key_lengths,
            self.query_lengths,
            self.key_visible,
            self.query_ids,
            self.key_ids,
            self.query_positions,
            self.key_positions,
            self.ranges,
            self.dense,
        )
        if any(isinstance(part, Tensor) for part in (*numbers, *tensors)):
            return None
        return numbers  # type: ignore[return-value]

    @property
    def hides_nothing(self) -> bool:
        """Whether every key is visible to every query."""
        return (
            self.left is None
            and self.right is None
            and self.key_lengths is None
            and self.query_lengths is None
            and self.key_visible is None
            and self.query_ids is None
            and self.ranges is None
            and self.dense is None
        )

    @property
    def rows_are_intervals(self) -> bool:
        """Whether a row's visible columns are a few intervals, but for `key_visible`."""
        return self.query_ids is None and self.key_positions is None and self.dense is None

    def query_position(self, rows: slice) -> Tensor:
        """Positions of the query rows `rows`: int64 [B|1, 1, q]."""
        if self.query_positions is not None:
            return self.query_positions[:, None, rows].long()
        row_q = torch.arange(rows.start, rows.stop, device=self.device)
        position_bhq: Tensor = row_q[None, None, :] + _shaped(self.start, -1, 1, 1)
        return position_bhq

    def key_position(self, columns: slice) -> Tensor:
        """Positions of the key columns `columns`: int64 [B|1, 1, 1, k]."""
        if self.key_positions is not None:
            return self.key_positions[:, None, None, columns].long()
        return torch.arange(columns.start, columns.stop, device=self.device)[None, None, None, :]

    def intervals(self, rows: slice) -> list[tuple[Tensor, Tensor]]:
        """The visible columns of rows as disjoint half-open intervals, `key_visible` aside.

        Each is a pair of int64 tensors that broadcast to [B, H, q]; an empty one has its end at
        or below its begin. Only where `key_positions` is None; ids and `dense` are left out.
        """
        position_bhq = self.query_position(rows)
        begin_bhq = torch.zeros_like(position_bhq)
        end_bhq = torch.full_like(position_bhq, self.key_length)
        if self.key_lengths is not None:
            end_bhq = end_bhq.clamp(max=_shaped(self.key_lengths, -1, 1, 1))
        if self.query_lengths is not None:
            row_q = torch.arange(rows.start, rows.stop, device=self.device)
            end_bhq = end_bhq.masked_fill(row_q >= _shaped(self.query_lengths, -1, 1, 1), 0)
        if self.ranges is not None:
            ranges = self.ranges[:, :, rows].long()
            return [
                (ranges[..., r, 0], ranges[..., r, 1].clamp(max=end_bhq))
                for r in range(ranges.shape[-2])
            ]
        first = _shaped(self.first, -1, 1, 1)
        if self.right is not None:
            reach_bhq = position_bhq + _shaped(self.right, 1, -1, 1) + 1
            if isinstance(self.prefix, Tensor) or self.prefix > 0:
                prefix = torch.as_tensor(_shaped(self.prefix, -1, 1, 1), device=self.device)
                prefix_end = torch.where(prefix > 0, first + prefix, 0)
                reach_bhq = torch.maximum(reach_bhq, prefix_end)
            end_bhq = torch.minimum(end_bhq, reach_bhq)
        if self.left is None:
            return [(begin_bhq, end_bhq)]
        near_bhq = (position_bhq - _shaped(self.left, 1, -1, 1)).clamp(min=0)
        if not self.keep_first:
            return [(near_bhq, end_bhq)]
        kept_bhq = begin_bhq + first + self.keep_first
        return [
            (begin_bhq, torch.minimum(kept_bhq, end_bhq)),
            (torch.maximum(near_bhq, kept_bhq), end_bhq),
        ]

    def visible(self, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The rectangle rows x columns as booleans, [B|1, H|1, q, k]; True = may be attended."""
        rows = slice(0, self.query_length) if rows is None else rows
        columns = slice(0, self.key_length) if columns is None else columns
        column_k = torch.arange(columns.start, columns.stop, device=self.device)
        if self.key_positions is None:
            visible = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=self.device)
            for begin_bhq, end_bhq in self.intervals(rows):
                inside = (column_k >= begin_bhq[..., None]) & (column_k < end_bhq[..., None])
                visible = visible | inside
        else:
            position_q = self.query_position(rows)[..., None]
            visible = self.visible_by_position(position_q, self.key_position(columns))
        if self.key_visible is not None:
            visible = visible & self.key_visible[:, None, None, columns]
        if self.query_ids is not None and self.key_ids is not None:
            ids_q = self.query_ids[:, None, rows, None]
            visible = visible & (ids_q == self.key_ids[:, None, None, columns]) & (ids_q >= 0)
        if self.dense is not None:
            visible = visible & _take(_take(self.dense, rows, -2), columns, -1)
        return visible

    def key_bounds(self, rows: slice) -> tuple[int, int]:
        """Columns outside [begin, end) are hidden from all of these rows."""
        if self.key_positions is not None or self.key_length == 0 or rows.start >= rows.stop:
            return 0, self.key_length
        begin, end = self.key_length, 0
        for begin_bhq, end_bhq in self.intervals(rows):
            seen = begin_bhq < end_bhq
            if bool(seen.any()):
                begin_bhq, end_bhq = torch.broadcast_tensors(begin_bhq, end_bhq)
                begin = min(begin, int(begin_bhq[seen.expand_as(begin_bhq)].min()))
                end = max(end, int(end_bhq[seen.expand_as(end_bhq)].max()))
        return (begin, min(end, self.key_length)) if begin < end else (0, 0)

    def count(self) -> int:
        """Visible (query, key) pairs, summed over the batch rows and heads that the parts have."""
        rows = slice(0, self.query_length)
        if not self.rows_are_intervals:
            blocks = range(0, self.query_length, _ROWS_AT_A_TIME)
            stops = [min(begin + _ROWS_AT_A_TIME, self.query_length) for begin in blocks]
            return sum(
                int(self.visible(slice(begin, stop)).sum())
                for begin, stop in zip(blocks, stops, strict=True)
            )
        total = 0
        bounds = itertools.chain.from_iterable(self.intervals(rows))
        ends = iter(torch.broadcast_tensors(*bounds))
        for begin_bhq, end_bhq in zip(ends, ends, strict=True):
            begin_bhq = begin_bhq.clamp(max=self.key_length)
            end_bhq = torch.maximum(begin_bhq, end_bhq)
            if self.key_visible is None:
                total += int((end_bhq - begin_bhq).sum())
                continue
            before_bk = torch.nn.functional.pad(self.key_visible.long().cumsum(-1), (1, 0))
            batch = common_size(before_bk.shape[0], end_bhq.shape[0])
            before = before_bk[:, None, :].expand(batch, end_bhq.shape[1], -1)
            total += int(before.gather(-1, end_bhq.expand(batch, -1, -1)).sum())
            total -= int(before.gather(-1, begin_bhq.expand(batch, end_bhq.shape[1], -1)).sum())
        return total

    def visible_by_position(self, position_q: Tensor, position_k: Tensor) -> Tensor:
        """What `left` and `right` let in, as a comparison of positions; bool [B|1, H|1, q, k].

        For explicit key positions, which have no intervals of columns. `position_q` is int64
        [B|1, 1, q, 1], `position_k` [B|1, 1, q|1, k].
        """
        visible = torch.ones_like(position_q == position_k)
        if self.left is not None:
            near = position_k >= position_q - _shaped(self.left, 1, -1, 1, 1)
            if self.keep_first > 0:
                near = near | (position_k < self.keep_first)
            visible = visible & near
        if self.right is not None:
            near = position_k <= position_q + _shaped(self.right, 1, -1, 1, 1)
            prefix = torch.as_tensor(_shaped(self.prefix, -1, 1, 1, 1), device=self.device)
            visible = visible & (near | ((position_k < prefix) & (prefix > 0)))
        return visible


def common_size(*sizes: int) -> int:
    """What axes of these sizes, which are equal or 1, broadcast to.

    torch.broadcast_shapes would load sympy: a quarter of a second and 40 MiB.
    """
    return next((size for size in sizes if size != 1), 1)


def _shaped(value: int | Tensor, *shape: int) -> Any:
    """A vector as int64 in `shape`; an int as it is."""
    return value.long().view(shape) if isinstance(value, Tensor) else value


def _take(dense: Tensor, part: slice, dim: int) -> Tensor:
    """`part` of an axis that may be broadcast."""
    if dense.shape[dim] == 1:
        return dense
    return dense.narrow(dim, part.start, part.stop - part.start)
