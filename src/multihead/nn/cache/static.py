"""A cache of fixed size, whose rows may differ in length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...masks import KeyLengths
from ...ops import KeyValues
from ...ops.key_values import held
from .protocol import (
    Shape,
    check_sizes,
    checked_counts,
    kept_of,
    outside_inference,
    refuse_gradients,
    row_index,
    twin,
)


class StaticKVCache:
    """Keys and values in memory that is taken once, for rows that may differ in length.

    Row b fills its slots from the front, and a slot that it has not filled is seen by nobody.
    Memory is written in place: forks take a copy, and gradients are refused.

    In torch.compile decoding is one graph at any lengths: there the whole capacity is handed out,
    and the frame's lengths are tensors. Masks by column then cover `capacity` columns, in eager
    mode as many as the longest row has. What does not fit cannot be refused in a graph; the
    compiled code raises where it would write outside of the memory.

    Args:
        batch: B.
        num_kv_heads: Hkv.
        capacity: tokens that each row has room for.
        head_dim: D.
        value_dim: Dv; by default D. 0 where `LatentKVCache` wraps the cache.
        dtype: of keys and values.
        device: where they lie.

    Raises:
        ArgumentError, DtypeError: sizes that a cache cannot have.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        check_sizes(head_dim=head_dim)
        # A layer may have lost all its heads; its cache still counts tokens.
        check_sizes(0, num_kv_heads=num_kv_heads)
        check_sizes(0, batch=batch, capacity=capacity, value_dim=value_dim)
        with outside_inference():
            # Not zeros: pages of memory that no token fills are never touched.
            shape = batch, num_kv_heads, capacity
            self._key = torch.empty((*shape, head_dim), dtype=dtype, device=device)
            self._value = torch.empty((*shape, value_dim), dtype=dtype, device=device)
            self._lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._shape = Shape.of(self._key, self._value)
        self._same: int | None = 0  # the length of all rows, if known to be one

    @property
    def capacity(self) -> int:
        """Tokens that each row has room for."""
        return self._key.shape[2]

    @property
    def length(self) -> int:
        """How many tokens the longest row holds."""
        return int(self._lengths.max()) if self._same is None else self._same

    @property
    def lengths(self) -> Tensor:
        """How many tokens each row holds: int32 [B]."""
        return self._lengths

    @property
    def nbytes(self) -> int:
        """The bytes of memory that are taken, the rows' lengths among them."""
        return self._key.nbytes + self._value.nbytes + self._lengths.nbytes

    @property
    def filled_nbytes(self) -> int:
        """The part of `nbytes` that tokens fill, and the lengths."""
        token = self._key[:1, :, :1].nbytes + self._value[:1, :, :1].nbytes
        return int(self._lengths.sum()) * token + self._lengths.nbytes

    def positions(self, length: int) -> Tensor:
        """Where the next `length` tokens stand: int64 [L], or [B, L] where rows differ."""
        new = torch.arange(length, device=self._shape.device)
        if not torch.compiler.is_compiling() and self._same is not None:
            return new + self._same
        return self._lengths[:, None] + new

    def update(self, key: Tensor, value: Tensor, query_lengths: Tensor | None = None) -> KeyValues:
        """Append `key` [B, Hkv, L, D] and `value` [B, Hkv, L, Dv] to each row.

        With `query_lengths`, integers [B], row b appends its first `query_lengths[b]` tokens alone,
        as a right-padded batch has them; its other queries see nothing.

        Raises ArgumentError, before anything is written, where a row has no room, and for tensors
        that do not fit; DtypeError, DeviceError likewise.
        """
        count = self._shape.accepts(key, value)
        refuse_gradients("StaticKVCache", key, value)
        if torch.compiler.is_compiling():
            return self._update_in_graph(key, value, count, query_lengths)
        if self._same is None or query_lengths is not None:
            return self._update_ragged(key, value, count, query_lengths)
        end = self._same + count
        if end > self.capacity:
            self._refuse(self._same, count)
        self._key.narrow(2, self._same, count).copy_(key)
        self._value.narrow(2, self._same, count).copy_(value)
        self._lengths = self._lengths + count
        self._same = end
        return held(key=self._key.narrow(2, 0, end), value=self._value.narrow(2, 0, end))

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens of each row; a negative number removes from the end."""
        if length < 0:
            self._lengths = (self._lengths + length).clamp(min=0)
        else:
            self._lengths = self._lengths.clamp(max=length)
        if self._same is None:
            self._same = _one_length(self._lengths)
        else:
            self._same = kept_of(length, self._same)

    def reset(self) -> None:
        """Forget every token; the memory stays."""
        self._lengths = torch.zeros_like(self._lengths)
        self._same = 0

    def fork(self) -> Self:
        """A second cache with the same tokens, in memory of its own."""
        made = twin(self)
        with outside_inference():
            for name in ("_key", "_value"):
                mine, end = getattr(self, name), self.length
                other = torch.empty_like(mine)
                other.narrow(2, 0, end).copy_(mine.narrow(2, 0, end))
                setattr(made, name, other)
        return made

    __copy__ = fork

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Make row i of the batch what row `rows[i]` was."""
        index = row_index(rows, self._shape.batch, self._shape.device)
        self._shape = self._shape.with_batch(len(index))
        with outside_inference():
            end = self.length
            for name in ("_key", "_value"):
                mine = getattr(self, name)
                other = mine.new_empty((len(index), *mine.shape[1:]))
                other.narrow(2, 0, end).copy_(mine.narrow(2, 0, end).index_select(0, index))
                setattr(self, name, other)
            self._lengths = self._lengths.index_select(0, index)
        self._same = _one_length(self._lengths)

    def _update_ragged(
        self, key: Tensor, value: Tensor, count: int, query_lengths: Tensor | None
    ) -> KeyValues:
        begins = self._lengths.tolist()
        counts = [count] * len(begins)
        if query_lengths is not None:
            query_lengths = checked_counts(query_lengths, len(begins), count)
            counts = query_lengths.tolist()
        ends = [begin + new for begin, new in zip(begins, counts, strict=True)]
        most = max(ends, default=0)
        if most > self.capacity:
            row = next(row for row, end in enumerate(ends) if end > self.capacity)
            self._refuse(begins[row], counts[row], row)
        if query_lengths is None:
            self._write(key, value, count, None)
            self._lengths = self._lengths + count
        else:
            for row, (begin, new) in enumerate(zip(begins, counts, strict=True)):
                self._key[row].narrow(1, begin, new).copy_(key[row].narrow(1, 0, new))
                self._value[row].narrow(1, begin, new).copy_(value[row].narrow(1, 0, new))
            self._lengths = torch.tensor(ends, dtype=torch.int32, device=self._shape.device)
        self._same = most if most == min(ends, default=0) else None
        whole = query_lengths is None and self._same is not None
        frame = None if whole else KeyLengths(self._lengths, query_lengths)
        return held(
            key=self._key.narrow(2, 0, most), value=self._value.narrow(2, 0, most), frame=frame
        )

    def _update_in_graph(
        self, key: Tensor, value: Tensor, count: int, query_lengths: Tensor | None
    ) -> KeyValues:
        self._write(key, value, count, query_lengths)
        grown = self._lengths + (count if query_lengths is None else query_lengths)
        self._lengths = grown.to(torch.int32)
        self._same = None
        return KeyValues(self._key, self._value, KeyLengths(self._lengths, query_lengths))

    def _write(self, key: Tensor, value: Tensor, count: int, query_lengths: Tensor | None) -> None:
        """Store `count` tokens of each row behind its last; not those beyond `query_lengths`."""
        rows = torch.arange(key.shape[0], device=key.device)[:, None]
        new = torch.arange(count, device=key.device)
        slots = self._lengths[:, None] + new
        for memory, tokens in ((self._key, key), (self._value, value)):
            tokens_blhd = tokens.transpose(1, 2)
            if query_lengths is not None:
                kept = (new < query_lengths[:, None])[:, :, None, None]
                tokens_blhd = torch.where(kept, tokens_blhd, memory[rows, :, slots])
            memory[rows, :, slots] = tokens_blhd

    def _refuse(self, begin: int, count: int, row: int | None = None) -> None:
        which = "each row" if row is None else f"row {row}"
        raise ArgumentError(
            f"The cache has room for {self.capacity} tokens a row, and {which} holds {begin} when "
            f"{count} more come. Make it with capacity={begin + count} or more, or crop it."
        )


def _one_length(lengths: Tensor) -> int | None:
    """The length that all rows have; None where they differ."""
    each = lengths.tolist()
    return each[0] if each and min(each) == max(each) else (None if each else 0)
