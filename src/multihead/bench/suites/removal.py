"""The suite `removal`: what a model loses as its heads are taken away, by three orders.

Nothing is timed. KV groups are removed, the least important first, and the loss is taken over text
that the scores have not seen; groups drawn at random are the control.
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
from multihead.heads import (
    Importance,
    gate_gradient,
    leave_one_out,
    random_importance,
    rank_correlation,
    removal_curve,
)

ORDERS = {
    "gate-gradient": "by the gradient of a gate on each",
    "leave-one-out": "by the loss when each alone is left out",
    "random": "at random",
}
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
SEEDS = (1, 2, 3)

_ROW, _QUICK_ROW = 512, 16
_SCORED, _TESTED = 4, 4  # rows
_LEFT_OUT = 1  # rows: leaving out runs the model once for each group


def rows(*, quick: bool) -> list[Row]:
    """One for each order."""
    return [Row(name, partial(_measure, name, quick)) for name in ORDERS]


def _measure(order: str, quick: bool, setting: Setting) -> Entry:
    entry: Entry = {"name": order, "what": ORDERS[order]}
    try:
        model = whole.smollm2(torch.float32, quick=quick)
    except (MissingExtraError, ModelError) as error:
        return {**entry, "not_measurable": str(error)}
    _, tested = _text(quick)
    scores = _scores(order, quick)
    units = len(scores[0].units)
    counts = sorted({0, *(round(share * units) for share in SHARES)})
    curves = [removal_curve(model, tested.split(1), each, counts) for each in scores]
    if order != "gate-gradient":
        (gradient,) = _scores("gate-gradient", quick)
        found = [rank_correlation(gradient, each) for each in scores]
        entry["rank_correlations"] = found
    return entry | {
        "units": units,
        "removed": counts,
        "removal_losses": curves,
        "scored_tokens": scores[0].examples * tested.shape[1],
        "tested_tokens": tested.numel(),
    }


@lru_cache(maxsize=4)
def _scores(order: str, quick: bool) -> list[Importance]:
    model: Any = whole.smollm2(torch.float32, quick=quick)
    scored, _ = _text(quick)
    if order == "gate-gradient":
        return [gate_gradient(model, scored.split(1), kind="kv_group")]
    if order == "leave-one-out":
        return [leave_one_out(model, scored[:_LEFT_OUT], kind="kv_group")]
    return [random_importance(model, seed, kind="kv_group") for seed in SEEDS]


def _text(quick: bool) -> tuple[Tensor, Tensor]:
    """Rows for the scores, and others for the loss."""
    length = _QUICK_ROW if quick else _ROW
    ids = whole.text((_SCORED + _TESTED) * length, quick=quick).view(-1, length)
    return ids[:_SCORED], ids[_SCORED:]
