"""Bytes of keys and values that a model keeps, as the caches of `multihead.nn` hold them."""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from multihead.cost.attention import dtype_bytes
from multihead.cost.checks import check_choice, check_counts, check_sizes
from multihead.cost.latent import AnyAttention, LatentAttention
from multihead.cost.model import Model
from multihead.cost.parts import Attention
from multihead.errors import ArgumentError

CacheKind = Literal["growing", "static", "window", "paged", "int8"]

PAGE_SIZE = 64

_INT32 = 4
_SCALE = 4  # int8 keeps a float32 scale for each token and head, one of keys and one of values
# As nn.cache takes memory: a quarter more than is held, in steps; pages double.
_GROWTH, _STEP, _FIRST_PAGES = 4, 64, 8


def cache_bytes(
    model: Model,
    tokens: int,
    *,
    batch: int = 1,
    dtype: object = "bfloat16",
    kind: CacheKind = "growing",
    page_size: int = PAGE_SIZE,
    taken: bool = False,
    source: int | None = None,
) -> int:
    """Bytes of the caches of all layers that hold `tokens` of each of `batch` rows.

    It depends on KV heads x head_dim alone: at a fixed width plain multi-head attention keeps the
    same for any number of heads.

    Args:
        kind: as `LanguageModel.make_caches` names them. "window" keeps the newest tokens of a layer
            with a window (for each KV head those of the widest window that it serves) and all of
            other layers; the others keep every token in every layer.
        page_size: tokens of a page, for "paged".
        taken: the memory that the caches take (their `nbytes`) once one prefill of `tokens` has
            filled them, with the room to grow; otherwise what tokens fill (`filled_nbytes`).
        source: tokens that the encoder of an encoder-decoder read; by default `tokens`.

    Raises:
        ArgumentError: a negative count, an unknown kind, or int8 for latents, whose two parts
            differ in size so that one scale would round both.
    """
    check_counts(tokens=tokens, batch=batch)
    check_sizes(page_size=page_size)
    check_choice("kind", kind, get_args(CacheKind))
    size = dtype_bytes(dtype)
    source = tokens if source is None else source
    total = 0
    for layer in model.layers:
        total += _layer_bytes(layer.attention, tokens, batch, size, kind, page_size, taken)
        if layer.cross is not None:
            total += _growing(layer.cross.cached_numbers * size, source, batch, taken)
    return total


def _layer_bytes(
    attention: AnyAttention,
    tokens: int,
    batch: int,
    size: int,
    kind: CacheKind,
    page_size: int,
    taken: bool,
) -> int:
    token = attention.cached_numbers * size
    if kind == "int8":
        if isinstance(attention, LatentAttention):
            raise ArgumentError(
                "kind='int8' does not hold latents: a latent and a rotated key differ in size, and "
                "one scale would round both. Use growing, static or paged."
            )
        return _growing(_int8_token(attention), tokens, batch, taken)
    if kind == "static":
        return batch * (tokens * token + _INT32)
    if kind == "paged":
        return _paged(token, tokens, batch, page_size, taken)
    if kind == "window" and isinstance(attention, Attention):
        return _rolling(attention, tokens, batch, size, taken)
    return _growing(token, tokens, batch, taken)


def _rolling(attention: Attention, tokens: int, batch: int, size: int, taken: bool) -> int:
    """One rolling cache for heads of one window, which numbers its tokens; one a window else."""
    lanes = (attention.head_dim + attention.value_dim) * size
    total = 0
    for room, heads in Counter(attention.kept_windows).items():
        if room is None:
            total += _growing(heads * lanes, tokens, batch, taken)
        else:
            total += (room if taken else min(tokens, room)) * (batch * heads * lanes + _INT32)
    return total


def _int8_token(attention: Attention) -> int:
    return attention.cached_numbers + 2 * _SCALE * attention.kv_heads


def _growing(token: int, tokens: int, batch: int, taken: bool) -> int:
    if taken and tokens:
        tokens = -(-(tokens + tokens // _GROWTH) // _STEP) * _STEP
    return batch * token * tokens


def _paged(token: int, tokens: int, batch: int, page_size: int, taken: bool) -> int:
    row_pages = -(-tokens // page_size)
    pages, table = batch * row_pages, batch * row_pages * _INT32
    if taken:
        first = max(_FIRST_PAGES, batch)
        pages = first + (max(pages - first, first) if pages > first else 0)
    return pages * page_size * token + table
