"""The one table of cases that feeds forward, backward, statistics, compile and every backend.

Sizes are distinct primes where the rule allows, so that a swapped axis fails.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead import (
    ALiBi,
    Causal,
    Dense,
    Documents,
    KeyLengths,
    KeyPadding,
    Mask,
    Positions,
    PrefixCausal,
    QueryStart,
    SlidingWindow,
    Window,
)

Layout = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One call of attention; tensors are drawn from a seed of the case's own name."""

    name: str
    batch: int = 2
    heads: int = 3
    kv_heads: int = 3
    query_length: int = 7
    key_length: int = 11
    head_dim: int = 5
    value_dim: int = 5
    mask: Mask | None = None
    bias: tuple[int, int, int, int] | str | None = None
    softcap: float | None = None
    sinks: float | None = None
    scale: float | None = None
    layout: str = "contiguous"

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """query, key, value, in the layout of the case; equal values in every dtype and layout."""
        draw = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        layout = LAYOUTS[self.layout]

        def normal(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=draw, dtype=torch.float64)
            return layout(values.to(torch.bfloat16).to(dtype))

        return (
            normal(self.batch, self.heads, self.query_length, self.head_dim),
            normal(self.batch, self.kv_heads, self.key_length, self.head_dim),
            normal(self.batch, self.kv_heads, self.key_length, self.value_dim),
        )

    def options(self, dtype: torch.dtype = torch.float32) -> dict[str, object]:
        """The keyword arguments of the call; bias and sinks in `dtype`."""
        draw = torch.Generator().manual_seed(zlib.crc32(self.name.encode()) + 1)

        def normal(shape: tuple[int, ...]) -> Tensor:
            values = torch.randn(shape, generator=draw, dtype=torch.float64)
            return values.to(torch.bfloat16).to(dtype)

        bias: Tensor | ALiBi | None = None
        if self.bias == "alibi":
            bias = ALiBi(normal((self.heads,)).abs())
        elif self.bias == "hiding":
            bias = normal((self.batch, 1, self.query_length, self.key_length))
            bias = bias.masked_fill(bias > 0.75, -torch.inf)
        elif self.bias is not None:
            assert isinstance(self.bias, tuple)
            bias = normal(self.bias)
        return {
            "mask": self.mask,
            "bias": bias,
            "softcap": self.softcap,
            "sinks": None if self.sinks is None else self.sinks * normal((self.heads,)),
            "scale": self.scale,
        }


def _strided(x: Tensor) -> Tensor:
    wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


LAYOUTS: dict[str, Layout] = {
    "contiguous": lambda x: x,
    "length before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "width before length": lambda x: x.mT.contiguous().mT,
    "every second element": _strided,
    "expanded over heads": lambda x: x[:, :1].expand_as(x),
    "expanded over batch and width": lambda x: x[:1, ..., :1].expand_as(x),
}


def _holes(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.rand(shape, generator=draw) < 0.6


_LEFT_PADDED = torch.arange(11) >= torch.tensor([[4], [0]])
_RIGHT_PADDED = torch.arange(11) < torch.tensor([[9], [3]])
_INNER_PADDED = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1, 1, 0, 1], [0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0]])
_PACKED = torch.tensor([[0, 0, 0, 4, 4, 4, 4, 2, 2, -1, -1], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 3]])

