"""Key-value caches: what a layer keeps of the tokens that it has seen."""

from __future__ import annotations

from torch import Tensor, cat

from ..errors import ArgumentError
from ..ops import KeyValues


class KVCache:
    """Keys and values of all tokens so far, which grow with each call.

    One object serves one layer.
    """

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    @property
    def length(self) -> int:
        """How many tokens are held."""
        return 0 if self._key is None else self._key.shape[2]

    @property
    def nbytes(self) -> int:
        """The bytes of what is held."""
        if self._key is None or self._value is None:
            return 0
        return self._key.nbytes + self._value.nbytes

    def update(self, key: Tensor, value: Tensor) -> KeyValues:
        """Append `key` [B, Hkv, L, D] and `value` [B, Hkv, L, Dv]; returns all tokens so far."""
        if self._key is None or self._value is None:
            self._key, self._value = key, value
        else:
            self._key = cat((self._key, key), dim=2)
            self._value = cat((self._value, value), dim=2)
        return KeyValues(self._key, self._value)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; a negative number removes as many from the end."""
        kept = max(0, self.length + length) if length < 0 else min(length, self.length)
        if self._key is not None and self._value is not None:
            self._key, self._value = self._key[:, :, :kept], self._value[:, :, :kept]

    def reset(self) -> None:
        """Forget everything."""
        self._key = self._value = None

    def fork(self) -> KVCache:
        """A second cache with the same tokens; neither sees what the other appends."""
        copy = KVCache()
        copy._key, copy._value = self._key, self._value
        return copy

    def reorder(self, rows: Tensor) -> None:
        """Make row i of the batch what row `rows[i]` was."""
        if self._key is None or self._value is None:
            raise ArgumentError("reorder: the cache is empty.")
        self._key, self._value = self._key[rows], self._value[rows]
