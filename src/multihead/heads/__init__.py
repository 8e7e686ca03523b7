"""What every head of a model does, and what would be lost without it."""

from .ablation import ablate
from .importance import (
    Importance,
    Unit,
    gate_gradient,
    head_units,
    leave_one_out,
    random_importance,
    rank_correlation,
    removal_curve,
)
from .loss import mean_loss, next_token_loss, token_rows
from .statistics import MAXIMA, MEANS, STATISTICS
from .watch import Heads, watch

__all__ = [
    "MAXIMA",
    "MEANS",
    "STATISTICS",
    "Heads",
    "Importance",
    "Unit",
    "ablate",
    "gate_gradient",
    "head_units",
    "leave_one_out",
    "mean_loss",
    "next_token_loss",
    "random_importance",
    "rank_correlation",
    "removal_curve",
    "token_rows",
    "watch",
]