CASES = [
    Case("plain"),
    Case("square", query_length=13, key_length=13, mask=Causal()),
    Case("one query", query_length=1, mask=Causal()),
    Case("one key", key_length=1),
    Case("more queries than keys", query_length=11, key_length=7, mask=Causal()),
    Case("causal", mask=Causal()),
    Case("top-left causal", mask=Causal() & QueryStart(0)),
    Case("start per sample", mask=Causal() & QueryStart(torch.tensor([2, 6]))),
    Case("window", mask=Window(3, 2)),
    Case("window per head", mask=Window(torch.tensor([0, 2, 5]), torch.tensor([1, 0, 3]))),
    Case("sliding window", mask=SlidingWindow(3)),
    Case("window that keeps first keys", query_length=11, mask=Window(2, 0, keep_first=2)),
    Case("two windows", query_length=11, mask=Window(2, 0, keep_first=4) & Window(5, 1, 1)),
    Case("prefix", mask=PrefixCausal(6)),
    Case("prefix per sample", mask=PrefixCausal(torch.tensor([9, 0]))),
    Case("prefix in a window", mask=PrefixCausal(6) & Window(4, 3)),
    Case("left padding", query_length=11, mask=Causal() & KeyPadding(_LEFT_PADDED)),
    Case("right padding", query_length=11, mask=KeyPadding(_RIGHT_PADDED)),
    Case("inner padding", mask=Window(6, 2, keep_first=1) & KeyPadding(_INNER_PADDED.bool())),
    Case("padding only", mask=KeyPadding(torch.tensor([[True] * 11, [False] * 11]))),
    Case("cache of ragged rows", query_length=3, mask=Causal() & KeyLengths(torch.tensor([11, 5]))),
    Case(
        "ragged batch",
        query_length=11,
        mask=Causal()
        & KeyLengths(torch.tensor([11, 4]), query_lengths=torch.tensor([11, 4])),
    ),
    Case("empty cache row", query_length=3, mask=KeyLengths(torch.tensor([0, 8]))),
    Case("documents", query_length=11, mask=Causal() & Documents(_PACKED)),
    Case("documents with keys", mask=Causal() & Documents(_PACKED[:, 4:], _PACKED)),
    Case(
        "explicit positions",
        mask=Causal()
        & Window(6, 0, keep_first=2)
        & Positions(
            torch.tensor([9, 2, 10, 3, 0, 12, 7]), torch.tensor([5, 0, 9, 3, 10, 1, 8, 2, 6, 4, 7])
        ),
    ),
    Case("dense", mask=Dense(_holes(2, 3, 7, 11))),
    Case("dense over keys", mask=Dense(_holes(2, 1, 1, 11)) & Causal()),
    Case("dense over queries", mask=Dense(_holes(1, 3, 7, 1))),
    Case("nothing visible", mask=Dense(torch.zeros(7, 11, dtype=torch.bool))),
    Case("bias", bias=(2, 3, 7, 11)),
    Case("bias over keys", bias=(1, 1, 1, 11), mask=Causal()),
    Case("bias over queries and heads", bias=(1, 3, 7, 1)),
    Case("bias that hides", bias="hiding", mask=Causal()),
    Case("alibi", bias="alibi", mask=Causal()),
    Case("softcap", softcap=1.7, mask=Causal()),
    Case("sinks", sinks=1.0, mask=Causal()),
    Case("sinks above every key", sinks=300.0, mask=Causal()),
    Case("sinks on empty rows", sinks=1.0, mask=Dense(_holes(2, 1, 7, 1))),
    Case(
        "all together",
        bias=(2, 1, 7, 11),
        softcap=2.3,
        sinks=1.0,
        scale=0.7,
        mask=Window(4, 1, keep_first=1) & KeyPadding(_INNER_PADDED.bool()),
    ),
    Case("scale zero", scale=0.0, mask=Causal()),
    Case("negative scale", scale=-0.6, mask=Causal()),
    Case("large logits", scale=40.0, mask=Causal()),
    Case("grouped", heads=6, kv_heads=2, mask=Causal()),
    Case("multi-query", heads=5, kv_heads=1, mask=SlidingWindow(4)),
    Case("grouped with bias", heads=6, kv_heads=3, bias=(1, 6, 1, 11), sinks=1.0),
    Case("wide values", value_dim=17, mask=Causal()),
    Case("narrow values", head_dim=17, value_dim=2, mask=Causal()),
    Case("width one", head_dim=1, value_dim=1),
    Case("width of a model", query_length=37, key_length=41, head_dim=64, value_dim=64,
         mask=Causal()),
    Case("long", batch=1, heads=2, kv_heads=1, query_length=139, key_length=401, head_dim=19,
         value_dim=23, mask=Causal()),
    Case("long window", batch=1, heads=2, kv_heads=1, query_length=263, key_length=263,
         head_dim=19, value_dim=23, mask=Window(9, 0)),
    Case("long with a kept start", batch=1, heads=1, kv_heads=1, query_length=263, key_length=263,
         mask=Window(5, 0, keep_first=3)),
    *(Case(f"layout: {name}", layout=name, heads=6, kv_heads=3, mask=Causal()) for name in LAYOUTS),
    Case("no queries", query_length=0),
    Case("no keys", key_length=0),
    Case("no batch", batch=0, mask=Causal()),
    Case("no keys but sinks", key_length=0, sinks=1.0),
]  # fmt: skip

