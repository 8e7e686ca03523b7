"""Windows of single heads of transformers' attention modules, which multihead's attention reads."""

from __future__ import annotations

from torch import nn

from ..masks import Window

_ATTRIBUTE = "multihead_window"


def head_window(module: nn.Module) -> Window | None:
    """The window of the heads of an attention module; None where there is none."""
    window: Window | None = getattr(module, _ATTRIBUTE, None)
    return window


def set_head_window(module: nn.Module, window: Window | None) -> None:
    """Intersect every mask of the module with `window`; None takes it away."""
    if window is None:
        module.__dict__.pop(_ATTRIBUTE, None)
    else:
        module.__dict__[_ATTRIBUTE] = window
