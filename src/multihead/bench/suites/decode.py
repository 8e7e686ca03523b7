"""The suite `decode`: one query on many keys that are in no cache."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from multihead.bench.case import Case, Entry
from multihead.bench.contest import OURS, TORCH, Contestant, Field, Setting, measure
from multihead.bench.limits import cold_bytes
from multihead.bench.suites.row import Row, of_case
from multihead.bench.torch_calls import grouped_matmul
from multihead.bench.verify import expect
from multihead.ops import attention

MATMUL = "torch matmul"


def rows(*, quick: bool) -> list[Row]:
    """32 query heads on 8 KV heads and 8192 keys of width 128; 8 heads and 4096 keys of 64."""
    grouped, plain = (256, 128) if quick else (8192, 4096)
    most_bytes = 2**24 if quick else cold_bytes()
    return [
        of_case(case, partial(_measure, most_bytes))
        for dtype in (torch.float32, torch.bfloat16)
        for case in (
            Case("decode-32-8", dtype, queries=1, keys=grouped, heads=32, kv_heads=8, width=128),
            Case("decode-8-8", dtype, queries=1, keys=plain),
        )
    ]


class Rotation:
    """Keys and values in so many buffers that the next one has left every cache."""

    def __init__(self, key: Tensor, value: Tensor, most_bytes: int) -> None:
        count = max(2, math.ceil(most_bytes / (key.nbytes + value.nbytes)))
        self._pairs = [(key, value), *((key.clone(), value.clone()) for _ in range(count - 1))]
        self._turn = itertools.cycle(self._pairs)
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
