"""Whether a call is one of plain inference, in which a layer may take another way."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def watched() -> bool:
    """Whether something wants to see, change or differentiate what torch's functions do."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_any_autocast_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is computed from these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
