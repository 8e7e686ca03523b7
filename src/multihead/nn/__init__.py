"""Layers, and what they keep of earlier tokens."""

from .block import TransformerBlock
from .cache import KVCache
from .feed_forward import FeedForward, GatedFeedForward
from .multi_head import MultiHeadAttention
from .prepack import Prepacked, prepack, unpack

__all__ = [
    "FeedForward",
    "GatedFeedForward",
    "KVCache",
    "MultiHeadAttention",
    "Prepacked",
    "TransformerBlock",
    "prepack",
    "unpack",
]
