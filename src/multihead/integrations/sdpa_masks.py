"""From the mask tensors of `scaled_dot_product_attention` to rules.

A mask of zeros and lowest numbers, or of booleans, mostly says something short: a triangle, a
window, requests packed one behind the other. What it says is read off once, so that no kernel
reads a table of Lq x Lk.

Shape suffixes: b batch, h head, q query row, k key column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..masks import Causal, Dense, KeyPadding, Mask, SlidingWindow
from ..masks.lowering import Lowering

# Kernels test a key against each range of its row.
_MOST_RANGES = 8

# A call for a block of its own costs some ten microseconds, as long as this many pairs of a row and
# a key in all heads of a small model.
_PAIRS_WORTH_A_CALL = 2048

# A table as small as this is read sooner than described.
_SMALL = 1024

_AT_A_TIME = 1 << 16


@dataclass(frozen=True, eq=False)
class RowRanges(Mask):
    """Each row sees a few intervals of columns: `ranges` int32 [B|1, H|1, Lq, R, 2].

    A row's half-open intervals are disjoint and ascending; empty ones may follow.
    """

    ranges: Tensor

    def add_to(self, lowering: Lowering) -> None:
        lowering.show_ranges(self.ranges)


@dataclass(frozen=True)
class Block:
    """Rows that see nothing but the columns `begin` to `end`, and of these what `mask` lets in."""

    rows: slice
    begin: int
    end: int
    mask: Mask | None


@dataclass(frozen=True, eq=False)
class Lowered:
    """What a mask tensor says: blocks of rows, in order; or a mask; or a bias of many values."""

    blocks: tuple[Block, ...] = ()
    mask: Mask | None = None
    bias: Tensor | None = None


def lower(mask: Tensor) -> Lowered:
    """What `mask` [B|1, H|1, Lq|1, Lk|1] says, bool (True = may be attended) or float (added).

    A float mask becomes rules only if each row holds zeros and, beside them, nothing but numbers
    so low that softmax gives them a weight of 0: at most the lowest number of its dtype. (A row of
    lowest numbers alone is a plain mean, so it is none that sees nothing.) Any other float mask,
    and one that is trained, stays a bias.
    """
    mask = _told_apart(mask)
    visible = _visible(mask)
    if visible is None:
        return Lowered(bias=mask)
    batch, heads, rows, columns = visible.shape
    if columns == 1 or (rows > 1 and visible.numel() <= _SMALL):
        return _dense(mask, visible)
    if rows == 1:
        padding = heads == 1 and (visible is mask or bool(visible.any(-1).all()))
        return Lowered(mask=KeyPadding(visible[:, 0, 0])) if padding else _dense(mask, visible)
    ranges = _ranges(visible)
    if ranges is None:
        return _dense(mask, visible)
    if visible is not mask and not all(ranges):
        return Lowered(bias=mask)
    if batch == heads == 1 and max(map(len, ranges)) <= 1:
        blocks = tuple(_blocks([row[0] if row else (0, 0) for row in ranges]))
        if len(blocks) == 1 or visible.numel() >= _PAIRS_WORTH_A_CALL * len(blocks):
            return Lowered(blocks=blocks)
    most = max(1, *map(len, ranges))
    filled = [(*row, *[(0, 0)] * (most - len(row))) for row in ranges]
    table = torch.tensor(filled, dtype=torch.int32).view(batch, heads, rows, most, 2)
    return Lowered(mask=RowRanges(table))


def _told_apart(mask: Tensor) -> Tensor:
    """`mask` without samples and heads that are one in memory."""
    for axis in (0, 1):
        if mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return mask


def _visible(mask: Tensor) -> Tensor | None:
    """Which pairs a mask lets in, as booleans of its shape; None if it says more than that."""
    if mask.dtype == torch.bool:
        return mask
    if mask.requires_grad:
        return None
    lowest, columns = torch.finfo(mask.dtype).min, mask.shape[-1]
    table = mask.reshape(-1, columns)
    visible = torch.empty(table.shape, dtype=torch.bool)
    # A few rows at a time stay in the cache; most other masks are known by the first of them.
    rows = 1 + _AT_A_TIME // columns
    for some, shown in zip(table.split(rows), visible.split(rows), strict=True):
        torch.eq(some, 0, out=shown)
        if not ((some <= lowest) | shown).all():
            return None
    return visible.view(mask.shape)


def _dense(mask: Tensor, visible: Tensor) -> Lowered:
    """The table of booleans, unless a row of a float mask is even."""
    if visible is not mask and not visible.any(-1).all():
        return Lowered(bias=mask)
    return Lowered(mask=Dense(visible))


def _ranges(visible: Tensor) -> list[list[tuple[int, int]]] | None:
    """The columns that each row of each head and sample sees; None if some are many intervals."""
    columns = visible.shape[-1]
    # Bytes are searched at the speed of memory, which no sequence of tensor operations comes near.
    table = visible.contiguous().numpy().tobytes()
    rows = []
    for begin in range(0, len(table), columns):
        end = begin + columns
        row: list[tuple[int, int]] = []
        shown = table.find(1, begin, end)
        while shown >= 0:
            if len(row) == _MOST_RANGES:
                return None
            hidden = table.find(0, shown, end)
            row.append((shown - begin, (hidden if hidden >= 0 else end) - begin))
            shown = table.find(1, hidden, end) if hidden >= 0 else -1
        rows.append(row)
    return rows


def _blocks(ranges: list[tuple[int, int]]) -> Iterator[Block]:
    """Consecutive rows joined where their ranges are a rectangle, a triangle or a window's band.

    From row to row of a block the ranges stay ("same"); or their ends move on by one, first with
    begins that stay ("grow") and then with begins that follow ("slide").
    """
    first, form, width = 0, "", 0
    for row in range(1, len(ranges) + 1):
        step = _step(ranges[row - 1], ranges[row]) if row < len(ranges) else ""
        if step in _MAY_FOLLOW[form]:
            form = step
            if step == "slide":
                width = ranges[row][1] - ranges[row][0]
            continue
        mask = {"grow": Causal(), "slide": SlidingWindow(max(width, 1))}.get(form)
        yield Block(slice(first, row), ranges[first][0], ranges[row - 1][1], mask)
        first, form = row, ""


_MAY_FOLLOW = {
    "": ("same", "grow", "slide"),
    "same": ("same",),
    "grow": ("grow", "slide"),
    "slide": ("slide",),
}


def _step(before: tuple[int, int], after: tuple[int, int]) -> str:
    """How the range of one row becomes that of the next; another way has no name."""
    moved = after[0] - before[0], after[1] - before[1]
    return {(0, 0): "same", (0, 1): "grow", (1, 1): "slide"}.get(moved, "other")
