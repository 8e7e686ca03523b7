"""What attention costs: parameters, products, exponentials and bytes, as exact integers.

Nothing here runs a model or imports torch. A *product* is one multiply-add; twice as many
floating-point operations.
"""

from multihead.cost.attention import (
    AttentionCost,
    attention_parameters,
    dtype_bytes,
    score_products,
    score_table_bytes,
    value_products,
)
from multihead.cost.cache import CacheKind, cache_bytes
from multihead.cost.decoder import DecoderConfig
from multihead.cost.families import MODEL_TYPES, from_transformers
from multihead.cost.memory import ScoreTables, score_tables, weight_bytes
from multihead.cost.model import AnyFeedForward, Experts, FeedForward, Layer, Model
from multihead.cost.operations import Operations, Pass, backward, forward
from multihead.cost.pairs import visible_pairs
from multihead.cost.parameters import Parameters, parameters_of
from multihead.cost.parts import AnyAttention, Attention, LatentAttention, Projection
from multihead.cost.report import Report
from multihead.cost.training import TrainingMemory, activation_bytes, training_memory

__all__ = [
    "MODEL_TYPES",
    "AnyAttention",
    "AnyFeedForward",
    "Attention",
    "AttentionCost",
    "CacheKind",
    "DecoderConfig",
    "Experts",
    "FeedForward",
    "LatentAttention",
    "Layer",
    "Model",
    "Operations",
    "Parameters",
    "Pass",
    "Projection",
    "Report",
    "ScoreTables",
    "TrainingMemory",
    "activation_bytes",
    "attention_parameters",
    "backward",
    "cache_bytes",
    "dtype_bytes",
    "forward",
    "from_transformers",
    "parameters_of",
    "score_products",
    "score_table_bytes",
    "score_tables",
    "training_memory",
    "value_products",
    "visible_pairs",
    "weight_bytes",
]
