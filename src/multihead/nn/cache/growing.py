"""Caches that grow: memory with room at its end, shared by forks until one of them must write."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...ops import KeyValues
from ...ops.key_values import held
from .protocol import Shape, first_shape, kept_of, outside_inference, row_index, twin

# Memory for a quarter more tokens than are held: each is moved four times on average.
_GROWTH = 4
_STEP = 64


class Memory:
    """Tensors [B, Hkv, capacity, ...], whose slots from `end` on nobody has written yet.

    The one rule of forks: a slot that another fork may read is never written. Whoever finds
    `end` at its own length writes there and moves it; any other fork takes memory of its own.
    """

    def __init__(self, tensors: tuple[Tensor, ...], end: int, *, shared: bool) -> None:
        self.tensors = tensors
        self.end = end
        self.shared = shared  # with a fork, with autograd, or with whoever made the tensors


class Growing:
    """Tensors [B, Hkv, L, ...] that grow along L, without moving what they hold at each step."""

    def __init__(self) -> None:
        self.length = 0
        self._memory: Memory | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of memory that is held, alone or together with forks."""
        return 0 if self._memory is None else sum(x.nbytes for x in self._memory.tensors)

    @property
    def filled_nbytes(self) -> int:
        """The part of them that `length` tokens fill."""
        return sum(x.nbytes for x in self.filled()) if self.length else 0

    def filled(self) -> tuple[Tensor, ...]:
        """What is held, [B, Hkv, length, ...]; () where nothing was appended yet."""
        if self._memory is None:
            return ()
        return tuple([x.narrow(2, 0, self.length) for x in self._memory.tensors])

    def append(self, parts: tuple[Tensor, ...], count: int) -> tuple[Tensor, ...]:
        """Append `count` tokens to each tensor; returns all of them."""
        begin, end = self.length, self.length + count
        memory = self._memory
        if _is_recorded(memory, parts):
            # Autograd needs each step's tensors as they were; so does a recorded graph.
            tensors = parts if begin == 0 else tuple(map(_joined, self.filled(), parts))
            self._memory, self.length = Memory(tensors, end, shared=True), end
            return tensors
        if (
            memory is None
            or end > memory.tensors[0].shape[2]
            or (memory.end != begin and memory.shared)
        ):
            memory = self._memory = self._moved(parts, end)
        fresh = memory.end == begin
        for tensor, part in zip(memory.tensors, parts, strict=True):
            # What was handed out has none of the fresh slots: autograd, which may have saved it,
            # need not hear of them. Slots behind a crop are written again aloud.
            (tensor.data if fresh else tensor).narrow(2, begin, count).copy_(part)
        memory.end = self.length = end
        return tuple([x.narrow(2, 0, end) for x in memory.tensors])

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; a negative number removes from the end."""
        self.length = kept_of(length, self.length)

    def clear(self) -> None:
        """Forget every token, and give the memory back."""
        self._memory, self.length = None, 0

    def fork(self) -> Growing:
        """The same tensors, whose memory is shared until one of the two must write there."""
        if self._memory is not None:
            self._memory.shared = True
        return copy(self)

    def take(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        tensors = tuple([x.index_select(0, rows) for x in self.filled()])
        self._memory = Memory(tensors, self.length, shared=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Growing:
        # torch refuses to copy tensors with a history; a clone keeps it.
        made = copy(self)
        if self._memory is not None:
            tensors = tuple([x.clone() for x in self.filled()])
            made._memory = Memory(tensors, self.length, shared=True)
        return made

    def _moved(self, parts: tuple[Tensor, ...], end: int) -> Memory:
        """Memory with room for `end` tokens and some more, which holds what is held now."""
        room = -(-(end + end // _GROWTH) // _STEP) * _STEP
        with outside_inference():
            tensors = tuple([x.new_empty((*x.shape[:2], room, *x.shape[3:])) for x in parts])
            if self.length:
                for tensor, old in zip(tensors, self.filled(), strict=True):
                    tensor.narrow(2, 0, self.length).copy_(old)
        return Memory(tensors, self.length, shared=False)


class GrowingCache:
    """What caches of all tokens so far have in common, in whatever tensors they keep them."""

    def __init__(self) -> None:
        self._tokens = Growing()
        self._shape: Shape | None = None

    @property
    def length(self) -> int:
        """How many tokens are held."""
        return self._tokens.length

    @property
    def nbytes(self) -> int:
        """The bytes of memory that are taken: room for a quarter more tokens than are held."""
        return self._tokens.nbytes

    @property
    def filled_nbytes(self) -> int:
        """The part of `nbytes` that tokens fill."""
        return self._tokens.filled_nbytes

    def positions(self, length: int) -> Tensor:
        """Where the next `length` tokens stand: int64 [L]."""
        device = None if self._shape is None else self._shape.device
        return torch.arange(self.length, self.length + length, device=device)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; a negative number removes as many from the end."""
        self._tokens.crop(length)

    def reset(self) -> None:
        """Forget everything."""
        self._tokens.clear()
        self._shape = None

    def fork(self) -> Self:
        """A second cache with the same tokens, which shares their memory.

        The first to go on writes behind them; the other then copies them.
        """
        made = twin(self)
        made._tokens = self._tokens.fork()
        return made

    __copy__ = fork

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Make row i of the batch what row `rows[i]` was. Raises ArgumentError if empty."""
        if self._shape is None:
            raise ArgumentError("reorder: the cache is empty.")
        index = row_index(rows, self._shape.batch, self._shape.device)
        self._tokens.take(index)
        self._shape = self._shape.with_batch(len(index))

    def _accepted(self, key: Tensor, value: Tensor) -> int:
        """How many tokens are new; errors for tensors that do not fit what is held."""
        if self._shape is None:
            self._shape = first_shape(key, value)
        return self._shape.accepts(key, value)


class KVCache(GrowingCache):
    """Keys and values of all tokens so far, which grow with each call.

    Memory grows by a quarter at a time, so that a step copies its own tokens alone. Where autograd
    records keys or values, and in a graph of torch.compile, each step joins the tensors anew, and
    gradients reach every token. In torch.compile that makes a graph for each length, or a few in
    all with `dynamic=True`.
    """

    def update(self, key: Tensor, value: Tensor) -> KeyValues:
        """Append `key` [B, Hkv, L, D] and `value` [B, Hkv, L, Dv]; returns all tokens so far.

        Raises ArgumentError, DtypeError or DeviceError for tensors that do not fit what is held.
        """
        count = self._accepted(key, value)
        keys, values = self._tokens.append((key, value), count)
        return held(key=keys, value=values)


def _is_recorded(memory: Memory | None, parts: tuple[Tensor, ...]) -> bool:
    if torch.compiler.is_compiling():
        return True
    if not torch.is_grad_enabled():
        return False
    tensors = parts if memory is None else (*memory.tensors, *parts)
    return any(x.requires_grad for x in tensors)


def _joined(held_before: Tensor, part: Tensor) -> Tensor:
    return torch.cat((held_before, part), dim=2)
