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
from multihead.cost.report import Report

__all__ = [
    "AttentionCost",
    "DecoderConfig",
    "Report",
    "attention_parameters",
    "dtype_bytes",
    "score_products",
    "score_table_bytes",
    "value_products",
]
