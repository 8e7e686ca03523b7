"""What a call was found to be, kept for the next one like it.

To check and describe a small call takes longer than its kernel. Of most calls the description says
nothing of the tensors but shapes and dtypes, and of the mask nothing but integers: these are the
call's *form*. A form that was described once, and that the native kernels serve, runs at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ..masks import Mask, MaskParts
from . import dispatch
from .backends import native
from .problem import Problem
from .tracing import PLAIN, intercepted

Form = tuple[Hashable, ...]

# Decoding makes a new form for each length; what is found again is found within a few steps.
_MOST = 1024
_known: dict[Form, MaskParts] = {}


def form_of(
    query: Any, key: Any, value: Any, mask: Any, stats: tuple[str, ...], backend: str
) -> Form | None:
    """The form of a call without bias, sinks and dropout; None where it would not say everything.

    It says everything of an eager call that autograd does not record, on plain CPU tensors, while
    nothing traces, intercepts, transforms, casts or watches calls.
    """
    if not goes_straight(query, key, value, backend) or dispatch.observer.get() is not None:
        return None
    rule = () if mask is None else mask.numbers() if isinstance(mask, Mask) else None
    if rule is None:
        return None
    shapes = query.shape, key.shape, value.shape
    return *shapes, query.dtype, key.dtype, value.dtype, rule, stats


def goes_straight(query: Any, key: Any, value: Any, backend: str) -> bool:
    """Whether the native kernels may be handed these tensors' addresses, dtypes aside."""
    if (
        intercepted()
        or type(query) not in PLAIN
        or type(key) not in PLAIN
        or type(value) not in PLAIN
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or not (query.layout is key.layout is value.layout is torch.strided)
        or backend not in ("auto", native.NAME)
        or not native.is_built()
        or dispatch.transformed()
        or torch._C._is_any_autocast_enabled()
    ):
        return False
    return not (
        torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
    )


def known(form: Form | None) -> MaskParts | None:
    """The parts of the mask of a form that the native kernels serve; None for a new one."""
    return None if form is None else _known.get(form)


def remember(form: Form | None, problem: Problem) -> None:
    """Keep what `problem` says of its form, if the native kernels serve it."""
    if form is None or problem.parts.closed_form is None or native.reasons(problem):
        return
    if len(_known) >= _MOST:
        _known.clear()
    _known[form] = problem.parts
