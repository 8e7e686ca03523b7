"""Layers with a cache: piece by piece is the whole at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from close import assert_close
from layers import by_formula, orders, reordered, worst
from multihead.nn import SplitKVCache

BATCH, LENGTH, CONTEXT, WIDTH, CONTEXT_WIDTH = 2, 13, 7, 20, 11
CUTS = ((0, 5), (5, 6), (6, 8), (8, 8), (8, 13))


def build(**options: object) -> mh.MultiHeadAttention:
    torch.manual_seed(0)
    return mh.MultiHeadAttention(WIDTH, 4, num_kv_heads=2, head_dim=6, value_dim=3, **options)


CACHES: dict[str, Callable[[], mh.Cache]] = {
    "growing": mh.KVCache,
    "static": partial(mh.StaticKVCache, BATCH, 2, 16, 6, 3),
    "paged": partial(mh.PagedKVCache, BATCH, 2, 6, 3, page_size=4),
    "window": partial(mh.WindowKVCache, 6),
}
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "rope": {"rope": mh.RoPE()},
    "everything": {
        "rope": mh.RoPE(), "qk_norm": partial(nn.RMSNorm, eps=1e-6), "window": 6,
        "softcap": 2.0, "sinks": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", CACHES)
def test_piece_by_piece_is_the_whole(kind: str, name: str) -> None:
    """In float32, within twice the error of a plain layer that sees the whole."""
    options = {"window": 6, **OPTIONS[name]} if kind == "window" else OPTIONS[name]
    layer = build(**options)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    exact = by_formula(layer, x.double(), mask=mh.Causal())
    plain = [by_formula(reordered(layer, it), x, mask=mh.Causal()) for it in orders()]
    cache = CACHES[kind]()
    parts = []
    with torch.no_grad():
        for begin, end in CUTS:
            parts.append(layer(x[:, begin:end], mask=mh.Causal(), cache=cache))
            assert cache.length == end
    assert_close(torch.cat(parts, dim=1), exact, worst(exact, plain))


def test_statistics_with_a_cache() -> None:
    layer = build(rope=mh.RoPE())
    x = torch.randn(BATCH, LENGTH, WIDTH)
    names = ("entropy", "argmax")
    with torch.no_grad():
        out, whole = layer.forward_with_stats(x, mask=mh.Causal(), stats=names)
        cache = mh.KVCache()
        layer(x[:, :8], mask=mh.Causal(), cache=cache)
        last, stats = layer.forward_with_stats(x[:, 8:], mask=mh.Causal(), cache=cache, stats=names)
    torch.testing.assert_close(last, out[:, 8:], rtol=1e-5, atol=1e-6)
    assert torch.equal(stats.argmax, whole.argmax[:, :, 8:])
    torch.testing.assert_close(stats.entropy, whole.entropy[:, :, 8:], rtol=1e-5, atol=1e-5)


def test_a_growing_cache_keeps_gradients() -> None:
    layer = build(rope=mh.RoPE(), sinks=True).double()
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    weight = torch.randn_like(x)

    def gradients(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        return list(torch.autograd.grad((run(leaf) * weight).sum(), [leaf, *layer.parameters()]))

    def cut(leaf: Tensor) -> Tensor:
        cache = mh.KVCache()
        parts = [layer(leaf[:, b:e], mask=mh.Causal(), cache=cache) for b, e in CUTS]
        return torch.cat(parts, dim=1)

    for got, want in zip(
        gradients(cut), gradients(lambda leaf: layer(leaf, mask=mh.Causal())), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_cache_of_fixed_memory_refuses_gradients() -> None:
    layer = build()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(mh.ArgumentError, match=r"torch\.no_grad\(\), or use KVCache"):
        layer(x, cache=CACHES["static"]())


def test_padded_rows_of_a_batch_continue_as_alone() -> None:
    """Left padding and rope: positions count the padding, and only differences matter."""
    layer = build(rope=mh.RoPE())
    x = torch.randn(BATCH, LENGTH, WIDTH)
    visible = torch.arange(LENGTH) >= torch.tensor([[0], [3]])
    exact = by_formula(layer, x[1:, 3:].double(), mask=mh.Causal())
    plain = [by_formula(reordered(layer, it), x[1:, 3:], mask=mh.Causal()) for it in orders()]
    with torch.no_grad():
        cache = mh.KVCache()
        first = layer(x[:, :9], mask=mh.Causal() & mh.KeyPadding(visible[:, :9]), cache=cache)
        rest = layer(x[:, 9:], mask=mh.Causal() & mh.KeyPadding(visible), cache=cache)
    assert_close(torch.cat((first, rest), dim=1)[1:, 3:], exact, worst(exact, plain))


@pytest.mark.parametrize("kind", ["growing", "static", "paged"])
def test_a_context_is_projected_once(kind: str) -> None:
    layer = build(context_dim=CONTEXT_WIDTH, qk_norm=partial(nn.RMSNorm, eps=1e-6), sinks=True)
    x, context = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, CONTEXT, CONTEXT_WIDTH)
    calls: list[int] = []
    layer.kv_proj.register_forward_hook(lambda *_: calls.append(1))
    mask = mh.KeyPadding(torch.arange(CONTEXT) < torch.tensor([[7], [4]]))
    exact = by_formula(layer, x.double(), context.double(), mask=mask)
    plain = [by_formula(reordered(layer, it), x, context, mask=mask) for it in orders()]
    calls.clear()
    cache = CACHES[kind]()
    with torch.no_grad():
        first = layer(x[:, :3], context, mask=mask, cache=cache)
        rest = [layer(x[:, begin:end], mask=mask, cache=cache) for begin, end in ((3, 4), (4, 13))]
    assert len(calls) == 1
    assert cache.length == CONTEXT
    assert_close(torch.cat((first, *rest), dim=1), exact, worst(exact, plain))


def test_the_context_is_given_until_it_is_cached() -> None:
    layer = build(context_dim=CONTEXT_WIDTH)
    x, context = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, CONTEXT, CONTEXT_WIDTH)
    cache = mh.KVCache()
    with pytest.raises(mh.ArgumentError, match=r"context is missing.* and the cache is empty"):
        layer(x, cache=cache)
    layer(x, context, cache=cache)
    with pytest.raises(mh.ArgumentError, match=r"keys and values of 7 tokens.*cache\.reset\(\)"):
        layer(x, context, cache=cache)
    cache.reset()
    layer(x, context, cache=cache)


def test_a_context_has_no_newest_tokens() -> None:
    """A window would count from the end of another sequence, and drop what is read later."""
    layer = build(context_dim=CONTEXT_WIDTH)
    x, context = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, CONTEXT, CONTEXT_WIDTH)
    for cache in (mh.WindowKVCache(2), SplitKVCache([None, 2])):
        with torch.no_grad(), pytest.raises(mh.ArgumentError, match="Cache it in a KVCache"):
            layer(x, context, cache=cache)


@pytest.mark.parametrize("context_dim", [None, CONTEXT_WIDTH])
def test_a_mask_is_no_context(context_dim: int | None) -> None:
    layer = build(context_dim=context_dim)
    with pytest.raises(mh.DtypeError, match=r"got Causal\. Masks.*layer\(x, mask="):
        layer(torch.randn(BATCH, LENGTH, WIDTH), mh.Causal())


@pytest.mark.parametrize("options", [{}, {"context_dim": CONTEXT_WIDTH}])
def test_what_is_no_cache_is_refused(options: dict[str, object]) -> None:
    layer = build(**options)
    context = torch.randn(BATCH, CONTEXT, CONTEXT_WIDTH) if options else None
    with pytest.raises(mh.DtypeError, match=r"such as multihead\.KVCache\(\); got dict"):
        layer(torch.randn(BATCH, LENGTH, WIDTH), context, cache={})
