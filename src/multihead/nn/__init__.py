"""Layers, and what they keep of earlier tokens."""

from .cache import KVCache
from .multi_head import MultiHeadAttention

__all__ = ["KVCache", "MultiHeadAttention"]
