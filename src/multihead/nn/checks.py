"""What the layers check of their sizes, numbers and inputs."""

from __future__ import annotations

import math
import operator

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


def check_sequence(name: str, sequence: Tensor, width_name: str, width: int) -> None:
    """Raises ArgumentError for what is not [batch, length, width]."""
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
