"""What attention costs: parameters, products, exponentials and bytes, as exact integers.

Nothing here runs a model or imports torch. A *product* is one multiply-add; twice as many
floating-point operations.
"""

from multihead.cost.advice import VASWANI_3A, Remark, Trial, head_size_remarks
from multihead.cost.attention import (
    AttentionCost,
    attention_parameters,
    dtype_bytes,
    score_products,
    score_table_bytes,
    value_products,
)
from multihead.cost.cache import CacheKind, cache_bytes
from multihead.cost.crossover import crossover
from multihead.cost.device import DEVICES, Device, device
from multihead.cost.estimate import Estimate, estimate
from multihead.cost.families import MODEL_TYPES, from_transformers
from multihead.cost.fit import (
    largest_batch,
    largest_context,
    largest_training_batch,
    serving_bytes,
)
from multihead.cost.latent import AnyAttention, LatentAttention
from multihead.cost.memory import ScoreTables, score_tables, weight_bytes
from multihead.cost.model import AnyFeedForward, Experts, FeedForward, Layer, Model
from multihead.cost.operations import Operations, Pass, backward, forward
from multihead.cost.pairs import visible_pairs
from multihead.cost.parameters import Parameters, parameters_of
from multihead.cost.parts import Attention, Projection
from multihead.cost.report import Setting, measures, outline, report, setting_document
from multihead.cost.summary import summary
from multihead.cost.traffic import Traffic, Widths, traffic
from multihead.cost.training import TrainingMemory, activation_bytes, training_memory
from multihead.cost.variants import (
    KINDS,
    SIZES,
    sweep_head_dims,
    sweep_heads,
    what_if,
    with_head_windows,
    with_kind,
)

__all__ = [
    "DEVICES",
    "KINDS",
    "MODEL_TYPES",
    "SIZES",
    "VASWANI_3A",
    "AnyAttention",
    "AnyFeedForward",
    "Attention",
    "AttentionCost",
    "CacheKind",
    "Device",
    "Estimate",
    "Experts",
    "FeedForward",
    "LatentAttention",
    "Layer",
    "Model",
    "Operations",
    "Parameters",
    "Pass",
    "Projection",
    "Remark",
    "ScoreTables",
    "Setting",
    "Traffic",
    "TrainingMemory",
    "Trial",
    "Widths",
    "activation_bytes",
    "attention_parameters",
    "backward",
    "cache_bytes",
    "crossover",
    "device",
    "dtype_bytes",
    "estimate",
    "forward",
    "from_transformers",
    "head_size_remarks",
    "largest_batch",
    "largest_context",
    "largest_training_batch",
    "measures",
    "outline",
    "parameters_of",
    "report",
    "score_products",
    "score_table_bytes",
    "score_tables",
    "serving_bytes",
    "setting_document",
    "summary",
    "sweep_head_dims",
    "sweep_heads",
    "traffic",
    "training_memory",
    "value_products",
    "visible_pairs",
    "weight_bytes",
    "what_if",
    "with_head_windows",
    "with_kind",
]
