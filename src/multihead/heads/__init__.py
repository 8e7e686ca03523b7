"""What every head of a model does, and what would be lost without it."""

from .ablation import ablate
from .all_reduce import all_reduced
from .comparison import Comparison, HeadDifference
from .decoding_cost import DecodingCost, decoding_cost
from .diagnosis import Finding, StabilityReport, StabilityThresholds
from .histogram import Quantile
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
from .lazy_weights import LazyRows, LazyWeights
from .loss import mean_loss, next_token_loss, token_rows
from .probe_scores import ROLES
from .probes import Probes
from .pruning import load_pruned, prune
from .qk_clip import Clipped, qk_clip
from .record import HeadRecord
from .repeated_token import RepeatedToken, probe_repeated_token
from .role_thresholds import RoleThresholds, calibrate_roles
from .roles import Role, Roles, find_roles
from .stability import StabilityMonitor, stability
from .statistics import MAXIMA, MEANS, STATISTICS
from .streaming import StreamingHeads, streaming
from .trainer import trainer_callback
from .watch import Heads, watch
from .windows import HeadWindows, restrict, restricted
from .writing import Writing, WrittenTokens, writing

__all__ = [
    "MAXIMA",
    "MEANS",
    "ROLES",
    "STATISTICS",
    "Clipped",
    "Comparison",
    "DecodingCost",
    "Finding",
    "HeadDifference",
    "HeadRecord",
    "HeadWindows",
    "Heads",
    "Importance",
    "LazyRows",
    "LazyWeights",
    "Probes",
    "Quantile",
    "RepeatedToken",
    "Role",
    "RoleThresholds",
    "Roles",
    "StabilityMonitor",
    "StabilityReport",
    "StabilityThresholds",
    "StreamingHeads",
    "Unit",
    "Writing",
    "WrittenTokens",
    "ablate",
    "all_reduced",
    "calibrate_roles",
    "decoding_cost",
    "find_roles",
    "gate_gradient",
    "head_units",
    "leave_one_out",
    "load_pruned",
    "mean_loss",
    "next_token_loss",
    "probe_repeated_token",
    "prune",
    "qk_clip",
    "random_importance",
    "rank_correlation",
    "removal_curve",
    "restrict",
    "restricted",
    "stability",
    "streaming",
    "token_rows",
    "trainer_callback",
    "watch",
    "writing",
]
