"""jax.nn.dot_product_attention, compiled by XLA for the CPU."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from multihead.bench.case import Case
from multihead.bench.contest import Contestant, Declined
from multihead.bench.peers.shapes import no_large_table, only_full_or_causal

NAME = "jax"
PACKAGE = "jax"


def contestant(case: Case, query: Tensor, key: Tensor, value: Tensor, threads: int) -> Contestant:
    """A jitted call on [B, L, H, D], the layout that the function takes."""
    causal = only_full_or_causal(case)
    if case.dtype == torch.float16:
        raise Declined("has no float16 product on the CPU")
    no_large_table(case)
    jax = _on_the_cpu(threads)
    arrays = [
        jax.dlpack.from_dlpack(x.transpose(1, 2).clone(memory_format=torch.contiguous_format))
        for x in (query, key, value)
    ]
    attend = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal))

    def result() -> Tensor:
        return torch.utils.dlpack.from_dlpack(attend(*arrays)).transpose(1, 2)

    return Contestant(lambda: attend(*arrays).block_until_ready(), result)


def _on_the_cpu(threads: int) -> Any:
    """jax with that many threads: read from the environment when it is first imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["NPROC"] = str(threads)
    return import_module("jax")
