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

_BITS = {torch.float32: "int32", torch.bfloat16: "int16"}


def contestant(case: Case, query: Tensor, key: Tensor, value: Tensor, threads: int) -> Contestant:
    """A jitted call on [B, L, H, D], the layout that the function takes."""
    causal = only_full_or_causal(case)
    if case.dtype == torch.float16:
        raise Declined("has no float16 product on the CPU")
    no_large_table(case)
    jax = _on_the_cpu(threads)
    arrays = [_copy(jax, x.transpose(1, 2)) for x in (query, key, value)]
    attend = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal))

    def result() -> Tensor:
        bits = jax.lax.bitcast_convert_type(attend(*arrays), _BITS[case.dtype])
        return torch.from_numpy(jax.device_get(bits).copy()).view(case.dtype).transpose(1, 2)

    return Contestant(lambda: attend(*arrays).block_until_ready(), result)


def _copy(jax: Any, tensor: Tensor) -> Any:
    """The tensor's numbers in memory of jax's own, as bits, since NumPy has no bfloat16.

    Memory lent by DLPack is given back on a thread of jax's, which then asks Python for its lock:
    where Python is about to end, that aborts the process.
    """
    bits = tensor.contiguous().view(getattr(torch, _BITS[tensor.dtype])).numpy()
    numbers = str(tensor.dtype).removeprefix("torch.")
    return jax.lax.bitcast_convert_type(jax.numpy.array(bits), numbers).block_until_ready()


def _on_the_cpu(threads: int) -> Any:
    """jax with that many threads: read from the environment when it is first imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["NPROC"] = str(threads)
    return import_module("jax")
