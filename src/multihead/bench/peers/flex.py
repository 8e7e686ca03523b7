"""torch's flex_attention, compiled, with its block mask."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from multihead.bench.case import Case
from multihead.bench.contest import Contestant, Declined
from multihead.masks import Causal, Documents, Mask, Window

NAME = "flex_attention"
PACKAGE = "torch"

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def contestant(case: Case, query: Tensor, key: Tensor, value: Tensor, threads: int) -> Contestant:
    """Compile for these shapes; the first call's time, which is the compiler's, is kept apart."""
    del threads  # torch's own
    if shutil.which("g++") is None and shutil.which("c++") is None:
        raise Declined("needs a C++ compiler")
    flex = import_module("torch.nn.attention.flex_attention")  # brings the compiler: a second
    block_mask = None
    if case.mask is not None:
        block_mask = flex.create_block_mask(
            _mask_mod(case), None, None, case.queries, case.keys, device="cpu"
        )
    torch.compiler.reset()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    call = partial(compiled, query, key, value, block_mask=block_mask)
    start = time.perf_counter()
    try:
        _compile(call)
    except Exception as error:  # whatever the compiler, or the one that it calls, has to say
        first_line = str(error).strip().partition("\n")[0]
        raise Declined(f"does not compile here: {type(error).__name__}: {first_line}") from error
    return Contestant(call, call, first_call_seconds=time.perf_counter() - start)


def _compile(call: Callable[[], Tensor]) -> None:
    """The first call from nothing: what an earlier run left on the disk would hide its cost."""
    with (
        warnings.catch_warnings(),
        torch.inference_mode(),
        torch._inductor.config.patch(force_disable_caches=True),
    ):
        warnings.simplefilter("ignore")  # that a cache is off
        call()


def _mask_mod(case: Case) -> MaskMod:
    """The mask as a function of positions, which here count from the first query and key."""
    mask: Mask | None = case.mask
    if case.queries == case.keys:
        if isinstance(mask, Causal):
            return lambda b, h, q, k: q >= k
        if isinstance(mask, Window) and mask.keep_first == 0:
            left, right = mask.left, mask.right
            if isinstance(left, int) and isinstance(right, int):
                return lambda b, h, q, k: (k >= q - left) & (k <= q + right)
        if isinstance(mask, Documents) and mask.key_ids is None:
            ids = mask.query_ids.flatten()
            return lambda b, h, q, k: ids[q] == ids[k]
    raise Declined(f"is not told the {case.kind} mask")
