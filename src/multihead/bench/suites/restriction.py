"""The suite `restriction`: what a model loses as its heads see a window and the first keys alone.

Nothing is timed. KV groups are restricted, those with the least mass beyond the window first, and
the loss is taken over text on which no mass was measured; groups drawn at random are the control.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from multihead.bench import whole
from multihead.bench.case import Entry
from multihead.bench.contest import Setting
from multihead.bench.suites.row import Row
from multihead.errors import MissingExtraError, ModelError
from multihead.heads import mean_loss, next_token_loss, restricted
from multihead.heads.restricting.far_mass import FarMass, far_mass
from multihead.heads.restricting.streaming import ranked_units, windows_of

ORDERS = {
    "far-mass": "the least mass beyond the window first",
    "random": "at random",
}
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
SEEDS = (1, 2, 3)

# Length of a row, window, first keys.
_SIZES, _QUICK_SIZES = (2048, 256, 4), (32, 5, 1)


def rows(*, quick: bool) -> list[Row]:
    """One for each order."""
    return [Row(name, partial(_measure, name, quick)) for name in ORDERS]


def _measure(order: str, quick: bool, setting: Setting) -> Entry:
    _, window, keep_first = _QUICK_SIZES if quick else _SIZES
    entry: Entry = {"name": order, "what": ORDERS[order]}
    try:
        model = whole.smollm2(torch.float32, quick=quick)
    except (MissingExtraError, ModelError) as error:
        return {**entry, "not_measurable": str(error)}
    measured, tested = _text(quick)
    far = _far(quick)
    ranked = ranked_units(far)
    orders = [ranked]
    if order == "random":
        orders = [[ranked[place] for place in _shuffled(len(ranked), seed)] for seed in SEEDS]
    counts = [0, *(round(share * len(ranked)) for share in SHARES)]

    def loss(units: Any) -> float:
        with restricted(model, windows_of(far, units, window, keep_first)):
            return mean_loss(model, tested.split(1))

    ends = {0: loss(()), len(ranked): loss(ranked)}  # the same in any order
    return entry | {
        "units": len(ranked),
        "window": window,
        "keep_first": keep_first,
        "restricted": counts,
        "restriction_losses": [
            [ends[count] if count in ends else loss(units[:count]) for count in counts]
            for units in orders
        ],
        "measured_tokens": measured.numel(),
        "tested_tokens": tested.numel(),
    }


@lru_cache(maxsize=2)
def _far(quick: bool) -> FarMass:
    model: Any = whole.smollm2(torch.float32, quick=quick)
    _, window, keep_first = _QUICK_SIZES if quick else _SIZES
    measured, _ = _text(quick)
    return far_mass(model, measured, next_token_loss, window=window, keep_first=keep_first)


def _text(quick: bool) -> tuple[Tensor, Tensor]:
    """A row for the masses, and another for the loss."""
    length, _, _ = _QUICK_SIZES if quick else _SIZES
    ids = whole.text(2 * length, quick=quick).view(2, 1, length)
    return ids[0], ids[1]


def _shuffled(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order
