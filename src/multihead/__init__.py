"""Multi-head attention for PyTorch: exact, linear in memory, and open to look into."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    ArgumentError,
    BackendError,
    DeviceError,
    DtypeError,
    InputError,
    MaskError,
    MissingExtraError,
    ModelError,
    MultiheadError,
)
from .masks import (
    Causal,
    Dense,
    Documents,
    KeyLengths,
    KeyPadding,
    Mask,
    Positions,
    PrefixCausal,
    QueryStart,
    SlidingWindow,
    Window,
)
from .models import (
    BlockConfig,
    Encoder,
    EncoderConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    LanguageModel,
    LanguageModelConfig,
    Sampling,
    generate,
    generate_steps,
)
from .nn import (
    Cache,
    DynamicNTKScaling,
    FeedForward,
    GatedFeedForward,
    KVCache,
    LatentAttention,
    LatentKVCache,
    LearnedPositions,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    MultiHeadAttention,
    NTKScaling,
    PagedKVCache,
    Prepacked,
    QuantizedKVCache,
    RoPE,
    Rotation,
    SinusoidalPositions,
    StaticKVCache,
    TransformerBlock,
    WindowKVCache,
    YaRNScaling,
    alibi_slopes,
    apply_rope,
    prepack,
    unpack,
)
from .ops.attention import AttentionResult, Explanation, attention, attention_with_stats, explain
from .ops.key_values import KeyValues
from .ops.merging import merge_attention
from .ops.problem import STATISTICS, ALiBi
from .ops.row_statistics import attention_stats
from .ops.weights import attention_map, attention_weights, received_attention

if TYPE_CHECKING:
    from .heads.watching.watch import watch
    from .integrations.sdpa import replace_sdpa

__version__ = "0.1.0"

__all__ = [
    "STATISTICS",
    "ALiBi",
    "ArgumentError",
    "AttentionResult",
    "BackendError",
    "BlockConfig",
    "Cache",
    "Causal",
    "Dense",
    "DeviceError",
    "Documents",
    "DtypeError",
    "DynamicNTKScaling",
    "Encoder",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Explanation",
    "FeedForward",
    "GatedFeedForward",
    "InputError",
    "KVCache",
    "KeyLengths",
    "KeyPadding",
    "KeyValues",
    "LanguageModel",
    "LanguageModelConfig",
    "LatentAttention",
    "LatentKVCache",
    "LearnedPositions",
    "LinearScaling",
    "Llama3Scaling",
    "LongRoPEScaling",
    "Mask",
    "MaskError",
    "MissingExtraError",
    "ModelError",
    "MultiHeadAttention",
    "MultiheadError",
    "NTKScaling",
    "PagedKVCache",
    "Positions",
    "PrefixCausal",
    "Prepacked",
    "QuantizedKVCache",
    "QueryStart",
    "RoPE",
    "Rotation",
    "Sampling",
    "SinusoidalPositions",
    "SlidingWindow",
    "StaticKVCache",
    "TransformerBlock",
    "Window",
    "WindowKVCache",
    "YaRNScaling",
    "alibi_slopes",
    "apply_rope",
    "attention",
    "attention_map",
    "attention_stats",
    "attention_weights",
    "attention_with_stats",
    "explain",
    "generate",
    "generate_steps",
    "merge_attention",
    "prepack",
    "received_attention",
    "replace_sdpa",
    "unpack",
    "watch",
]

# What tracebacks and help show is the name that users import.
for _name in __all__:
    if _name in globals() and hasattr(globals()[_name], "__module__"):
        globals()[_name].__module__ = "multihead"
del _name

_LATER = {"replace_sdpa": ".integrations.sdpa", "watch": ".heads.watching.watch"}


def __getattr__(name: str) -> Any:
    """Load what stands above the layers only when it is used."""
    if name in _LATER:
        thing = getattr(import_module(_LATER[name], __name__), name)
        thing.__module__ = __name__
        return thing
    raise AttributeError(f"module 'multihead' has no attribute {name!r}")
