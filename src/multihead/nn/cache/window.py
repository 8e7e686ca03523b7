"""A cache that rolls: the newest tokens, and some of the first."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...masks import Mask, Positions, Window
from ...masks.lowering import Lowering
from ...ops import KeyValues
from ...ops.key_values import held
from .protocol import (
    Shape,
    check_sizes,
    first_shape,
    kept_of,
    outside_inference,
    refuse_gradients,
    row_index,
)


class WindowKVCache:
    """Keys and values of the newest `window` tokens and of the first `keep_first`.

    Memory is that of `window + keep_first` tokens, whatever the length. A query sees what
    `Window(window - 1, keep_first=keep_first)` lets in, its own token included in the window, also
    where several tokens come at once, and the caller's mask on top. Masks and biases by column
    (`KeyPadding`, `Documents`, `Dense`, a bias tensor) cover all tokens so far, not those in
    memory alone. The kept tokens are the first columns: with left padding these are padding.

    Memory is written in place: forks take a copy, and gradients are refused. The state holds
    integers, so that torch.compile would make a graph for each length: call it outside.

    Args:
        window: how many of the newest tokens a query sees, its own included.
        keep_first: how many of the first tokens are kept for good.

    Raises:
        ArgumentError, DtypeError: sizes that a cache cannot have.

    Source: Beltagy et al. 2020 (window); Xiao et al. 2023 (kept first tokens).
    """

    _shape: Shape | None
    _memory: _Memory | None
    _length: int
    _oldest: int  # of the tokens that are not kept, the first in memory

    def __init__(self, window: int, keep_first: int = 0) -> None:
        check_sizes(window=window)
        check_sizes(0, keep_first=keep_first)
        self.window = window
        self.keep_first = keep_first
        self.reset()

    @property
    def length(self) -> int:
        """How many tokens came so far; memory holds `window + keep_first` of them at most."""
        return self._length

    @property
    def nbytes(self) -> int:
        """The bytes of memory that are taken: of `window + keep_first` tokens and their columns."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def filled_nbytes(self) -> int:
        """The part of `nbytes` that tokens fill."""
        kept = min(self._length, self.keep_first)
        filled = kept + self._length - max(kept, min(self._oldest, self._length))
        return self.nbytes // self._room * filled

    def positions(self, length: int) -> Tensor:
        """Where the next `length` tokens stand: int64 [L]."""
        device = None if self._shape is None else self._shape.device
        return torch.arange(self._length, self._length + length, device=device)

    def update(self, key: Tensor, value: Tensor) -> KeyValues:
        """Append `key` [B, Hkv, L, D] and `value` [B, Hkv, L, Dv]; returns what its queries see.

        Raises ArgumentError, DtypeError or DeviceError for tensors that do not fit what is held.
        """
        shape = first_shape(key, value) if self._shape is None else self._shape
        count = shape.accepts(key, value)
        refuse_gradients("WindowKVCache", key, value)
        if self._memory is None:
            self._shape, self._memory = shape, _Memory.take(shape, self._room)
        if count == 1:
            self._store_one(self._memory, key, value)
            kv = self._held(self._memory)
            if kv.columns is None:
                return kv
            frame: Mask = Positions(kv.columns.new_tensor([self._length - 1]), kv.columns)
            return held(key=kv.key, value=kv.value, frame=frame, columns=kv.columns)
        # Early queries of several see tokens that late ones drop: joined before these are dropped.
        earlier = self._held(self._memory)
        keys, values = torch.cat((earlier.key, key), 2), torch.cat((earlier.value, value), 2)
        frame, columns = Window(self.window - 1, None, self.keep_first), earlier.columns
        if columns is not None:
            new = self.positions(count).to(columns.dtype)
            columns = torch.cat((columns, new))
            frame = frame & Positions(new, columns)
        elif self.keep_first:
            frame = frame & _ByColumn()
        self._store(self._memory, key, value)
        return held(key=keys, value=values, frame=frame, columns=columns)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; a negative number removes as many from the end.

        Raises ArgumentError where the tokens that the next query then sees are dropped already.
        One token can always be removed, and all of them.
        """
        kept = kept_of(length, self._length)
        needed = max(self.keep_first, kept - self.window + 1)
        if kept <= self.keep_first:  # whose tokens never leave
            self._oldest = self.keep_first
            if self._memory is not None:
                self._memory.columns = _numbered(self._memory.key.device, self._room)
        elif kept < self._length and self._oldest > needed:
            raise ArgumentError(
                f"crop: token {kept} would see tokens from {needed} on, but those below "
                f"{self._oldest} are dropped. A window cache of {self.window} can't go back that "
                "far: reset it, and give it the tokens again."
            )
        self._length = kept

    def reset(self) -> None:
        """Forget everything, and give the memory back."""
        self._shape = self._memory = None
        self._length, self._oldest = 0, self.keep_first

    def fork(self) -> Self:
        """A second cache with the same tokens, in memory of its own."""
        with outside_inference():
            return deepcopy(self)

    __copy__ = fork

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Make row i of the batch what row `rows[i]` was. Raises ArgumentError if empty."""
        if self._shape is None or self._memory is None:
            raise ArgumentError("reorder: the cache is empty.")
        index, memory = row_index(rows, self._shape.batch, self._shape.device), self._memory
        with outside_inference():
            key, value = memory.key.index_select(0, index), memory.value.index_select(0, index)
        self._memory = _Memory(key, value, memory.columns)
        self._shape = self._shape.with_batch(len(index))

    @property
    def _room(self) -> int:
        return self.window + self.keep_first

    def _store_one(self, memory: _Memory, key: Tensor, value: Tensor) -> None:
        slot = self._length
        if slot >= self._room:
            slot = self.keep_first + (slot - self.keep_first) % self.window
            # A new tensor: what was handed out keeps its columns.
            memory.columns = memory.columns.clone()
            memory.columns[slot] = self._length
        memory.key.narrow(2, slot, 1).copy_(key)
        memory.value.narrow(2, slot, 1).copy_(value)
        self._length += 1
        self._oldest = max(self._oldest, self._length - self.window)

    def _store(self, memory: _Memory, key: Tensor, value: Tensor) -> None:
        begin, end = self._length, self._length + key.shape[2]
        new = torch.arange(begin, end, device=key.device)
        new = new[(new < self.keep_first) | (new >= end - self.window)]
        slots, tokens = self._slots(new), new - begin
        memory.key.index_copy_(2, slots, key.index_select(2, tokens))
        memory.value.index_copy_(2, slots, value.index_select(2, tokens))
        memory.columns = memory.columns.index_copy(0, slots, new.to(memory.columns.dtype))
        self._length = end
        self._oldest = max(self._oldest, end - self.window)

    def _slots(self, columns: Tensor) -> Tensor:
        """Kept tokens have slots of their own; the others take turns in the rest."""
        ring = self.keep_first + (columns - self.keep_first) % self.window
        return torch.where(columns < self.keep_first, columns, ring)

    def _held(self, memory: _Memory) -> KeyValues:
        """What is in memory, without a frame."""
        end, kept = self._length, self.keep_first
        key, value, columns = memory.key, memory.value, memory.columns
        if self._oldest <= kept:  # each token in the slot of its number
            return held(key=key.narrow(2, 0, end), value=value.narrow(2, 0, end))
        if kept + end - self._oldest < self._room:  # a crop left a slot that holds nothing
            tokens = torch.cat((torch.arange(kept), torch.arange(self._oldest, end)))
            slots = self._slots(tokens.to(key.device))
            key, value = key.index_select(2, slots), value.index_select(2, slots)
            columns = columns.index_select(0, slots)
        return held(key=key, value=value, columns=columns)


