"""The caches of a model: one a layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from ..errors import ArgumentError, DtypeError
from ..masks import Window
from ..nn import (
    Cache,
    KVCache,
    PagedKVCache,
    QuantizedKVCache,
    SplitKVCache,
    StaticKVCache,
    WindowKVCache,
)
from ..ops.split_key_values import UNBOUNDED
from .config import BlockConfig

CacheKind = Literal["growing", "static", "window", "paged", "int8"]


def build_caches(
    layers: Sequence[BlockConfig],
    windows: Sequence[Window | None],
    kind: CacheKind,
    batch: int,
    capacity: int | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Cache]:
    """An empty cache for each layer, whose attention has a window or none.

    See `LanguageModel.make_caches`.
    """
    if kind not in get_args(CacheKind):
        raise ArgumentError(
            f"there is no cache of kind {kind!r}; there are {', '.join(get_args(CacheKind))}."
        )
    if kind == "static" and capacity is None:
        raise ArgumentError("a static cache is taken at once: say how many tokens, capacity=.")

    def build(layer: BlockConfig, window: Window | None) -> Cache:
        if kind == "int8":
            return QuantizedKVCache()
        if kind == "window" and window is not None and window.left is not None:
            if isinstance(window.left, Tensor):
                return SplitKVCache(_by_kv_head(window.left, layer.kv_heads), window.keep_first)
            return WindowKVCache(window.left + 1, window.keep_first)
        if kind in ("growing", "window"):
            return KVCache()
        heads, width = layer.kv_heads, layer.width
        if kind == "paged":
            return PagedKVCache(batch, heads, width, dtype=dtype, device=device)
        assert capacity is not None
        return StaticKVCache(batch, heads, capacity, width, dtype=dtype, device=device)

    return [build(layer, window) for layer, window in zip(layers, windows, strict=True)]


def _by_kv_head(left_h: Tensor, kv_heads: int) -> list[int | None]:
    """How many tokens each KV head has to hold: what the farthest of its query heads sees."""
    farthest = left_h.view(kv_heads, -1).amax(1).tolist()
    return [None if left >= UNBOUNDED else left + 1 for left in farthest]


def check_caches(name: str, caches: Sequence[Cache] | None, layers: int) -> None:
    """Raise DtypeError or ArgumentError unless there is one cache for each layer, its own."""
    if caches is None:
        return
    if not isinstance(caches, Sequence):
        raise DtypeError(
            f"{name} must be a list with a cache for each layer, as make_caches() returns; got "
            f"{type(caches).__name__}."
        )
    if len(caches) != layers:
        raise ArgumentError(
            f"{name} must hold a cache for each of the model's {layers} layers; got {len(caches)}."
        )
    if not torch.compiler.is_compiling() and len(set(map(id, caches))) < layers:
        raise ArgumentError(
            f"{name} must hold a cache of its own for each layer, but one is there twice. "
            "[cache] * n repeats one object; make_caches() makes several."
        )


def length_of(caches: Sequence[Cache]) -> int:
    """How many tokens the caches of a model hold, of their longest row."""
    return caches[0].length


def nbytes_of(caches: Sequence[Cache]) -> int:
    """The bytes of memory that the caches of a model take."""
    return sum(cache.nbytes for cache in caches)
