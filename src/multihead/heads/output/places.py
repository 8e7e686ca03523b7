"""Queries and tokens as users name them: an int, integers, a slice or a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError

Rows = int | slice | Sequence[int] | Tensor
Tokens = int | Sequence[int] | Tensor


def row_index(rows: Rows, length: int, device: torch.device) -> Tensor:
    """Queries of a text of `length` tokens as int64 indices in [0, length).

    Raises ArgumentError for others.
    """
    if isinstance(rows, slice):
        return torch.tensor(range(length)[rows], dtype=torch.long, device=device)
    index = integers(rows)
    if index is None:
        raise ArgumentError(f"rows must be integers or a slice; got {rows!r}.")
    if len(index) and (int(index.min()) < -length or int(index.max()) >= length):
        raise ArgumentError(
            f"rows must lie between {-length} and {length - 1}, since the text has {length} "
            f"tokens; got {rows!r}."
        )
    return index.to(device) % length


def integers(given: Any) -> Tensor | None:
    """An int, integers or an integer tensor as int64 [n]; None for anything else."""
    try:
        index = torch.as_tensor(given).reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        return None
    if not index.numel():
        return index.long()
    whole = not (index.is_floating_point() or index.is_complex() or index.dtype == torch.bool)
    return index.long() if whole else None
