"""Who may see whom: masks, their lowering, counting and picture."""

from .parts import MaskParts, common_size
from .rules import (
    Causal,
    Dense,
    Documents,
    Intersection,
    KeyLengths,
    KeyPadding,
    Mask,
    Positions,
    PrefixCausal,
    QueryStart,
    SlidingWindow,
    Window,
    four_dims,
)

__all__ = [
    "Causal",
    "Dense",
    "Documents",
    "Intersection",
    "KeyLengths",
    "KeyPadding",
    "Mask",
    "MaskParts",
    "Positions",
    "PrefixCausal",
    "QueryStart",
    "SlidingWindow",
    "Window",
    "common_size",
    "four_dims",
]
