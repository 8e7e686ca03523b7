"""What `torch.utils.flop_counter.FlopCounterMode` counts for this library's operators.

Without a formula an operator counts as nothing, as torch's own attention on the CPU does. These
count the pairs that the call's mask lets through, two operations for a multiply-add; torch's
formulas, where there are any, count hidden pairs too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake, unset_fake_temporarily
from torch.utils.flop_counter import register_flop_formula

from . import library
from .problem import Problem
from .sweep import visible_keys

# Gradients of out, lse, entropy and max_logit come before the arguments of the call.
_GRADIENTS = 4


def visible_pairs(problem: Problem) -> int:
    """Visible pairs over all heads and rows of the batch.

    Of tensors without numbers (meta, fake) a rule's own tensors can't be read: all pairs, unless
    the mask has none.
    """
    with unset_fake_temporarily():
        readable = _readable(problem)
        if readable is None:
            return math.prod(problem.query.shape[:3]) * problem.key_length
        keys_bhq = visible_keys(readable)
        alike = problem.batch * problem.heads // max(1, math.prod(keys_bhq.shape[:2]))
        return int(keys_bhq.sum()) * alike


def forward_flops(*arguments: Any, out_val: object = None, **others: Any) -> int:
    """Q K^T and P V, over visible pairs."""
    problem, _ = library._unflatten(arguments)
    return 2 * visible_pairs(problem) * (problem.head_dim + problem.value_dim)


def backward_flops(*arguments: Any, out_val: object = None, **others: Any) -> int:
    """Five products over visible pairs: Q K^T again, dP, dV, dQ and dK."""
    problem, _ = library._unflatten(arguments[_GRADIENTS:])
    return 2 * visible_pairs(problem) * (3 * problem.head_dim + 2 * problem.value_dim)


def register() -> None:
    """Tell torch's counter, for every `FlopCounterMode` that is made from now on."""
    register_flop_formula(torch.ops.multihead.attend, get_raw=True)(forward_flops)
    register_flop_formula(torch.ops.multihead.attend_backward, get_raw=True)(backward_flops)


def _readable(problem: Problem) -> Problem | None:
    """The call with a mask whose pairs can be counted; None where its numbers are not there."""
    tensors = [value for value in vars(problem.parts).values() if isinstance(value, Tensor)]
    tensors += [problem.bias] if isinstance(problem.bias, Tensor) else []
    if not any(map(_is_empty, (problem.query, *tensors))):
        return problem
    if tensors:
        return None
    # A mask of plain numbers is the same on any device.
    shape_bhqd = problem.query.shape
    parts = replace(problem.parts, device=torch.device("cpu"))
    return replace(problem, query=torch.empty(1).expand(shape_bhqd), parts=parts)


def _is_empty(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no numbers."""
    return tensor.is_meta or is_fake(tensor)
