"""Latent attention: two forms of one function, and a cache of latents alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy, deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import multihead as mh
from close import assert_close, float64_baseline
from multihead.nn.latent import Form

SIZES: dict[str, Any] = dict(latent_dim=10, nope_dim=8, rope_dim=4, value_dim=6)
ENTRY = 14
BOUND = {torch.float32: 1e-5, torch.float64: 1e-10}
FORMS: tuple[Form, ...] = ("materialized", "absorbed")
Caches = {
    "growing": lambda: mh.LatentKVCache(10),
    "static": lambda: mh.LatentKVCache(10, mh.StaticKVCache(2, 1, 16, ENTRY, 0)),
    "paged": lambda: mh.LatentKVCache(10, mh.PagedKVCache(2, 1, ENTRY, 0, page_size=3)),
}


def layer(dtype: torch.dtype = torch.float32, **options: Any) -> mh.LatentAttention:
    made = mh.LatentAttention(32, 2, **SIZES | options).to(dtype)
    for norm in made.modules():
        if isinstance(norm, nn.RMSNorm):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
    return made


def inputs(dtype: torch.dtype = torch.float32, length: int = 7) -> Tensor:
    return torch.randn(2, length, 32, dtype=torch.float64).to(dtype)


def definition(it: mh.LatentAttention, x: Tensor, mask: mh.Mask) -> Tensor:
    """The paper's formulas, head by head, with torch's own operations."""
    heads, n, r, v, c = it.num_heads, it.nope_dim, it.rope_dim, it.value_dim, it.latent_dim
    if it.query_latent_dim is None:
        query = it.q_proj(x)
    else:
        query = it.q_up_proj(it.q_norm(it.q_down_proj(x)))
    down = it.kv_down_proj(x)
    latent = it.kv_norm(down[..., :c])
    rotation = it.rope.rotation(torch.arange(x.shape[1]), r)
    key_rope = rotation.apply(down[:, None, :, c:])[:, 0]
    up = it.kv_up_proj(latent)
    hidden = ~mask.to_dense(x.shape[1], x.shape[1])
    hidden = hidden.expand(x.shape[0], 1, *hidden.shape[-2:])[:, 0]
    out = []
    for h in range(heads):
        head = query[..., h * (n + r) : (h + 1) * (n + r)]
        query_rope = rotation.apply(head[:, None, :, n:])[:, 0]
        part = up[..., h * (n + v) : (h + 1) * (n + v)]
        scores = head[..., :n] @ part[..., :n].mT + query_rope @ key_rope.mT
        weights = (scores * it.scale).masked_fill(hidden, -math.inf).softmax(-1)
        out.append(weights @ part[..., n:])
    return it.out_proj(torch.cat(out, dim=-1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("query_latent_dim", [None, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_definition(dtype: torch.dtype, query_latent_dim: int | None, form: Form) -> None:
    it = layer(query_latent_dim=query_latent_dim, latent_bias=True, out_bias=True)
    exact = deepcopy(it).double()
    x = inputs()
    mask = mh.Causal()
    want = definition(exact, x.double(), mask)
    plain = definition(it, x, mask)
    if dtype == torch.float64:
        got = exact(x.double(), mask=mask, form=form)
        plain = float64_baseline(want, plain)
    else:
        got = it(x, mask=mask, form=form)
    assert_close(got, want, plain, what=form)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_forms_are_one_function(dtype: torch.dtype, bias: bool) -> None:
    """Values and every gradient."""
    it = layer(dtype, query_latent_dim=12, latent_bias=bias, out_bias=bias)
    x = inputs(dtype)
    mask = mh.Causal() & mh.KeyPadding(torch.tensor([[False] * 2 + [True] * 5, [True] * 7]))
    weight = torch.randn(2, 7, 32, dtype=dtype)
    found = []
    for form in FORMS:
        leaf = x.clone().requires_grad_()
        out = it(leaf, mask=mask, form=form)
        grads = torch.autograd.grad((out * weight).sum(), (leaf, *it.parameters()))
        found.append((out, *grads))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=BOUND[dtype])


@pytest.mark.parametrize("cache", Caches)
@pytest.mark.parametrize("form", [None, *FORMS])
@torch.no_grad()
def test_decoding_equals_the_whole(form: Form | None, cache: str) -> None:
    it, x = layer(), inputs()
    whole = it(x, mask=mh.Causal())
    held = Caches[cache]()
    steps = [it(x[:, :4], mask=mh.Causal(), cache=held, form=form)]
    steps += [it(x[:, i : i + 1], mask=mh.Causal(), cache=held, form=form) for i in (4, 5, 6)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-5)
    assert held.length == 7


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_chunks_equal_the_whole(form: Form) -> None:
    it, x = layer(torch.float64), inputs(torch.float64, 11)
    whole = it(x, mask=mh.Causal())
    for chunks in ((3, 8), (1, 1, 9), (5, 5, 1)):
        cache = mh.LatentKVCache(10)
        parts = [it(part, mask=mh.Causal(), cache=cache, form=form) for part in x.split(chunks, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-10)


def test_gradients_through_a_cache() -> None:
    it, x = layer(torch.float64), inputs(torch.float64)
    weight = torch.randn(2, 7, 32, dtype=torch.float64)

    def grads(run: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad((run(leaf) * weight).sum(), (leaf, *it.parameters()))

    def chunked(leaf: Tensor, form: str) -> Tensor:
        cache = mh.LatentKVCache(10)
        step = partial(it, mask=mh.Causal(), cache=cache, form=form)
        return torch.cat([step(part) for part in leaf.split((4, 3), 1)], 1)

    want = grads(lambda leaf: it(leaf, mask=mh.Causal()))
    for form in FORMS:
        for one, other in zip(grads(partial(chunked, form=form)), want, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@torch.no_grad()
def test_left_padding_is_the_prompt_alone() -> None:
    it = layer(torch.float64)
    short, long = inputs(torch.float64, 3)[:1], inputs(torch.float64, 5)[:1]
    padded = torch.cat((torch.full((1, 2, 32), 1e3, dtype=torch.float64), short), 1)
    visible = torch.tensor([[False, False, True, True, True, True], [True] * 6])
    positions = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    token = inputs(torch.float64, 1)
    for form in FORMS:
        cache = mh.LatentKVCache(10)
        step = partial(it, cache=cache, form=form)
        mask = mh.Causal() & mh.KeyPadding(visible[:, :5])
        first = step(torch.cat((padded, long)), mask=mask, positions=positions[:, :5])
        mask = mh.Causal() & mh.KeyPadding(visible)
        second = step(token, mask=mask, positions=positions[:, 5:])
        for row, prompt in ((0, short), (1, long)):
            alone = it(torch.cat((prompt, token[row : row + 1]), 1), mask=mh.Causal())
            got = torch.cat((first[row, 5 - prompt.shape[1] :], second[row]))
            torch.testing.assert_close(got, alone[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["static", "paged"])
@torch.no_grad()
def test_rows_of_different_length(kind: str) -> None:
    it, token = layer(), inputs(length=1)
    prompts = [inputs(length=4)[:1], inputs(length=2)[:1]]
    caches = [Caches[kind]() for _ in FORMS]
    right = torch.cat((prompts[0], nn.functional.pad(prompts[1], (0, 0, 0, 2), value=9.0)))
    for cache, form in zip(caches, FORMS, strict=True):
        entry = it._entries(right, None, it.rope.rotation(torch.arange(4), 4)).key
        cache.update(entry[..., 10:], entry[..., :10], torch.tensor([4, 2]))
        assert cache.lengths is not None
        assert cache.lengths.tolist() == [4, 2]
        assert cache.positions(1).tolist() == [[4], [2]]
        got = it(token, mask=mh.Causal(), cache=cache, form=form)
        for row, prompt in enumerate(prompts):
            alone = it(torch.cat((prompt, token[row : row + 1]), 1), mask=mh.Causal())[0, -1]
            torch.testing.assert_close(got[row, 0], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_rolling_cache_underneath(form: Form) -> None:
    it, x = layer(torch.float64), inputs(torch.float64, 11)
    want = it(x, mask=mh.SlidingWindow(4))
    cache = mh.LatentKVCache(10, mh.WindowKVCache(4))
    parts = [
        it(part, mask=mh.Causal(), cache=cache, form=form) for part in x.split((3, 1, 2, 4, 1), 1)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=0, atol=1e-10)
    assert cache.nbytes < 2 * 11 * ENTRY * 8


@torch.no_grad()
def test_the_cache_holds_latents_alone() -> None:
    cache = mh.LatentKVCache(10, mh.StaticKVCache(2, 1, 16, ENTRY, 0))
    layer()(inputs(), mask=mh.Causal(), cache=cache)
    lengths = 2 * 4
    assert cache.nbytes == 2 * 16 * ENTRY * 4 + lengths
    assert cache.filled_nbytes == 2 * 7 * ENTRY * 4 + lengths
    growing = mh.LatentKVCache(10)
    layer()(inputs(), mask=mh.Causal(), cache=growing)
    assert growing.filled_nbytes == 2 * 7 * ENTRY * 4
    kv = growing.update(torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 10))
    assert kv.key.shape == (2, 1, 8, ENTRY)
    assert kv.value.shape == (2, 1, 8, 10)
    assert kv.value.data_ptr() == kv.key.data_ptr()


@pytest.mark.parametrize("cache", Caches)
@torch.no_grad()
def test_cache_operations(cache: str) -> None:
    it, x = layer(), inputs()
    step = partial(it, mask=mh.Causal())
    want = step(x)[:, 5:6]
    held = Caches[cache]()
    step(x[:, :5], cache=held)
    fork = held.fork()
    step(x[:, 6:], cache=fork)
    step(x[:, 6:], cache=copy(held))
    assert (held.length, fork.length) == (5, 6)
    torch.testing.assert_close(step(x[:, 5:6], cache=held), want, rtol=0, atol=1e-5)
    fork.crop(5)
    fork.reorder([1, 0])
    got = step(x[:, 5:6].flip(0), cache=fork)
    torch.testing.assert_close(got, want.flip(0), rtol=0, atol=1e-5)
    held.reset()
    assert held.length == 0
    assert held.positions(2).tolist() == [0, 1]
    torch.testing.assert_close(step(x[:, :3], cache=held), step(x[:, :3]), rtol=0, atol=1e-5)


def test_scale() -> None:
    assert layer().scale == 1 / math.sqrt(12)
    assert layer(scale=0.5).scale == 0.5
    yarn = mh.YaRNScaling(40.0, 64, mscale=1.0, mscale_all_dim=0.7)
    scaled = layer(rope=mh.RoPE(interleaved=True, scaling=yarn))
    assert scaled.scale == pytest.approx((0.1 * 0.7 * math.log(40) + 1) ** 2 / math.sqrt(12))
    plain = layer(rope=mh.RoPE(scaling=mh.YaRNScaling(40.0, 64)))
    assert plain.scale == 1 / math.sqrt(12)


@pytest.mark.parametrize("sizes", [(32, 10, 8, 4, 6, None), (40, 12, 5, 2, 7, 9)])
def test_number_of_weights(sizes: tuple[int, ...]) -> None:
    width, c, n, r, v, q = sizes
    it = mh.LatentAttention(
        width, 3, latent_dim=c, nope_dim=n, rope_dim=r, value_dim=v, query_latent_dim=q
    )
    queries = width * 3 * (n + r) if q is None else width * q + q + q * 3 * (n + r)
    rest = width * (c + r) + c + c * 3 * (n + v) + 3 * v * width
    assert sum(p.numel() for p in it.parameters()) == queries + rest


def test_the_cheaper_form_is_that_of_fewer_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    it = layer(latent_dim=10)
    for queries, keys in ((1, 9), (2, 40), (3, 40), (9, 40), (7, 7), (1, 1)):
        flops = {}
        for form in FORMS:
            cache = mh.LatentKVCache(10)
            with torch.no_grad():
                if keys > queries:
                    it(inputs(length=keys - queries), cache=cache)
                # Attention by its definition, whose products torch counts as well.
                counter = FlopCounterMode(display=False)
                with counter:
                    query, kv, _ = it._project(inputs(length=queries), cache, None, form)
                    weights = (query @ kv.key.mT.expand(-1, 2, -1, -1)).softmax(-1)
                    it._join(weights @ kv.value.expand(-1, 2, -1, -1), form)
            flops[form] = counter.get_total_flops()
        best = min(FORMS, key=lambda form: flops[form])
        assert it.cheaper_form(queries, keys) == best, (queries, keys, flops)


def test_deepseek_decodes_absorbed_and_reads_prompts_materialized() -> None:
    with torch.device("meta"):
        it = mh.LatentAttention(
            7168, 128, latent_dim=512, nope_dim=128, rope_dim=64, value_dim=128,
            query_latent_dim=1536,
        )  # fmt: skip
    assert it.cheaper_form(1, 4096) == "absorbed"
    assert it.cheaper_form(160, 4096) == "absorbed"
    assert it.cheaper_form(200, 4096) == "materialized"
    assert it.cheaper_form(4096, 4096) == "materialized"
    assert it.cheaper_form(1, 1) == "materialized"


@torch.no_grad()
def test_an_adapter_is_not_passed_by() -> None:
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.more = base, nn.Linear(base.in_features, base.out_features, bias=False)
            self.weight = base.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.more(x)  # type: ignore[no-any-return]

    it, x = layer(), inputs()
    it.kv_up_proj = Adapter(it.kv_up_proj)  # type: ignore[assignment]
    whole = it(x, mask=mh.Causal())
    cache = mh.LatentKVCache(10)
    parts = [it(part, mask=mh.Causal(), cache=cache) for part in x.split((6, 1), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)
    with pytest.raises(mh.ArgumentError, match="Adapter"):
        it(x, form="absorbed")


@torch.no_grad()
def test_a_forward_in_the_place_of_the_layers_own_is_not_passed_by() -> None:
    it, x = layer(), inputs()
    weight = it.kv_up_proj.weight
    it.kv_up_proj.forward = lambda latent: 2 * nn.functional.linear(latent, weight)  # type: ignore[method-assign]
    whole = it(x, mask=mh.Causal())
    cache = mh.LatentKVCache(10)
    parts = [it(part, mask=mh.Causal(), cache=cache) for part in x.split((6, 1), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)
    with pytest.raises(mh.ArgumentError, match="pass by"):
        it(x, form="absorbed")


def test_the_rotation_of_another_rope_is_refused() -> None:
    it, x = layer(), inputs()
    rotation = mh.RoPE().rotation(torch.arange(x.shape[1]), it.rope_dim)
    with pytest.raises(mh.ArgumentError, match="interleaved=False"):
        it(x, positions=rotation)


@torch.no_grad()
def test_hooks_fire_in_either_case() -> None:
    it, x = layer(), inputs()
    seen = []
    it.kv_up_proj.register_forward_hook(lambda *_: seen.append(1))
    cache = mh.LatentKVCache(10)
    for part in x.split((6, 1), 1):
        it(part, mask=mh.Causal(), cache=cache)
    assert len(seen) == 2


@torch.no_grad()
def test_pruned_weights_are_read_as_pruned() -> None:
    from torch.nn.utils import prune

    it, x = layer(), inputs()
    prune.random_unstructured(it.kv_up_proj, "weight", amount=0.5)
    whole = it(x, mask=mh.Causal())
    cache = mh.LatentKVCache(10)
    parts = [it(part, mask=mh.Causal(), cache=cache) for part in x.split((6, 1), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_statistics_of_either_form_agree() -> None:
    it, x = layer(torch.float64), inputs(torch.float64)
    found = [it.forward_with_stats(x, mask=mh.Causal(), form=form) for form in FORMS]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-10)
    for name in ("lse", "entropy", "max_logit"):
        one, other = (getattr(result, name) for _, result in found)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    maps = [result.weights(slice(None), slice(None)) for _, result in found]
    torch.testing.assert_close(*maps, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision(dtype: torch.dtype) -> None:
    it = layer(query_latent_dim=12).to(dtype)
    exact, x = deepcopy(it).double(), inputs(dtype)
    want = definition(exact, x.double(), mh.Causal())
    plain = definition(it, x, mh.Causal())
    for form in FORMS:
        got = it(x, mask=mh.Causal(), form=form)
        assert got.dtype == dtype
        assert_close(got, want, plain, what=form)


def test_norms_may_stay_in_float32() -> None:
    it = layer(query_latent_dim=12).bfloat16()
    it.q_norm.float()
    it.kv_norm.float()
    for form in FORMS:
        assert it(inputs(torch.bfloat16), form=form).dtype == torch.bfloat16


@torch.no_grad()
def test_a_shared_rotation() -> None:
    it, x = layer(), inputs()
    positions = torch.arange(7) + 3
    rotation = it.rope.rotation(positions, 4)
    assert torch.equal(it(x, positions=rotation), it(x, positions=positions))


@torch.no_grad()
def test_compile_at_changing_lengths() -> None:
    torch._dynamo.reset()
    it, graphs = layer(), CompileCounter()
    run = torch.compile(partial(it, mask=mh.Causal()), fullgraph=True, dynamic=True, backend=graphs)
    for length in (5, 7, 29):
        x = inputs(length=length)
        torch.testing.assert_close(run(x), it(x, mask=mh.Causal()))
    assert graphs.frame_count == 1


def test_copies_keep_the_layer() -> None:
    it = layer(query_latent_dim=12)
    other = layer(query_latent_dim=12)
    other.load_state_dict(it.state_dict())
    x = inputs()
    assert torch.equal(it(x), other(x))
    assert torch.equal(deepcopy(it)(x), it(x))
    assert "latent_dim=10" in repr(it)


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: layer(rope_dim=3), ValueError, "head_dim must be even"),
    (lambda: layer(latent_dim=0), ValueError, "latent_dim must be at least 1"),
    (lambda: layer(query_latent_dim=1.5), TypeError, "query_latent_dim must be an integer"),
    (lambda: layer(scale=math.inf), ValueError, "scale must be finite"),
    (lambda: layer(rope="half"), TypeError, "rope must be a RoPE"),
    (lambda: layer()(torch.ones(2, 3, 31)), ValueError, "embed_dim=32"),
    (lambda: layer()(inputs(), cache=mh.KVCache()), TypeError, "LatentKVCache"),
    (lambda: layer()(inputs(), cache=mh.LatentKVCache(9)), ValueError, "latent_dim=10"),
    (lambda: layer()(inputs(), form="both"), ValueError, "'absorbed'"),
    (lambda: layer()(inputs(), positions=torch.arange(6)), ValueError, "one number a token"),
    (lambda: mh.LatentKVCache(10, mh.QuantizedKVCache()), ValueError, "QuantizedKVCache"),
    (
        lambda: mh.LatentKVCache(3).update(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 4)),
        ValueError,
        r"latents must be \[B, 1, L, 3\]",
    ),
    (
        lambda: mh.LatentKVCache(3).update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 2, 3)),
        ValueError,
        "rotated keys must be",
    ),
    (lambda: mh.LatentAttention.from_deepseek({}, {}), ValueError, "'hidden_size'"),
]


@pytest.mark.parametrize(("call", "kind", "words"), WRONG, ids=range(len(WRONG)))
def test_refused(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        call()
    assert isinstance(caught.value, mh.MultiheadError)
