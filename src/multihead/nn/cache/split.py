"""A cache whose heads look back differently far: some hold all tokens, others the newest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...masks import Window
from ...ops import KeyValues
from ...ops.split_key_values import split
from .growing import KVCache
from .protocol import check_sizes, twin
from .window import WindowKVCache


class SplitKVCache:
    """Keys and values of all tokens for some KV heads, and of the newest for others.

    Heads with one window share a `WindowKVCache`, heads without one a `KVCache`, and what holds for
    these holds here. `attention` attends to each part by itself, so that a step of decoding reads
    what is held alone.

    Args:
        windows: for each KV head how many of the newest tokens its queries see, their own
            included; None for a head that sees all.
        keep_first: how many of the first tokens heads with a window keep for good.

    Raises:
        ArgumentError, DtypeError: no heads, or sizes that a cache cannot have.

    Source: Xiao et al. 2024 (DuoAttention).
    """

    def __init__(self, windows: Sequence[int | None], keep_first: int = 0) -> None:
        if not windows:
            raise ArgumentError("windows must hold a number or None for each KV head; got none.")
        for window in windows:
            if window is not None:
                check_sizes(window=window)
        check_sizes(0, keep_first=keep_first)
        self.windows = tuple(windows)
        self.keep_first = keep_first
        alike: dict[int | None, list[int]] = {}
        for head, window in enumerate(self.windows):
            alike.setdefault(window, []).append(head)
        self._heads = tuple(tuple(heads) for heads in alike.values())
        self._applied = tuple(
            None if window is None else Window(window - 1, None, keep_first) for window in alike
        )
        self._caches: tuple[KVCache | WindowKVCache, ...] = tuple(
            KVCache() if window is None else WindowKVCache(window, keep_first) for window in alike
        )

    @property
    def length(self) -> int:
        """How many tokens came so far."""
        return self._caches[0].length

    @property
    def nbytes(self) -> int:
        """The bytes of memory that are taken."""
        return sum(cache.nbytes for cache in self._caches)

    @property
    def filled_nbytes(self) -> int:
        """The part of `nbytes` that tokens fill."""
        return sum(cache.filled_nbytes for cache in self._caches)

    def positions(self, length: int) -> Tensor:
        """Where the next `length` tokens stand: int64 [L]."""
        return self._caches[0].positions(length)

    def update(self, key: Tensor, value: Tensor) -> KeyValues:
        """Append `key` [B, Hkv, L, D] and `value` [B, Hkv, L, Dv]; returns what its queries see.

        Raises ArgumentError, DtypeError or DeviceError for tensors that do not fit what is held.
        """
        for name, tensor in (("key", key), ("value", value)):
            if tensor.ndim == 4 and tensor.shape[1] != len(self.windows):
                raise ArgumentError(
                    f"{name} has {tensor.shape[1]} KV heads, but the cache was made for "
                    f"{len(self.windows)}: one window, or None, for each."
                )
        parts = []
        for heads, cache in zip(self._heads, self._caches, strict=True):
            parts.append(cache.update(_of(key, heads), _of(value, heads)))
        return parts[0] if len(parts) == 1 else split(self._heads, parts, self._applied)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; a negative number removes as many from the end.

        Raises ArgumentError as `WindowKVCache.crop` does; nothing is changed then.
        """
        for cache in self._caches:
            kept = cache.length + length if length < 0 else length
            if isinstance(cache, WindowKVCache) and kept > self.keep_first:
                twin(cache).crop(length)  # raises before any part is cropped
        for cache in self._caches:
            cache.crop(length)

    def reset(self) -> None:
        """Forget everything, and give the memory back."""
        for cache in self._caches:
            cache.reset()

    def fork(self) -> Self:
        """A second cache with the same tokens."""
        made = twin(self)
        made._caches = tuple(cache.fork() for cache in self._caches)
        return made

    __copy__ = fork

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Make row i of the batch what row `rows[i]` was. Raises ArgumentError if empty."""
        for cache in self._caches:
            cache.reorder(rows)


def _of(tensor_bgkd: Tensor, heads: tuple[int, ...]) -> Tensor:
    """These heads; a view where they stand side by side."""
    if tensor_bgkd.ndim != 4:
        return tensor_bgkd  # refused by the part's cache
    if heads[-1] - heads[0] + 1 == len(heads):
        return tensor_bgkd.narrow(1, heads[0], len(heads))
    return tensor_bgkd.index_select(1, torch.tensor(heads, device=tensor_bgkd.device))
