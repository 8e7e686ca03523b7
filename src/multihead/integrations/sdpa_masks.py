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
    visible = _visible(mask)
    if visible is None:
        return Lowered(bias=mask)
    if visible.shape[-1] == 1 or (visible.shape[-2] > 1 and visible.numel() <= _SMALL):
        return Lowered(mask=Dense(visible))
    if visible.shape[-2] == 1 and visible.shape[1] == 1:
        return Lowered(mask=KeyPadding(visible[:, 0, 0]))
    ranges = None if visible.shape[-2] == 1 else _ranges(visible)
    if ranges is None:
        return Lowered(mask=Dense(visible))
    if ranges.shape[:2] == (1, 1) and ranges.shape[-2] == 1:
        blocks = tuple(_blocks(ranges[0, 0, :, 0].tolist()))
        if len(blocks) == 1 or visible.numel() >= _PAIRS_WORTH_A_CALL * len(blocks):
            return Lowered(blocks=blocks)
    return Lowered(mask=RowRanges(ranges))


def _visible(mask: Tensor) -> Tensor | None:
    """Which pairs a mask lets in, as booleans of its shape; None if it says more than that."""
    if mask.dtype == torch.bool:
        return mask
    if mask.requires_grad:
        return None
    visible = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min
    if not (visible | hidden).all() or not visible.any(-1).all():
        return None
    return visible


def _ranges(visible: Tensor) -> Tensor | None:
    """The columns that each row sees, int32 [B|1, H|1, Lq, R, 2]; None if they are many."""
    edges = torch.diff(torch.nn.functional.pad(visible.to(torch.int8), (1, 1)), dim=-1)
    begins = edges == 1
    counts = begins.sum(-1)
    most = max(int(counts.max()), 1)
    if most > _MOST_RANGES:
        return None
    begin_columns, end_columns = begins.nonzero()[:, -1], (edges == -1).nonzero()[:, -1]
    counts = counts.flatten()
    rows = torch.arange(len(counts)).repeat_interleave(counts)
    places = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    ranges = torch.zeros(len(counts), most, 2, dtype=torch.int32)
    ranges[rows, places, 0] = begin_columns.to(torch.int32)
    ranges[rows, places, 1] = end_columns.to(torch.int32)
    return ranges.view(*visible.shape[:-1], most, 2)


def _blocks(ranges: list[list[int]]) -> Iterator[Block]:
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


def _step(before: list[int], after: list[int]) -> str:
    """How the range of one row becomes that of the next; another way has no name."""
    moved = after[0] - before[0], after[1] - before[1]
    return {(0, 0): "same", (0, 1): "grow", (1, 1): "slide"}.get(moved, "other")
