"""What the options of MultiHeadAttention must be."""

from __future__ import annotations

from ..errors import ArgumentError, DtypeError
from ..masks import Mask, SlidingWindow, Window
from .checks import check_number, check_sizes
from .positions import RoPE


def check_softcap(softcap: float | None) -> None:
    """Raises DtypeError for what is no number, ArgumentError for one that is not above 0."""
    check_number("softcap", softcap, "Leave it out for no cap.")
    if softcap is not None and softcap <= 0:
        raise ArgumentError(f"softcap must be above 0; got {softcap}. None means no cap.")


def check_sinks(sinks: bool) -> None:
    """Raises DtypeError for what is not True or False."""
    if not isinstance(sinks, bool):
        raise DtypeError(
            f"sinks must be True or False; got {type(sinks).__name__}. With True the layer has "
            "a parameter `sinks` [num_heads], which may be written."
        )


def checked_window(window: int | Window | None) -> Window | None:
    """An int as the causal window of so many keys; raises DtypeError for another mask."""
    if window is None or isinstance(window, Window):
        return window
    if isinstance(window, Mask):
        raise DtypeError(
            f"window must be an int or a Window; got {window!r}. Give other masks in each call."
        )
    check_sizes(window=window)
    return SlidingWindow(window)


def check_rope(rope: RoPE, head_dim: int) -> None:
    """Raises DtypeError for what is no RoPE, ArgumentError for heads that are too narrow for it."""
    if not isinstance(rope, RoPE):
        raise DtypeError(
            f"rope must be a multihead.RoPE or None; got {rope!r}. For the usual angles write "
            "rope=multihead.RoPE()."
        )
    rope.width(head_dim)


def check_cross(**options: object) -> None:
    """Refuse what compares positions of two sequences."""
    for name, option in options.items():
        if option is not None:
            raise ArgumentError(
                f"{name} compares the positions of one sequence, but with context_dim the layer "
                f"reads another one. Leave {name} or context_dim out."
            )
