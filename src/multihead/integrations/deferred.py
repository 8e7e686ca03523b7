"""Tensors that attention reads as they lie, and that anything else writes out first.

A model hands keys and values on from line to line before it attends to them. What stands there
instead of a tensor must be one for every line that looks: `Deferred` tensors become plain ones as
soon as an operation other than attention asks for their numbers.
"""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..ops.tracing import intercepted

_LEAST = 1 << 14  # numbers; what is smaller is copied sooner than wrapped


class Deferred(Tensor):
    """A tensor [B, H, L, D] that is written out when its numbers are asked for."""

    _written: Tensor | None

    @classmethod
    def _like(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._written = None
        return made

    @property
    def is_written(self) -> bool:
        """Whether there is a plain tensor by now, which may have changed since."""
        return self._written is not None

    def written(self) -> Tensor:
        """The plain tensor, always the same one."""
        if self._written is None:
            with torch._C.DisableTorchFunction():
                self._written = self._write()
        return self._written

    def _write(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _DESCRIBE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


class Repeated(Deferred):
    """`source` [B, Hkv, L, D] with each head `times` over, [B, Hkv * times, L, D].

    A model without grouped attention of its own writes each KV head out once for every query head
    that reads it: at long contexts that is most of what a decoding step reads and writes.
    """

    source: Tensor
    times: int

    @staticmethod
    def __new__(cls, source: Tensor, times: int) -> Repeated:
        batch, heads, length, width = source.shape
        repeated = cls._like((batch, heads * times, length, width), source.dtype, source.device)
        repeated.source, repeated.times = source, times
        return repeated

    def _write(self) -> Tensor:
        return self.source.repeat_interleave(self.times, dim=1)


class Scaled(Deferred):
    """int8 `numbers` [B, Hkv, L, D] times `scale` [B, Hkv, L], in a float dtype."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Scaled:
        scaled = cls._like(tuple(numbers.shape), dtype, numbers.device)
        scaled.numbers, scaled.scale = numbers, scale
        return scaled

    def _write(self) -> Tensor:
        return (self.numbers * self.scale[..., None]).to(self.dtype)


class Repeats:
    """The tensors that one forward pass repeated and that are not written out yet."""

    def __init__(self) -> None:
        self._waiting: list[weakref.ref[Repeated]] = []

    def before(self, func: Any) -> None:
        """Write out what waits, unless `func` leaves the numbers of all tensors as they are."""
        if self._waiting and func not in _HARMLESS:
            for reference in self._waiting:
                repeated = reference()
                if repeated is not None:
                    repeated.written()
            self._waiting.clear()

    def of_reshape(self, tensor: Tensor, *shape: Any) -> Repeated | None:
        """`tensor.reshape(shape)`, where it writes out an expanded third axis of five."""
        if type(tensor) is not Tensor or tensor.ndim != 5 or tensor.stride(2) != 0:
            return None
        batch, heads, times, length, width = tensor.shape
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if times < 2 or sizes != (batch, heads * times, length, width):
            return None
        return self._wrap(tensor[:, :, 0], times)

    def of_interleave(
        self, tensor: Tensor, repeats: Any = None, dim: int | None = None, **others: Any
    ) -> Repeated | None:
        """`repeat_interleave(tensor, repeats, dim)`, where it repeats the second axis of four."""
        if type(tensor) is not Tensor or others or type(repeats) is not int or repeats < 2:
            return None
        if tensor.ndim != 4 or dim not in (1, -3):
            return None
        return self._wrap(tensor, repeats)

    def _wrap(self, source: Tensor, times: int) -> Repeated | None:
        if (
            source.numel() * times < _LEAST
            or source.device.type != "cpu"
            or (source.requires_grad and torch.is_grad_enabled())
            or intercepted()
        ):
            return None
        repeated = Repeated(source, times)
        self._waiting.append(weakref.ref(repeated))
        return repeated


def _plain(x: Any) -> Any:
    return x.written() if isinstance(x, Deferred) else x


_PROPERTIES = (
    "shape",
    "ndim",
    "dtype",
    "device",
    "layout",
    "is_nested",
    "is_cuda",
    "is_cpu",
    "requires_grad",
)
_DESCRIBE: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.__len__,
        Tensor.is_floating_point,
    }
)
# What neither reads a repeated tensor's numbers nor writes to any.
_HARMLESS = _DESCRIBE | {
    torch.nn.functional.scaled_dot_product_attention,
    Tensor.reshape,
    Tensor.expand,
    Tensor.view,
    Tensor.transpose,
    Tensor.contiguous,
    Tensor.__getitem__,
    Tensor.repeat_interleave,
    torch.repeat_interleave,
    Tensor.stride,
}