class _ByColumn(Mask):
    """The frame that a call has anyway, spelled out.

    Padding then does not move the kept tokens to others, which later calls don't find in memory.
    """

    def add_to(self, lowering: Lowering) -> None:
        columns = torch.arange(lowering.key_length, device=lowering.device)
        first = lowering.key_length - lowering.query_length
        lowering.set_positions(torch.arange(first, lowering.key_length).to(columns), columns)


@dataclass
class _Memory:
    """Keys and values [B, Hkv, room, ...], and the token in each slot, int32 [room]."""

    key: Tensor
    value: Tensor
    columns: Tensor

    @classmethod
    def take(cls, shape: Shape, room: int) -> _Memory:
        """Memory that nothing fills yet."""
        size, dtype, device = (shape.batch, shape.heads, room), shape.dtype, shape.device
        with outside_inference():
            return cls(
                torch.empty((*size, shape.head_dim), dtype=dtype, device=device),
                torch.empty((*size, shape.value_dim), dtype=dtype, device=device),
                _numbered(device, room),
            )

    @property
    def nbytes(self) -> int:
        """The bytes of the three."""
        return self.key.nbytes + self.value.nbytes + self.columns.nbytes


def _numbered(device: torch.device, room: int) -> Tensor:
    return torch.arange(room, dtype=torch.int32, device=device)
