"""The suite `decode`: one query on many keys that are in no cache of the processor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from multihead.bench.case import Case, Entry
from multihead.bench.contest import OURS, TORCH, Contestant, Field, Setting, measure
from multihead.bench.limits import cold_bytes
from multihead.bench.suites.row import Row, of_case
from multihead.bench.torch_calls import grouped_matmul
from multihead.bench.verify import expect
from multihead.nn import QuantizedKVCache
from multihead.ops import KeyValues, attention

MATMUL = "torch matmul"
PLAIN = f"{OURS}, tensors"
_PAGE = 64  # tokens


def rows(*, quick: bool) -> list[Row]:
    """32 query heads on 8 KV heads and 8192 keys of width 128; 8 heads and 4096 keys of 64."""
    grouped, plain = (256, 128) if quick else (8192, 4096)
    most_bytes = 2**24 if quick else cold_bytes()
    wide = partial(Case, queries=1, keys=grouped, heads=32, kv_heads=8, width=128)
    dtypes = torch.float32, torch.bfloat16
    tensors = [
        of_case(case, partial(_measure, most_bytes))
        for dtype in dtypes
        for case in (
            wide("decode-32-8", dtype),
            Case("decode-8-8", dtype, queries=1, keys=plain),
        )
    ]
    return tensors + [
        of_case(wide(f"decode-{kind}-32-8", dtype), partial(_measure_held, most_bytes, hold))
        for kind, hold in (("pages", in_pages), ("int8", as_int8))
        for dtype in dtypes
    ]


def in_pages(key: Tensor, value: Tensor) -> KeyValues:
    """Pages of 64 tokens in no order, as a pool that is in use has them."""
    count = key.shape[2] // _PAGE
    place = torch.randperm(count, generator=torch.Generator().manual_seed(count))

    def pool(x: Tensor) -> Tensor:
        pages: Tensor = x[0].unflatten(1, (count, _PAGE)).transpose(0, 1)
        return pages[place.argsort()].contiguous()

    return KeyValues(pool(key), pool(value), pages=place[None].to(torch.int32), length=key.shape[2])


def as_int8(key: Tensor, value: Tensor) -> KeyValues:
    """One byte a number, and a scale for each token and head."""
    return QuantizedKVCache().update(key, value)


def _parts(kv: KeyValues) -> dict[str, Tensor]:
    """The tensors that are read."""
    names = ("key", "value", "pages", "key_scale", "value_scale")
    return {name: getattr(kv, name) for name in names if getattr(kv, name) is not None}


def _copy(kv: KeyValues) -> KeyValues:
    copies: dict[str, Any] = {name: x.clone() for name, x in _parts(kv).items()}
    return replace(kv, **copies)


class Rotation:
    """Keys and values in so many buffers that the next one has left every cache."""

    def __init__(self, key: Tensor, value: Tensor, most_bytes: int) -> None:
        count = max(2, math.ceil(most_bytes / (key.nbytes + value.nbytes)))
        copies = ((key.clone(), value.clone()) for _ in range(count - 1))
        self._turn = itertools.cycle([(key, value), *copies])
        self.nbytes = count * (key.nbytes + value.nbytes)

    def next(self) -> tuple[Tensor, Tensor]:
        """The pair that was used longest ago."""
        return next(self._turn)


def _measure(most_bytes: int, case: Case, setting: Setting) -> Entry:
    query, key, value = case.inputs()
    rotation = Rotation(key, value, most_bytes)

    def cold(function: Callable[..., Tensor]) -> Contestant:
        # All contestants take from the one rotation: whoever is next meets what nobody just read.
        return Contestant.of(lambda: function(query, *rotation.next()))

    contestants = {
        OURS: cold(partial(attention, backend="native")),
        TORCH: cold(partial(scaled_dot_product_attention, enable_gqa=case.heads != case.kv_heads)),
        MATMUL: cold(grouped_matmul),
    }
    entry = measure(case, Field(contestants), expect(query, key, value), setting)
    return entry | {"buffers_bytes": rotation.nbytes}


def _measure_held(
    most_bytes: int, hold: Callable[[Tensor, Tensor], KeyValues], case: Case, setting: Setting
) -> Entry:
    """Ours on what a cache holds, against ours and torch's function on tensors of its numbers."""
    query, *tensors = case.inputs()
    kv = hold(*tensors)
    key, value = kv.tensors(case.dtype)
    rotation = Rotation(key, value, most_bytes)
    read = sum(x.nbytes for x in _parts(kv).values())
    copies = (_copy(kv) for _ in range(1, max(2, math.ceil(most_bytes / read))))
    turn = itertools.cycle([kv, *copies])
    call = partial(attention, backend="native")
    sdpa = partial(scaled_dot_product_attention, enable_gqa=case.heads != case.kv_heads)
    contestants = {
        OURS: Contestant.of(lambda: call(query, next(turn))),
        PLAIN: Contestant.of(lambda: call(query, *rotation.next())),
        TORCH: Contestant.of(lambda: sdpa(query, *rotation.next())),
    }
    # What the numbers are, of which tensors in bfloat16 hold a rounding.
    exact = expect(query.float(), *(x.float() for x in kv.tensors(torch.float32)))
    expected = replace(expect(query, key, value), values=exact.values)
    entry = measure(case, Field(contestants), expected, setting, read_bytes=read)
    return entry | {"buffers_bytes": rotation.nbytes, "read_bytes": read}