# Lengths and widths around a vector (4, 8, 16 lanes), a tile (8, 24, 32 rows) and a key block (64).
EDGES = [
    Case("one row", query_length=1, key_length=67, head_dim=16, value_dim=3, mask=Causal()),
    Case("below a tile", query_length=23, key_length=63, head_dim=15, value_dim=17),
    Case("a tile", query_length=32, key_length=64, head_dim=8, value_dim=16, mask=Causal()),
    Case("above a tile", query_length=33, key_length=65, head_dim=7, value_dim=8, softcap=1.3),
    Case("two blocks", query_length=47, key_length=127, head_dim=3, value_dim=9, mask=Causal()),
    Case("three blocks", query_length=67, key_length=131, head_dim=17, value_dim=33, sinks=True),
    Case(
        "chunks",
        batch=1,
        heads=6,
        kv_heads=2,
        query_length=2,
        key_length=2300,
        head_dim=24,
        value_dim=40,
        softcap=3.0,
        sinks=1.0,
        mask=Causal() & Window(1500, None, 3),
    ),
    Case(
        "chunks of ragged rows",
        heads=16,
        kv_heads=4,
        query_length=1,
        key_length=2050,
        bias=(1, 16, 1, 2050),
        mask=KeyLengths(torch.tensor([2049, 700])) & Causal(),
    ),
    Case(
        "a chunk that is hidden",
        heads=2,
        kv_heads=1,
        query_length=3,
        key_length=2100,
        bias="alibi",
        mask=Window(40, None, keep_first=1),
    ),
    Case(
        "side by side",
        heads=6,
        kv_heads=2,
        query_length=13,
        key_length=150,
        bias="alibi",
        sinks=1.0,
        mask=Window(torch.tensor([3, 9, 70, 0, 20, 149]), 0),
    ),
    Case(
        "side by side with dense",
        heads=4,
        kv_heads=2,
        query_length=11,
        key_length=140,
        bias=(2, 4, 11, 140),
        mask=Dense(torch.rand((2, 4, 1, 140), generator=torch.Generator().manual_seed(2)) < 0.6),
    ),
    Case("wide", query_length=37, key_length=71, head_dim=80, value_dim=80, mask=Causal()),
    Case("wider", query_length=35, key_length=73, head_dim=192, value_dim=128, mask=Causal()),
    Case("widest", query_length=5, key_length=69, head_dim=576, value_dim=512, mask=Causal()),
    Case(
        "window over blocks",
        heads=4,
        kv_heads=2,
        query_length=211,
        key_length=223,
        head_dim=11,
        value_dim=13,
        bias="alibi",
        mask=Window(70, 3, keep_first=66),
    ),
    Case(
        "bias over blocks",
        query_length=70,
        key_length=139,
        bias="hiding",
        layout="every second element",
        mask=Causal(),
    ),
    Case(
        "documents over blocks",
        query_length=199,
        key_length=199,
        mask=Documents(torch.arange(199).repeat(2, 1) // torch.tensor([[50], [67]])) & Causal(),
    ),
    Case(
        "dense over blocks",
        query_length=41,
        key_length=193,
        mask=Dense(torch.rand((2, 1, 41, 193), generator=torch.Generator().manual_seed(1)) < 0.3),
    ),
]
