"""Keys and values that a model repeats for its query heads, kept as they were before.

A model without grouped attention of its own writes each KV head out once for every query head that
reads it: at long contexts that is most of what a decoding step reads and writes.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..ops import library

_LEAST = 1 << 14  # numbers; what is smaller is copied sooner than wrapped


class Repeated(Tensor):
    """`source` [B, Hkv, L, D] with each head `times` over, [B, Hkv * times, L, D].

    It is written out when anything but attention reads it, and is that tensor then.
    """

    source: Tensor
    times: int
    _written: Tensor | None

    @staticmethod
    def __new__(cls, source: Tensor, times: int) -> Repeated:
        batch, heads, length, width = source.shape
        repeated = torch.Tensor._make_wrapper_subclass(
            cls, (batch, heads * times, length, width), dtype=source.dtype, device=source.device
        )
        repeated.source, repeated.times, repeated._written = source, times, None
        return repeated

    @property
    def is_written(self) -> bool:
        """Whether there is a tensor of all heads by now, which may have changed since."""
        return self._written is not None

    def written(self) -> Tensor:
        """The tensor of all heads."""
        if self._written is None:
            with torch._C.DisableTorchFunction():
                self._written = self.source.repeat_interleave(self.times, dim=1)
        return self._written

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
            or library.intercepted()
        ):
            return None
        repeated = Repeated(source, times)
        self._waiting.append(weakref.ref(repeated))
        return repeated


def _plain(x: Any) -> Any:
    return x.written() if type(x) is Repeated else x


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
