"""Key-value caches: what a layer keeps of the tokens that it has seen."""

from .growing import KVCache
from .paged import PagedKVCache
from .protocol import Cache
from .quantized import QuantizedKVCache
from .split import SplitKVCache
from .static import StaticKVCache
from .window import WindowKVCache

__all__ = [
    "Cache",
    "KVCache",
    "PagedKVCache",
    "QuantizedKVCache",
    "SplitKVCache",
    "StaticKVCache",
    "WindowKVCache",
]
