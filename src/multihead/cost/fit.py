"""The longest context and the largest batch that a memory has room for."""

from __future__ import annotations

from collections.abc import Callable

from multihead.cost.cache import CacheKind, cache_bytes
from multihead.cost.checks import check_counts
from multihead.cost.memory import weight_bytes
from multihead.cost.model import Model
from multihead.cost.training import training_memory

# Beyond this nothing is searched: no memory is so large, a cache that no longer grows fits anyway.
UNBOUNDED = 2**62


def serving_bytes(
    model: Model,
    context: int,
    *,
    batch: int = 1,
    dtype: object = "bfloat16",
    kind: CacheKind = "growing",
) -> int:
    """Weights and filled caches: what serving holds at least, its working memory left out.

    An encoder keeps no cache.
    """
    if not model.causal:
        check_counts(context=context, batch=batch)
        return weight_bytes(model, dtype)
    return weight_bytes(model, dtype) + cache_bytes(
        model, context, batch=batch, dtype=dtype, kind=kind
    )


def largest_context(
    model: Model,
    memory: int,
    *,
    batch: int = 1,
    dtype: object = "bfloat16",
    kind: CacheKind = "growing",
) -> int | None:
    """Tokens of each of `batch` rows that fit beside the weights; None where any number does.

    0 says that not even the weights and one token fit. Raises ArgumentError for negative counts.
    """
    check_counts(memory=memory, batch=batch)
    return _most(lambda n: serving_bytes(model, n, batch=batch, dtype=dtype, kind=kind) <= memory)


def largest_batch(
    model: Model,
    memory: int,
    context: int,
    *,
    dtype: object = "bfloat16",
    kind: CacheKind = "growing",
) -> int | None:
    """Rows of `context` tokens that fit beside the weights; as `largest_context`."""
    check_counts(memory=memory, context=context)
    return _most(lambda n: serving_bytes(model, context, batch=n, dtype=dtype, kind=kind) <= memory)


def largest_training_batch(
    model: Model,
    memory: int,
    context: int,
    *,
    dtype: object = "bfloat16",
    checkpointing: bool = False,
) -> int | None:
    """Rows of `context` tokens that a step of AdamW has room for; as `largest_context`."""
    check_counts(memory=memory, context=context)

    def fits(rows: int) -> bool:
        held = training_memory(model, context, batch=rows, dtype=dtype, checkpointing=checkpointing)
        return held.total <= memory

    return _most(fits)


def _most(fits: Callable[[int], bool]) -> int | None:
    """The largest n from 0 on that fits, where what fits is a range from 1 on."""
    if not fits(1):
        return 0
    high = 2
    while fits(high):
        high *= 2
        if high > UNBOUNDED:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
