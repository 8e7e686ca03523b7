"""Bytes of caches, weights and training in `multihead.cost`, against the objects themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import multihead as mh
from multihead.cost import (
    Attention,
    FeedForward,
    LatentAttention,
    Layer,
    Model,
    Pass,
    activation_bytes,
    cache_bytes,
    forward,
    parameters_of,
    score_tables,
    training_memory,
    weight_bytes,
    with_head_windows,
)
from multihead.errors import ArgumentError
from multihead.nn.cache.split import SplitKVCache
from multihead.nn.latent_cache import LatentKVCache


def one_layer(attention: Attention | LatentAttention) -> Model:
    return Model((Layer(attention, FeedForward(attention.embed_dim, 17)),), head=False)


def filled(cache, heads: int, tokens: int, widths: tuple[int, int], batch: int, dtype):  # type: ignore[no-untyped-def]
    key = torch.zeros(batch, heads, tokens, widths[0], dtype=dtype)
    value = torch.zeros(batch, heads, tokens, widths[1], dtype=dtype)
    cache.update(key, value)
    return cache


BATCH, HEADS, WIDTHS = 3, 2, (5, 7)


def make_cache(kind: str, tokens: int, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    if kind == "growing":
        return mh.KVCache()
    if kind == "int8":
        return mh.QuantizedKVCache()
    if kind == "window":
        return mh.WindowKVCache(11)
    if kind == "static":
        return mh.StaticKVCache(BATCH, HEADS, tokens, *WIDTHS, dtype=dtype)
    return mh.PagedKVCache(BATCH, HEADS, *WIDTHS, dtype=dtype)


@pytest.mark.parametrize("tokens", [1, 7, 11, 64, 65, 200, 1000])
@pytest.mark.parametrize("kind", ["growing", "static", "window", "paged", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches(kind: str, tokens: int, dtype: torch.dtype) -> None:
    model = one_layer(Attention(22, 4, HEADS, *WIDTHS, window=11 if kind == "window" else None))
    cache = filled(make_cache(kind, tokens, dtype), HEADS, tokens, WIDTHS, BATCH, dtype)
    options = {"batch": BATCH, "dtype": dtype, "kind": kind}
    assert cache_bytes(model, tokens, **options) == cache.filled_nbytes  # type: ignore[arg-type]
    assert cache_bytes(model, tokens, taken=True, **options) == cache.nbytes  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [3, 13, 200])
def test_a_rolling_cache_that_keeps_the_first(tokens: int) -> None:
    cache = filled(mh.WindowKVCache(11, 2), HEADS, tokens, WIDTHS, BATCH, torch.float32)
    model = one_layer(Attention(22, 4, HEADS, *WIDTHS, window=11, keep_first=2))
    options = {"batch": BATCH, "dtype": "float32", "kind": "window"}
    assert cache_bytes(model, tokens, **options) == cache.filled_nbytes  # type: ignore[arg-type]
    assert cache_bytes(model, tokens, taken=True, **options) == cache.nbytes  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [3, 9, 100])
def test_heads_with_windows_of_their_own_keep_what_their_kv_head_serves(tokens: int) -> None:
    plain = one_layer(Attention(24, 6, 3, *WIDTHS))
    model = with_head_windows(plain, [(3, 5, None, 7, 5, 2)], keep_first=2)
    cache = filled(SplitKVCache((5, None, 5), 2), 3, tokens, WIDTHS, BATCH, torch.float32)
    options = {"batch": BATCH, "dtype": "float32", "kind": "window"}
    assert cache_bytes(model, tokens, **options) == cache.filled_nbytes  # type: ignore[arg-type]
    assert cache_bytes(model, tokens, taken=True, **options) == cache.nbytes  # type: ignore[arg-type]
    assert with_head_windows(plain, [None]) == plain


def test_windows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="1 in all"):
        with_head_windows(one_layer(Attention.of(24, 4)), [])
    with pytest.raises(ArgumentError, match="one a head"):
        with_head_windows(one_layer(Attention.of(24, 4)), [(3, 4)])
    with pytest.raises(ArgumentError, match="share one latent"):
        with_head_windows(one_layer(LatentAttention(42, 3, 13, 7, 6, 5)), [(3, 4, 5)])


@pytest.mark.parametrize("kind", ["growing", "static", "paged"])
def test_caches_of_latents(kind: str) -> None:
    entries = {
        "growing": mh.KVCache,
        "static": lambda: mh.StaticKVCache(BATCH, 1, 70, 19, 0),
        "paged": lambda: mh.PagedKVCache(BATCH, 1, 19, 0),
    }[kind]()
    cache = LatentKVCache(13, entries)
    cache.update(torch.zeros(BATCH, 1, 70, 6), torch.zeros(BATCH, 1, 70, 13))
    model = one_layer(LatentAttention(42, 3, 13, 7, 6, 5))
    options = {"batch": BATCH, "dtype": "float32", "kind": kind}
    assert cache_bytes(model, 70, **options) == cache.filled_nbytes  # type: ignore[arg-type]
    assert cache_bytes(model, 70, taken=True, **options) == cache.nbytes  # type: ignore[arg-type]


def test_int8_is_refused_for_latents() -> None:
    with pytest.raises(ArgumentError, match="latent"):
        cache_bytes(one_layer(LatentAttention(42, 3, 13, 7, 6, 5)), 3, kind="int8")


def test_the_cache_depends_on_the_kv_width_alone() -> None:
    sizes = {cache_bytes(one_layer(Attention.of(64, heads)), 19) for heads in (1, 2, 4, 8, 64)}
    assert sizes == {2 * 64 * 19 * 2}
    groups = [cache_bytes(one_layer(Attention.of(64, 8, kv)), 19) for kv in (8, 4, 2, 1)]
    assert groups == [4864, 2432, 1216, 608]


@pytest.mark.parametrize(
    ("tokens", "table"),
    [(1024, 2097152), (8192, 134217728), (32768, 2147483648), (131072, 34359738368)],
)
def test_score_tables(tokens: int, table: int) -> None:
    model = one_layer(Attention.of(1024, 8))
    model = replace(model, layers=model.layers * 3)
    tables = score_tables(model, Pass(tokens, batch=2), "float16")
    assert (tables.head, tables.layer, tables.model) == (table, 16 * table, 48 * table)


def test_score_tables_of_an_encoder_decoder_are_as_many_as_its_exponentials() -> None:
    """Those of the encoder and of cross-attention too; a step behind the cache builds fewer."""
    attention = Attention.of(32, 4)
    source = Model((Layer(Attention.of(32, 8), FeedForward(32, 17)),) * 3, causal=False, head=False)
    crossing = Layer(attention, FeedForward(32, 17), cross=Attention.of(32, 2))
    model = Model((crossing,) * 2, head=False, source=source)
    for step in (Pass(5, batch=2, source=11), Pass(1, past=6, batch=2, source=11)):
        tables = score_tables(model, step, "float16")
        assert tables.model == 2 * forward(model, step, counting="dense").exponentials
    assert score_tables(model, Pass(5, source=11), "float16").layer == 2 * 8 * 11 * 11
    assert score_tables(model, Pass(1, past=6, source=11), "float16").layer == 2 * 4 * 7


def test_training() -> None:
    layer = Layer(Attention.of(32, 4, rotary=True), FeedForward(32, 17))
    model = Model((layer, layer), vocab=101)
    parameters = parameters_of(model).total
    held = training_memory(model, 7, dtype="bfloat16")
    assert held.weights == held.gradients == weight_bytes(model, "bfloat16") == 2 * parameters
    assert held.optimizer == 8 * parameters
    assert held.master == 4 * parameters
    assert held.total == 16 * parameters + activation_bytes(model, 7)
    plain = training_memory(model, 7, dtype="float32")
    assert plain.master == 0
    assert plain.total - plain.activations == 16 * parameters
    less = training_memory(model, 7, checkpointing=True)
    assert less.activations < held.activations


def test_activations_equal_what_autograd_keeps() -> None:
    from multihead.models import BlockConfig, LanguageModel, LanguageModelConfig

    block = BlockConfig(24, 4, 36, num_kv_heads=2, rope=mh.RoPE())
    ours = LanguageModel(LanguageModelConfig(101, (block, block)))
    described = Layer(Attention.of(24, 4, 2, rotary=True), FeedForward(24, 36))
    model = Model((described, described), vocab=101, tied=True)
    ids, targets = torch.arange(14).view(2, 7), torch.arange(14)
    owned = {p.untyped_storage().data_ptr() for p in ours.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logits = ours(ids)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets)
    assert parameters_of(model).total == sum(p.numel() for p in ours.parameters())
    assert activation_bytes(model, 7, batch=2, dtype="float32") == sum(kept.values())


def test_activations_of_an_encoder_decoder_are_refused() -> None:
    attention = Attention.of(32, 4)
    source = Model((Layer(attention, FeedForward(32, 17)),), causal=False, head=False)
    crossing = Layer(attention, FeedForward(32, 17), cross=replace(attention, context_dim=32))
    with pytest.raises(ArgumentError, match="stacks"):
        activation_bytes(Model((crossing,), head=False, source=source), 7)
