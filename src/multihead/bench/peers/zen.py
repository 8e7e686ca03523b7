"""AMD's plug-in for torch."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from multihead.bench.case import Case
from multihead.bench.contest import Contestant, Declined
from multihead.bench.peers.shapes import only_full_or_causal

NAME = "zentorch"
PACKAGE = "zentorch"


def contestant(case: Case, query: Tensor, key: Tensor, value: Tensor, threads: int) -> Contestant:
    """`zentorch_sdpa`, on torch's threads; its triangle is aligned at the top left."""
    del threads
    causal = only_full_or_causal(case)
    if case.dtype == torch.float16:
        raise Declined("computes float32 and bfloat16")
    import_module("zentorch")
    call = partial(torch.ops.zentorch.zentorch_sdpa, query, key, value, 0.0, causal)
    return Contestant(call, lambda: call()[0])
