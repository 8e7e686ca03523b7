"""The cache of latent attention: one latent and one rotated key a token, for all heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..ops import KeyValues
from ..ops.key_values import held
from .cache import Cache, KVCache, QuantizedKVCache
from .checks import check_sizes


class LatentKVCache:
    """Latents and rotated keys of all tokens so far, for one `LatentAttention`.

    A token is one entry of `latent_dim + rope_dim` numbers, whatever the number of heads. To
    attention the entries are keys, and their first `latent_dim` lanes values: a view, so that
    nothing is held twice.

    How memory grows, forks, is reordered and cropped is up to the cache underneath:

        LatentKVCache(512)                                        # grows, as KVCache
        LatentKVCache(512, StaticKVCache(B, 1, capacity, 512 + 64, 0))  # preallocated, ragged

    Args:
        latent_dim: width of a latent.
        entries: the cache that holds entries as keys of one head, and values of width 0; by
            default a `KVCache`.

    Raises:
        ArgumentError: entries that hold something already, or in int8, which rounds a latent and
            a rotated key by one scale.
    """

    def __init__(self, latent_dim: int, entries: Cache | None = None) -> None:
        check_sizes(latent_dim=latent_dim)
        if isinstance(entries, QuantizedKVCache):
            raise ArgumentError(
                "entries can't be a QuantizedKVCache: a latent and a rotated key differ in size, "
                "and one scale would round both. Use KVCache, StaticKVCache or PagedKVCache."
            )
        if entries is not None and entries.length:
            raise ArgumentError(
                f"entries must be empty; it holds {entries.length} tokens. Call its reset()."
            )
        self.latent_dim = latent_dim
        self._entries: Cache = KVCache() if entries is None else entries

    @property
    def length(self) -> int:
        """How many tokens were given so far; of the longest row where rows differ."""
        return self._entries.length

    @property
    def lengths(self) -> Tensor | None:
        """How many tokens each row holds, int32 [B], where the cache underneath counts by row."""
        return getattr(self._entries, "lengths", None)

    @property
    def nbytes(self) -> int:
        """The bytes of memory that are taken."""
        return self._entries.nbytes

    @property
    def filled_nbytes(self) -> int:
        """The part of them that tokens fill."""
        return self._entries.filled_nbytes

    def positions(self, length: int) -> Tensor:
        """Where the next `length` tokens stand: int64 [L], or [B, L] where rows differ."""
        return self._entries.positions(length)

    def update(self, key: Tensor, value: Tensor, query_lengths: Tensor | None = None) -> KeyValues:
        """Append entries: rotated keys `key` [B, 1, L, rope_dim], latents `value` [B, 1, L, C].

        With `query_lengths`, integers [B], row b appends its first `query_lengths[b]` tokens alone;
        for a cache underneath that counts by row (StaticKVCache, PagedKVCache).

        Returns what to attend to with queries of latent_dim + rope_dim lanes, the latent first:
        keys [B, 1, Lk, C + rope_dim], and as values a view of their first C = latent_dim lanes.

        Raises ArgumentError, DtypeError or DeviceError for tensors that do not fit what is held.
        """
        if value.ndim != 4 or value.shape[1] != 1 or value.shape[3] != self.latent_dim:
            raise ArgumentError(
                f"latents must be [B, 1, L, {self.latent_dim}]; got {list(value.shape)}."
            )
        if key.shape[:3] != value.shape[:3]:
            raise ArgumentError(
                "the rotated keys must be [B, 1, L, rope_dim] for latents [B, 1, L, latent_dim]; "
                f"got {list(key.shape)} and {list(value.shape)}."
            )
        entries = torch.cat((value, key), dim=-1)
        more = {} if query_lengths is None else {"query_lengths": query_lengths}
        kv = self._entries.update(entries, entries[..., :0], **more)
        return held(**{**vars(kv), "value": kv.key[..., : self.latent_dim]})

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens of each row; a negative number removes from the end."""
        self._entries.crop(length)

    def reset(self) -> None:
        """Forget every token."""
        self._entries.reset()

    def fork(self) -> Self:
        """A second cache with the same tokens: neither sees what happens to the other."""
        made = object.__new__(type(self))
        made.latent_dim, made._entries = self.latent_dim, self._entries.fork()
        return made

    __copy__ = fork

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Make row i of the batch what row `rows[i]` was."""
        self._entries.reorder(rows)
