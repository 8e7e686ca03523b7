"""Turning pairs of lanes by one kernel, where nobody but the caller needs to know of it."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends import native
from .dispatch import transformed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """`x` [B, H, L, D] with lanes i and i + r turned by `cos` and `sin`, [B|1, 1, L, r].

    `cos` and `sin` are such as `serves`. None where the kernel can't serve: autograd, a graph or a
    mode wants to see torch's own operations, or `x` is not a plain tensor on the CPU.
    """
    served = (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and x.is_cpu
        and x.dtype in _DTYPES
        and x.layout is torch.strided
        and not (x.requires_grad and torch.is_grad_enabled())
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
        and not transformed()
    )
    return native.rotate(x, cos, sin) if served else None


def serves(*angles: Tensor) -> bool:
    """Whether the kernel is built, and can read cosines and sines where they lie."""
    if torch.compiler.is_compiling() or not native.is_built():
        return False
    return all(
        type(it) is Tensor
        and it.is_cpu
        and it.dtype is torch.float32
        and it.is_contiguous()
        and not it.is_neg()
        and not it.requires_grad
        for it in angles
    )
