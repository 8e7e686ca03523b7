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
from .all_reduce import all_reduced
from .diagnosis import Finding, StabilityReport, Thresholds
from .qk_clip import Clipped, qk_clip
from .stability import StabilityMonitor, stability
from .comparison import Comparison, HeadDifference
from .histogram import Quantile
from .lazy_weights import LazyRows, LazyWeights
from .record import HeadRecord
from .pruning import load_pruned, prune
from .probe_scores import ROLES
from .probes import Probes
from .role_thresholds import Thresholds, calibrate_roles
from .roles import Role, Roles, find_roles
from .statistics import MAXIMA, MEANS, STATISTICS
from .trainer import trainer_callback
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
    "load_pruned",
    "mean_loss",
    "next_token_loss",
    "prune",
    "random_importance",
    "rank_correlation",
    "removal_curve",
    "token_rows",
    "Clipped",
    "Finding",
    "Heads",
    "StabilityMonitor",
    "StabilityReport",
    "Thresholds",
    "all_reduced",
    "qk_clip",
    "stability",
    "trainer_callback",
    "Comparison",
    "HeadDifference",
    "HeadRecord",
    "Heads",
    "LazyRows",
    "LazyWeights",
    "Quantile",
    "ROLES",
    "STATISTICS",
    "Heads",
    "Probes",
    "Role",
    "Roles",
    "Thresholds",
    "calibrate_roles",
    "find_roles",
    "watch",
]
