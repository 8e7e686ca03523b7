"""One call to be timed, described so that every contestant can make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multihead.masks import Mask

Entry = dict[str, Any]
"""What a row leaves in the document: JSON values."""


@dataclass(frozen=True)
class Case:
    """Shapes, dtype and mask of one call; query is [batch, heads, queries, width]."""

    kind: str
    dtype: torch.dtype
    queries: int
    keys: int
    heads: int = 8
    kv_heads: int = 8
    width: int = 64
    batch: int = 1
    mask: Mask | None = None

    @property
    def dtype_name(self) -> str:
        """`float32`, `bfloat16` or `float16`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def name(self) -> str:
        """What `--only` looks into."""
        return f"{self.kind}-{self.keys}-d{self.width}-{self.dtype_name}"

    @property
    def operations(self) -> int:
        """Multiplications and additions of the two products, over visible pairs alone."""
        pairs = self.queries * self.keys
        if self.mask is not None:
            pairs = self.mask.visible_pairs(self.queries, self.keys)
        return 4 * self.batch * self.heads * self.width * pairs

    @property
    def cache_bytes(self) -> int:
        """Bytes of key and value."""
        return 2 * self.batch * self.kv_heads * self.keys * self.width * self.dtype.itemsize

    @property
    def table_bytes(self) -> int:
        """Bytes of all heads' scores in `dtype`, for whoever forms them."""
        return self.batch * self.heads * self.queries * self.keys * self.dtype.itemsize

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of independent normal numbers."""
        generator = torch.Generator().manual_seed(seed + self.keys)

        def normal(heads: int, length: int) -> Tensor:
            shape = (self.batch, heads, length, self.width)
            return torch.randn(shape, generator=generator).to(self.dtype)

        return (
            normal(self.heads, self.queries),
            normal(self.kv_heads, self.keys),
            normal(self.kv_heads, self.keys),
        )

    def to_json(self) -> Entry:
        """The fields that a table may want."""
        return {
            "name": self.name,
            "kind": self.kind,
            "dtype": self.dtype_name,
            "batch": self.batch,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "queries": self.queries,
            "keys": self.keys,
            "width": self.width,
        }
