"""The suite `prefill`: as many queries as keys, full and causal, against every peer."""

from __future__ import annotations

import torch

from multihead.bench import peers
from multihead.bench.case import Case, Entry
from multihead.bench.contest import OURS, TORCH, Contestant, Setting, measure, ours
from multihead.bench.suites.row import Row, of_case
from multihead.bench.torch_calls import matmul, sdpa
from multihead.bench.verify import expect
from multihead.masks import Causal

# At 16384 two heads, since a call of eight takes seconds; rates do not depend on it.
_LENGTHS = {1024: (8, 4), 4096: (8, 4), 16384: (2, 2)}
_QUICK_LENGTHS = {128: (8, 4), 512: (8, 4)}
_DTYPES = (torch.float32, torch.bfloat16)

# Where torch's operations on the whole table of scores may still be worth a try.
_MATMUL_UP_TO = 1024

# flex_attention's compiler takes longer than the rest of a row: it is asked for one shape.
_COMPILED = ((4096, 64), (512, 64))

# ONNX Runtime, OpenVINO and JAX have threads of their own, which spin for a while after a call.
_PAUSE = 0.02


def rows(*, quick: bool) -> list[Row]:
    """Each length, width, dtype and mask; float16 at one shape."""
    lengths = _QUICK_LENGTHS if quick else _LENGTHS
    middle = list(lengths)[1]
    cases = [
        _case(causal, dtype, length, width, heads)
        for dtype in _DTYPES
        for causal in (False, True)
        for width, heads_at in ((64, 0), (128, 1))
        for length, heads in ((length, both[heads_at]) for length, both in lengths.items())
    ]
    cases += [_case(causal, torch.float16, middle, 64, 8) for causal in (False, True)]
    return [of_case(case, _measure) for case in cases]


def _case(causal: bool, dtype: torch.dtype, length: int, width: int, heads: int) -> Case:
    return Case(
        "causal" if causal else "full",
        dtype,
        queries=length,
        keys=length,
        heads=heads,
        kv_heads=heads,
        width=width,
        mask=Causal() if causal else None,
    )


def _measure(case: Case, setting: Setting) -> Entry:
    query, key, value = case.inputs()
    contestants = {
        OURS: Contestant.of(ours(query, key, value, mask=case.mask)),
        TORCH: Contestant.of(sdpa(case, query, key, value)),
    }
    if case.keys <= _MATMUL_UP_TO:
        contestants["torch matmul"] = Contestant.of(matmul(case, query, key, value))
    compiled = case.mask is not None and (case.keys, case.width) in _COMPILED
    field = peers.enter(
        setting, case, (query, key, value), contestants, leave_out=() if compiled else (peers.FLEX,)
    )
    expected = expect(query, key, value, mask=case.mask)
    return measure(case, field, expected, setting, pause=_PAUSE)
