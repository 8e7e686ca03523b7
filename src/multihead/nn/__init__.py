"""Layers, positions, and what layers keep of earlier tokens."""

from .block import TransformerBlock
from .cache import (
    Cache,
    KVCache,
    PagedKVCache,
    QuantizedKVCache,
    SplitKVCache,
    StaticKVCache,
    WindowKVCache,
)
from .feed_forward import FeedForward, GatedFeedForward
from .latent import LatentAttention
from .latent_cache import LatentKVCache
from .multi_head import MultiHeadAttention
from .positions import (
    LearnedPositions,
    RoPE,
    Rotation,
    SinusoidalPositions,
    alibi_slopes,
    apply_rope,
)
from .prepack import Prepacked, prepack, unpack
from .prune import Pruned, prune_heads
from .rope_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NTKScaling,
    YaRNScaling,
)

__all__ = [
    "Cache",
    "DynamicNTKScaling",
    "FeedForward",
    "GatedFeedForward",
    "KVCache",
    "LatentAttention",
    "LatentKVCache",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongRoPEScaling",
    "MultiHeadAttention",
    "NTKScaling",
    "PagedKVCache",
    "Prepacked",
    "Pruned",
    "QuantizedKVCache",
    "RoPE",
    "Rotation",
    "SinusoidalPositions",
    "SplitKVCache",
    "StaticKVCache",
    "TransformerBlock",
    "WindowKVCache",
    "YaRNScaling",
    "alibi_slopes",
    "apply_rope",
    "prepack",
    "prune_heads",
    "unpack",
]
