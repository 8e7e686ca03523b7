"""Layers."""

from .multi_head import MultiHeadAttention

__all__ = ["MultiHeadAttention"]
