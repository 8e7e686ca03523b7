"""Keys and values as caches hold them: in pages, as int8, and as both."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import multihead as mh
from multihead.nn.cache.quantized import quantize

Layout = Callable[[Tensor, Tensor], mh.KeyValues]


def in_pages(size: int) -> Layout:
    """Pages in no order, some of them unused and full of NaN."""

    def layout(key: Tensor, value: Tensor) -> mh.KeyValues:
        batch, _, length, _ = key.shape
        count = -(-length // size)
        order = torch.randperm(batch * count + 2, generator=torch.Generator().manual_seed(size))
        pages = order[: batch * count].view(batch, count).to(torch.int32)
        return mh.KeyValues(
            _paged(key, pages, size), _paged(value, pages, size), None, pages, length
        )

    return layout


def int8(key: Tensor, value: Tensor) -> mh.KeyValues:
    """As QuantizedKVCache holds them."""
    (keys, key_scale), (values, value_scale) = quantize(key), quantize(value)
    return mh.KeyValues(keys, values, key_scale=key_scale, value_scale=value_scale)


def int8_in_pages(size: int) -> Layout:
    """The same in pages."""

    def layout(key: Tensor, value: Tensor) -> mh.KeyValues:
        paged = in_pages(size)(key, value)
        whole = int8(paged.key, paged.value)
        return mh.KeyValues(
            whole.key, whole.value, None, paged.pages, paged.length,
            whole.key_scale, whole.value_scale,
        )  # fmt: skip

    return layout


LAYOUTS: dict[str, Layout] = {
    "pages of 64": in_pages(64),
    "pages of 20": in_pages(20),
    "int8": int8,
    "int8 in pages of 128": int8_in_pages(128),
    "int8 in pages of 7": int8_in_pages(7),
}


def _paged(x: Tensor, pages: Tensor, size: int) -> Tensor:
    batch, heads, length, width = x.shape
    count = pages.shape[1]
    whole = x.new_full((batch, heads, count * size, width), torch.nan)
    whole[:, :, :length] = x
    pool = x.new_full((batch * count + 2, heads, size, width), torch.nan)
    pool[pages.long()] = whole.view(batch, heads, count, size, width).transpose(1, 2)
    return pool
