"""What every head of a model does, and what would be lost without it."""

from . import figures
from .comparing.rollout import Rollout, rollout
from .comparing.similarity import Group, Similarity, similarity
from .corpora.corpus import read_corpus
from .corpora.record import CorpusFacts, CorpusRecord, Link
from .corpora.text import Document
from .loss import mean_loss, next_token_loss, token_rows
from .output.writing import Writing, WrittenTokens, writing
from .probing.probe_scores import ROLES
from .probing.probes import Probes
from .probing.repeated_token import RepeatedToken, probe_repeated_token
from .probing.role_thresholds import RoleThresholds, calibrate_roles
from .probing.roles import Role, Roles, find_roles
from .removing.ablation import ablate
from .removing.importance import (
    Importance,
    Unit,
    gate_gradient,
    head_units,
    leave_one_out,
    random_importance,
    rank_correlation,
    removal_curve,
)
from .removing.pruning import load_pruned, prune
from .restricting.decoding_cost import DecodingCost, decoding_cost
from .restricting.streaming import StreamingHeads, streaming
from .restricting.windows import HeadWindows, restrict, restricted
from .training.all_reduce import all_reduced
from .training.diagnosis import Finding, StabilityReport, StabilityThresholds
from .training.qk_clip import Clipped, qk_clip
from .training.stability import StabilityMonitor, stability
from .training.trainer import trainer_callback
from .watching.comparison import Comparison, HeadDifference
from .watching.histogram import Quantile
from .watching.lazy_weights import LazyRows, LazyWeights
from .watching.record import HeadRecord
from .watching.statistics import MAXIMA, MEANS, STATISTICS
from .watching.watch import Heads, watch

__all__ = [
    "MAXIMA",
    "MEANS",
    "ROLES",
    "STATISTICS",
    "Clipped",
    "Comparison",
    "CorpusFacts",
    "CorpusRecord",
    "DecodingCost",
    "Document",
    "Finding",
    "Group",
    "HeadDifference",
    "HeadRecord",
    "HeadWindows",
    "Heads",
    "Importance",
    "LazyRows",
    "LazyWeights",
    "Link",
    "Probes",
    "Quantile",
    "RepeatedToken",
    "Role",
    "RoleThresholds",
    "Roles",
    "Rollout",
    "Similarity",
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
    "figures",
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
    "read_corpus",
    "removal_curve",
    "restrict",
    "restricted",
    "rollout",
    "similarity",
    "stability",
    "streaming",
    "token_rows",
    "trainer_callback",
    "watch",
    "writing",
]
