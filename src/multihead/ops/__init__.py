"""The one function, its backends, and exact pieces of the matrix it does not build."""

from . import flop_formulas
from .attention import AttentionResult, Explanation, attention, attention_with_stats, explain
from .key_values import KeyValues
from .merging import merge_attention
from .problem import STATISTICS, ALiBi
from .row_statistics import attention_stats
from .weights import attention_map, attention_weights, received_attention

__all__ = [
    "STATISTICS",
    "ALiBi",
    "AttentionResult",
    "Explanation",
    "KeyValues",
    "attention",
    "attention_map",
    "attention_stats",
    "attention_weights",
    "attention_with_stats",
    "explain",
    "merge_attention",
    "received_attention",
]

flop_formulas.register()
