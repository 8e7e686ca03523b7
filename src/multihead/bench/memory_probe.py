"""One call in a process of its own, and what it took: prints a JSON object.

`python -m multihead.bench.memory_probe LENGTH HEADS WIDTH THREADS FEATURE...`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from multihead.bench.resident import lowered_peak, peak
from multihead.masks import (
    Causal,
    Documents,
    KeyLengths,
    KeyPadding,
    Mask,
    Positions,
    PrefixCausal,
    QueryStart,
    Window,
)
from multihead.ops import STATISTICS, ALiBi, attention_with_stats

_MASKS: Mapping[str, Callable[[int], Mask]] = {
    "causal": lambda n: Causal(),
    "window": lambda n: Window(n // 64, n // 128, keep_first=4),
    "prefix": lambda n: PrefixCausal(n // 2),
    "padding": lambda n: KeyPadding(torch.arange(n)[None] >= n // 100),
    "documents": lambda n: Documents(torch.arange(n)[None] // (n // 3)),
    "lengths": lambda n: KeyLengths(torch.tensor([n - 5]), query_lengths=torch.tensor([n - 5])),
    "start": lambda n: QueryStart(-3),
    "positions": lambda n: Positions(torch.arange(n) // 2, torch.arange(n) // 2),
}
_OPTIONS: Mapping[str, Callable[[int, int], dict[str, Any]]] = {
    "keys-bias": lambda n, heads: {"bias": torch.randn(1, heads, 1, n)},
    "alibi": lambda n, heads: {"bias": ALiBi(torch.exp2(-torch.arange(1.0, heads + 1)))},
    "softcap": lambda n, heads: {"softcap": 30.0},
    "sinks": lambda n, heads: {"sinks": torch.zeros(heads)},
    "statistics": lambda n, heads: {"stats": STATISTICS},
}
_GROUPED, _BFLOAT16 = "grouped", "bfloat16"

FEATURES = (*_MASKS, *_OPTIONS, _GROUPED, _BFLOAT16)

_WARM_LENGTH = 256


def probe(length: int, heads: int, width: int, threads: int, features: set[str]) -> dict[str, Any]:
    """Grown bytes of one call, less its outputs; None where the system does not tell.

    A call on few tokens goes before: what the first call of a process brings stays out.
    """
    torch.set_num_threads(threads)
    _call(_WARM_LENGTH, heads, width, features)()
    call = _call(length, heads, width, features)
    before = lowered_peak()
    outputs = call()
    after = peak()
    if before is None or after is None:
        return {"not_measurable": "The system does not tell the peak of a process."}
    output_bytes = sum(x.nbytes for x in outputs)
    return {"grown_bytes": max(0, after - before - output_bytes), "output_bytes": output_bytes}


def _call(length: int, heads: int, width: int, features: set[str]) -> Callable[[], list[Tensor]]:
    dtype = torch.bfloat16 if _BFLOAT16 in features else torch.float32
    kv_heads = heads // 4 if _GROUPED in features else heads
    query, key, value = (torch.randn(1, h, length, width) for h in (heads, kv_heads, kv_heads))
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    masks = [make(length) for name, make in _MASKS.items() if name in features]
    options: dict[str, Any] = {"stats": (), "mask": reduce(and_, masks) if masks else None}
    for name, make in _OPTIONS.items():
        if name in features:
            options |= make(length, heads)

    def call() -> list[Tensor]:
        result = attention_with_stats(query, key, value, backend="native", **options)
        return [result.out, *result.stats.values()]

    return call


if __name__ == "__main__":
    _length, _heads, _width, _threads = map(int, sys.argv[1:5])
    print(json.dumps(probe(_length, _heads, _width, _threads, set(sys.argv[5:]))))
