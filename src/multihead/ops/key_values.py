"""Keys and values as a cache holds them, which attention takes in place of two tensors.

Axis names: B batch, Hkv key/value heads, Lk keys, D and Dv widths, P pages, S tokens of a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, DeviceError, DtypeError
from ..masks import Mask
from .problem import ALiBi, checked_mask


@dataclass(frozen=True, eq=False)
class KeyValues:
    """The keys and values of a cache, and where the rows of a call stand among them.

    They lie in one of three ways:

    * as tensors: `key` [B, Hkv, Lk, D] and `value` [B, Hkv, Lk, Dv];
    * in pages: `key` [P, Hkv, S, D] and `value` [P, Hkv, S, Dv], where token j of row b is token
      `j % S` of page `pages[b, j // S]`, and there are `length` of them;
    * as int8, in tensors or in pages: a number is the element times its token's scale in
      `key_scale` and `value_scale`, float32 [B, Hkv, Lk] or [P, Hkv, S].

    On the CPU a call of few queries reads pages and int8 where they lie. Any other call (prefill,
    the backends "chunked" and "reference", autograd, torch.compile, a result's `weights`) first
    writes them out as tensors of query's dtype: once, in O(Lk) time and memory.

    Attributes:
        key: the keys, as above.
        value: the values, as above.
        frame: what `attention` intersects with the caller's mask: which slots are filled, and the
            positions of rows and keys. None where the rows are the newest tokens of `key`.
        pages: int32 [B, n], None where there are no pages.
        length: Lk, with pages alone: at most n S.
        key_scale: None where the numbers are not int8.
        value_scale: likewise.
        columns: integers [Lk] where the keys are a part of the sequence: column c is its token
            `columns[c]`. Masks and biases by column are then given for the whole sequence.

    Raises:
        ArgumentError, DtypeError, DeviceError: parts that do not fit one another.
    """

    key: Tensor
    value: Tensor
    frame: Mask | None = None
    pages: Tensor | None = None
    length: int | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    columns: Tensor | None = None

    def __post_init__(self) -> None:
        if self.pages is not None:
            _check_pages(self.key, self.value, self.pages, self.length)
        elif self.length is not None:
            raise ArgumentError("length is given with pages alone; key says it otherwise.")
        if (self.key_scale is None) != (self.value_scale is None):
            raise ArgumentError("key_scale and value_scale are given together or not at all.")
        if self.key_scale is not None and self.value_scale is not None:
            _check_scale("key", self.key, self.key_scale)
            _check_scale("value", self.value, self.value_scale)

    @property
    def are_tensors(self) -> bool:
        """Whether key and value are [B, Hkv, Lk, D] in a float dtype."""
        return self.pages is None and self.key_scale is None

    @property
    def batch(self) -> int:
        """B."""
        return (self.key if self.pages is None else self.pages).shape[0]

    @property
    def key_length(self) -> int:
        """Lk."""
        return self.key.shape[2] if self.length is None else self.length

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """key [B, Hkv, Lk, D] and value [B, Hkv, Lk, Dv], written out where they are not.

        Numbers that were int8 come in `dtype`, others in their own.
        """
        return (
            self._written_out(self.key, self.key_scale, dtype),
            self._written_out(self.value, self.value_scale, dtype),
        )

    def stand_ins(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tensors like those of `tensors`, whose numbers mean nothing, in O(1)."""
        numbers = self.key if self.key_scale is None else self.key_scale
        empty = numbers.new_empty(1, dtype=dtype if self.key_scale is not None else None)
        shape = self.batch, self.key.shape[1], self.key_length
        return empty.expand(*shape, self.key.shape[3]), empty.expand(*shape, self.value.shape[3])

    def rule(self, mask: Mask | Tensor | None) -> Mask | Tensor | None:
        """The caller's mask within this frame."""
        if self.frame is None:
            return mask
        if mask is None:
            return self.frame
        return checked_mask(mask).within(self.columns) & self.frame

    def bias(self, bias: Tensor | ALiBi | None) -> Tensor | ALiBi | None:
        """The caller's bias at these columns."""
        if self.columns is None or not isinstance(bias, Tensor) or bias.shape[-1:] in ((), (1,)):
            return bias
        return bias.index_select(-1, self.columns)

    def _written_out(self, numbers: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        pages = None if self.pages is None else self.pages.long()
        if pages is not None:
            numbers = numbers[pages]
            scale = None if scale is None else scale[pages]
        if scale is not None:
            numbers = (numbers * scale[..., None]).to(dtype)
        if pages is None:
            return numbers
        batch, count, heads, size, width = numbers.shape
        rows = numbers.transpose(1, 2).reshape(batch, heads, count * size, width)
        return rows[:, :, : self.length]


def held(**parts: Any) -> KeyValues:
    """KeyValues of a cache, which fit: to check each token's costs as long as to attend to it."""
    made = object.__new__(KeyValues)
    made.__dict__.update(parts)
    return made


def _check_pages(key: Tensor, value: Tensor, pages: Tensor, length: int | None) -> None:
    if pages.dtype != torch.int32 or pages.ndim != 2:
        raise DtypeError(
            f"pages must be an int32 tensor [B, n]; got {_kind(pages)}. Write "
            "pages.to(torch.int32)."
        )
    if pages.device != key.device:
        raise DeviceError(f"pages is on {pages.device}, but key is on {key.device}.")
    if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3]:
        raise ArgumentError(
            "with pages key must be [P, Hkv, S, D] and value [P, Hkv, S, Dv]; got "
            f"{list(key.shape)} and {list(value.shape)}."
        )
    room = pages.shape[1] * key.shape[2]
    if length is None or not 0 <= length <= room:
        raise ArgumentError(
            f"length must count the tokens of {pages.shape[1]} pages of {key.shape[2]}, 0 to "
            f"{room}; got {length}."
        )
    if torch.compiler.is_compiling() or pages.numel() == 0:
        return
    lowest, highest = int(pages.min()), int(pages.max())
    if lowest < 0 or highest >= key.shape[0]:
        wrong = lowest if lowest < 0 else highest
        raise ArgumentError(f"pages must lie between 0 and {key.shape[0] - 1}; got {wrong}.")


def _check_scale(name: str, numbers: Tensor, scale: Tensor) -> None:
    if numbers.dtype != torch.int8:
        raise DtypeError(f"{name} must be int8 where it has scales; got {_kind(numbers)}.")
    if scale.dtype != torch.float32:
        raise DtypeError(f"{name}_scale must be float32; got {_kind(scale)}.")
    if scale.shape != numbers.shape[:3]:
        raise ArgumentError(
            f"{name}_scale must have one number for each token and head, {list(numbers.shape[:3])}"
            f"; got {list(scale.shape)}."
        )
    if scale.device != numbers.device:
        raise DeviceError(f"{name}_scale is on {scale.device}, but {name} is on {numbers.device}.")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
