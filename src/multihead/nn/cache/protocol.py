"""What every cache offers, and the checks that all of them make.

Axis names: B batch, Hkv key/value heads, L new tokens, D and Dv widths.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from ...errors import ArgumentError, DeviceError, DtypeError, MaskError
from ...ops import KeyValues


class Cache(Protocol):
    """The keys and values that one layer keeps of the tokens so far, one object for each layer.

    A step of decoding is `attention(query, cache.update(key, value), mask=mask)`. What `update`
    returns is good until the cache changes again.
    """

    @property
    def length(self) -> int:
        """How many tokens were given so far; of the longest row where rows differ."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes of memory that are taken, scales and page tables included."""
        ...

    @property
    def filled_nbytes(self) -> int:
        """The part of `nbytes` that tokens fill."""
        ...

    def positions(self, length: int) -> Tensor:
        """Where the next `length` tokens stand: int64 [L], or [B, L] where rows differ."""
        ...

    def update(self, key: Tensor, value: Tensor) -> KeyValues:
        """Append `key` [B, Hkv, L, D] and `value` [B, Hkv, L, Dv]; returns what to attend to.

        Raises ArgumentError, DtypeError or DeviceError, before anything is changed, for tensors
        that do not fit what is held.
        """
        ...

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens of each row; a negative number removes from the end.

        A row that has fewer stays as it is, and no row gets fewer than none.
        """
        ...

    def reset(self) -> None:
        """Forget every token."""
        ...

    def fork(self) -> Self:
        """A second cache with the same tokens: neither sees what happens to the other."""
        ...

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Make row i of the batch what row `rows[i]` was. `rows` may have another length.

        Raises ArgumentError where `rows` has no integers of the batch, or nothing is held.
        """
        ...


@dataclass(frozen=True)
class Shape:
    """What new keys and values must fit."""

    batch: int
    heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> Shape:
        """That of the first keys and values."""
        batch, heads, _, head_dim = key.shape
        return cls(batch, heads, head_dim, value.shape[3], key.dtype, key.device)

    def with_batch(self, batch: int) -> Shape:
        """The same for another number of rows."""
        return replace(self, batch=batch)

    def accepts(self, key: Tensor, value: Tensor) -> int:
        """The number of new tokens; raises for tensors that do not fit."""
        length = _fitting(key, value)
        batch, heads, _, head_dim = key.shape
        if (
            batch != self.batch
            or heads != self.heads
            or head_dim != self.head_dim
            or value.shape[3] != self.value_dim
            or key.dtype != self.dtype
            or key.device != self.device
        ):
            self._refuse(key, value)
        return length

    def _refuse(self, key: Tensor, value: Tensor) -> None:
        for name, held, given in (
            ("batch", self.batch, key.shape[0]),
            ("number of KV heads", self.heads, key.shape[1]),
            ("width D of the keys", self.head_dim, key.shape[3]),
            ("width Dv of the values", self.value_dim, value.shape[3]),
        ):
            if held != given:
                raise ArgumentError(
                    f"The cache's {name} is {held}, but {given} came (key {list(key.shape)}, value "
                    f"{list(value.shape)}). Use one cache for each layer and batch."
                )
        if key.dtype != self.dtype:
            raise DtypeError(
                f"The cache holds {_name(self.dtype)}, but {_name(key.dtype)} came. Write "
                f"key.to({self.dtype}), or make the cache in the other dtype."
            )
        raise DeviceError(f"The cache is on {self.device}, but key is on {key.device}.")


def check_sizes(least: int = 1, **sizes: int) -> None:
    """Raise for sizes of a cache that are no integers, or below `least`."""
    for name, size in sizes.items():
        try:
            operator.index(size)
        except TypeError:
            raise DtypeError(f"{name} must be an integer; got {size!r}.") from None
        if size < least:
            raise ArgumentError(f"{name} must be at least {least}; got {size}.")


def first_shape(key: Tensor, value: Tensor) -> Shape:
    """The shape that the first keys and values give a cache."""
    _fitting(key, value)
    return Shape.of(key, value)


def _fitting(key: Tensor, value: Tensor) -> int:
    """The number of tokens of a key and a value that fit each other."""
    if not isinstance(key, Tensor) or not isinstance(value, Tensor):
        raise DtypeError(
            "A cache takes tensors for key and value; got "
            f"{type(key).__name__} and {type(value).__name__}."
        )
    if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3]:
        raise ArgumentError(
            "key must be [B, Hkv, L, D] and value [B, Hkv, L, Dv]; got "
            f"{list(key.shape)} and {list(value.shape)}."
        )
    if key.dtype != value.dtype or not key.is_floating_point():
        raise DtypeError(
            "key and value must share one float dtype; got "
            f"{_name(key.dtype)} and {_name(value.dtype)}."
        )
    if key.device != value.device:
        raise DeviceError(f"key is on {key.device}, but value is on {value.device}.")
    return key.shape[2]


def refuse_gradients(cache: str, key: Tensor, value: Tensor) -> None:
    """Raise where autograd records: memory that is written in place has no gradients."""
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        raise ArgumentError(
            f"{cache} keeps numbers alone, and key or value requires a gradient that would be "
            "lost. Call it under torch.no_grad(), or use KVCache, which keeps gradients."
        )


def kept_of(length: int, held: int) -> int:
    """How many of `held` tokens `crop(length)` keeps."""
    length = operator.index(length)
    return max(0, held + length) if length < 0 else min(length, held)


def checked_counts(query_lengths: Tensor, batch: int, most: int) -> Tensor:
    """`query_lengths` of an update as int32 [B]; raises where they are not the rows' counts."""
    if (
        not isinstance(query_lengths, Tensor)
        or query_lengths.is_floating_point()
        or query_lengths.dtype == torch.bool
    ):
        given = query_lengths.dtype if isinstance(query_lengths, Tensor) else type(query_lengths)
        raise DtypeError(f"query_lengths must be a tensor of integers [B]; got {given}.")
    if query_lengths.shape != (batch,):
        raise ArgumentError(
            f"query_lengths must be [B] = [{batch}]; got shape {list(query_lengths.shape)}."
        )
    counts = query_lengths.to(torch.int32)
    if batch and not 0 <= int(counts.min()) <= int(counts.max()) <= most:
        raise MaskError(
            f"query_lengths must lie between 0 and {most}, the number of new tokens; got "
            f"{counts.tolist()}."
        )
    return counts


def row_index(rows: Tensor | Sequence[int], batch: int, device: torch.device) -> Tensor:
    """The argument of `reorder` as int64 [B]; raises ArgumentError or DtypeError."""
    index = torch.as_tensor(rows, device=device)
    if index.is_floating_point() or index.dtype == torch.bool:
        raise DtypeError(f"reorder takes the rows' integers; got {_name(index.dtype)}.")
    if index.ndim != 1:
        raise ArgumentError(f"reorder takes [B] rows; got shape {list(index.shape)}.")
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < batch:
        raise ArgumentError(
            f"reorder takes rows from 0 to {batch - 1}, since the batch is {batch}; got "
            f"{index.tolist()}."
        )
    return index.long()


_Held = TypeVar("_Held")


def twin(cache: _Held) -> _Held:
    """Another object with the same attributes, for `fork` to part from the first.

    Not `copy.copy`: that of a cache is a fork, since two caches on one memory spoil each other.
    """
    made = object.__new__(type(cache))
    made.__dict__.update(cache.__dict__)
    return made


@contextmanager
def outside_inference() -> Iterator[None]:
    """Makes memory that may be written later: what inference mode makes, only inference mode may.

    Without gradients.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
