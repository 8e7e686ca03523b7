"""Keys and values as a cache holds them, which attention takes in place of two tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..masks import Mask


@dataclass(frozen=True, eq=False)
class KeyValues:
    """The keys and values of a cache, and where the rows of a call stand among them.

    Attributes:
        key: [B, Hkv, Lk, D].
        value: [B, Hkv, Lk, Dv].
        frame: what `attention` intersects with the caller's mask: which slots are filled, and the
            positions of rows and keys. None where the rows are the newest tokens of `key`.
    """

    key: Tensor
    value: Tensor
    frame: Mask | None = None
