"""What the layers check of their sizes, numbers and inputs."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor

from ..errors import ArgumentError, DtypeError


def check_sizes(**sizes: int) -> None:
    """Raises DtypeError for a size that is no integer, ArgumentError for one below 1."""
    for name, size in sizes.items():
        try:
            operator.index(size)
        except TypeError:
            given: object = size
            whole = isinstance(given, float) and given.is_integer()
            hint = f" Write {size:.0f}." if whole else ""
            raise DtypeError(f"{name} must be an integer; got {size!r}.{hint}") from None
        if size < 1:
            raise ArgumentError(f"{name} must be at least 1; got {size}.")


def check_number(name: str, number: float | None, remedy: str) -> None:
    """Raises DtypeError for what is no number, ArgumentError for one that is not finite."""
    try:
        finite = number is None or math.isfinite(number)
    except TypeError:
        raise DtypeError(f"{name} must be a number; got {number!r}. {remedy}") from None
    if not finite:
        raise ArgumentError(f"{name} must be finite; got {number}. {remedy}")


def check_share(name: str, share: float) -> None:
    """Raises DtypeError for what is no number, ArgumentError for one outside of 0 to 1."""
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise DtypeError(f"{name} must be a number from 0 to 1; got {share!r}. 0 drops none.")
    if not 0 <= share <= 1:
        raise ArgumentError(f"{name} must lie between 0 and 1; got {share}. 0 drops none.")


def check_sequence(name: str, sequence: Tensor, width_name: str, width: int) -> None:
    """Raises ArgumentError for what is not [batch, length, width], DtypeError for no tensor."""
    if not isinstance(sequence, Tensor):
        raise DtypeError(
            f"{name} must be a tensor [batch, length, {width_name}={width}]; got "
            f"{type(sequence).__name__}. Write torch.as_tensor({name})."
        )
    if sequence.ndim != 3:
        hint = f" For one sequence without a batch: {name}[None]." if sequence.ndim == 2 else ""
        raise ArgumentError(
            f"{name} must be [batch, length, {width_name}={width}]; got shape "
            f"{list(sequence.shape)}.{hint}"
        )
    if sequence.shape[-1] != width:
        raise ArgumentError(
            f"{name} must have the width {width_name}={width} in its last dimension; got shape "
            f"{list(sequence.shape)}."
        )


def check_is_context(context: object) -> None:
    """Raises DtypeError for what is no tensor: often a mask in the context's place."""
    if not isinstance(context, Tensor):
        raise DtypeError(
            f"context must be a tensor [B, Lk, context_dim]; got {type(context).__name__}. Masks, "
            "biases and caches are given by name: layer(x, mask=...)."
        )


def check_context(x: Tensor, context: Tensor | None, context_dim: int, held: int | None) -> None:
    """Check what a cross-attention reads. `held` counts its cache's tokens, None without a cache.

    Raises ArgumentError for a context of another shape, and for one too many or too few.
    """
    if context is None:
        if held:
            return
        filled = "" if held is None else ", and the cache is empty"
        raise ArgumentError(
            "context is missing: this layer is a cross-attention (it has "
            f"context_dim={context_dim}){filled}. Call layer(x, context)."
        )
    if held:
        raise ArgumentError(
            f"context was given, but the cache holds the keys and values of {held} tokens of a "
            "context already. Leave context out to read those, or call cache.reset() before "
            "another one."
        )
    check_sequence("context", context, "context_dim", context_dim)
    if x.shape[0] != context.shape[0]:
        raise ArgumentError(
            f"x and context must have the same batch size; got {x.shape[0]} and {context.shape[0]}."
        )


def check_positions(positions: Tensor, x: Tensor) -> None:
    """Raises DtypeError for what are no integers, ArgumentError for another number than x has."""
    batch, length, _ = x.shape
    if not isinstance(positions, Tensor):
        raise DtypeError(
            f"positions must be integers or a Rotation; got {type(positions).__name__}. Write "
            "torch.tensor(positions)."
        )
    if positions.is_floating_point() or positions.dtype == torch.bool:
        kind = str(positions.dtype).removeprefix("torch.")
        raise DtypeError(f"positions must be integers; got {kind}. Write positions.long().")
    if positions.shape not in ((length,), (1, length), (batch, length)):
        raise ArgumentError(
            f"positions must have one number a token of x, shape ({length},) or ({batch}, "
            f"{length}); got {tuple(positions.shape)}."
        )
