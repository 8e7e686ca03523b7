"""Small calls for the tests of `multihead bench`."""

import torch

import multihead as mh
from multihead.bench import contest
from multihead.bench.case import Case
from multihead.bench.limits import Limits

SETTING = contest.Setting(
    threads=1,
    seconds=0.0,
    limits=Limits(fma=100.0, dpbf16=200.0, amx=400.0),
)
FULL = Case("full", torch.float32, queries=37, keys=37)
CAUSAL = Case("causal", torch.bfloat16, queries=37, keys=37, mask=mh.Causal())
WINDOW = Case("window-5", torch.float32, queries=41, keys=41, mask=mh.SlidingWindow(5))
GROUPED = Case("grouped", torch.float32, queries=7, keys=13, heads=6, kv_heads=2, width=16)


def exact(case: Case) -> torch.Tensor:
    """All rows of the case in float64, by the reference."""
    query, key, value = (x.double() for x in case.inputs())
    return mh.attention(query, key, value, mask=case.mask, backend="reference")
