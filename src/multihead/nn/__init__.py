"""Layers, and what they keep of earlier tokens."""

from .block import (
    TransformerBlock,
)
from .cache import (
    Cache,
    KVCache,
    PagedKVCache,
    QuantizedKVCache,
    StaticKVCache,
    WindowKVCache,
)
from .feed_forward import (
    FeedForward,
    GatedFeedForward,
)
from .multi_head import (
    MultiHeadAttention,
)
from .prepack import (
    Prepacked,
    prepack,
    unpack,
)

__all__ = [
    "Cache",
    "FeedForward",
    "GatedFeedForward",
    "KVCache",
    "MultiHeadAttention",
    "PagedKVCache",
    "Prepacked",
    "QuantizedKVCache",
    "StaticKVCache",
    "TransformerBlock",
    "WindowKVCache",
    "prepack",
    "unpack",
]
