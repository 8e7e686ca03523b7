"""Whether a call's tensors may be read at their addresses, now."""

from __future__ import annotations

import torch
from torch import Tensor

PLAIN = (Tensor, torch.nn.Parameter)  # types that hold their numbers at `data_ptr()`


def intercepted() -> bool:
    """Whether something traces operators or answers them in their place."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )
