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
from multihead.cost.decoder import DecoderConfig
from multihead.cost.families import MODEL_TYPES, from_transformers
from multihead.cost.model import AnyFeedForward, Experts, FeedForward, Layer, Model
from multihead.cost.parameters import Parameters, parameters_of
from multihead.cost.parts import AnyAttention, Attention, LatentAttention, Projection
from multihead.cost.report import Report

__all__ = [
    "MODEL_TYPES",
    "AnyAttention",
    "AnyFeedForward",
    "Attention",
    "AttentionCost",
    "DecoderConfig",
    "Experts",
    "FeedForward",
    "LatentAttention",
    "Layer",
    "Model",
    "Parameters",
    "Projection",
    "Report",
    "attention_parameters",
    "dtype_bytes",
    "from_transformers",
    "parameters_of",
    "score_products",
    "score_table_bytes",
    "value_products",
]
