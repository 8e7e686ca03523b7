"""From positions to angles, in the arithmetic that every kind of positions shares."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError, DtypeError

# Up to here float32 holds every integer.
_EXACT_IN_FLOAT32 = 2**24
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def positions_per_radian(base: float | Tensor, width: int, device: torch.device) -> Tensor:
    """`base^(2i/width)` for i < width / 2, float32: how far apart positions are that a lane turns
    by one radian.

    In the order of operations that checkpoints were trained with: the same bits. A float32 tensor
    [..., 1] as `base` gives [..., width / 2].
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    return base**exponents


def angles_of(positions: Tensor, frequencies: Tensor) -> Tensor:
    """`positions * frequencies`: [1|B, L, width / 2] for integers [L] or [B, L].

    Up to position 2^24 it is the float32 product, rounded as in the models that were trained with
    it, though held in float64. Beyond, where float32 cannot tell a position from the next one, the
    product is exact: neighbors stay neighbors. (A device without float64 rounds there too.)

    `frequencies` is float32 [width / 2], or [1|B, 1, width / 2] where rows differ.
    """
    positions = checked_positions(positions)
    wide = torch.float32 if positions.device.type == "mps" else torch.float64
    exact = positions[..., None] * frequencies.to(wide)
    return torch.where(positions[..., None] > _EXACT_IN_FLOAT32, exact, exact.float())


def checked_positions(positions: Tensor) -> Tensor:
    """`positions` as int64 [1|B, L]; raises for what is not a tensor of integers [L] or [B, L]."""
    if not isinstance(positions, Tensor) or positions.dtype not in _INTEGERS:
        kind = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise DtypeError(
            f"positions must be an integer tensor [L] or [B, L]; got {kind}. "
            "Write torch.arange(length), or positions.long()."
        )
    if positions.ndim not in (1, 2):
        raise ArgumentError(f"positions must be [L] or [B, L]; got shape {tuple(positions.shape)}.")
    positions = positions.to(torch.int64)
    return positions[None] if positions.ndim == 1 else positions


def check_base(base: float) -> None:
    """Raise ArgumentError unless `base` is a finite number above 1."""
    number = isinstance(base, int | float) and not isinstance(base, bool)
    if not number or not 1 < base < float("inf"):
        raise ArgumentError(f"base must be a number above 1; got {base!r}. Usual is 10000.0.")
