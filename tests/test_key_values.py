"""Attention to pages and int8: read in place where queries are few, written out elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import multihead as mh
from cases import CASES, EDGES, Case
from checks import compare
from held import LAYOUTS, in_pages, int8
from multihead.ops.backends import native
from requires import require
from serving import BACKENDS, draw_qkv
from test_same_bits import HELD, use

FEW = [case for case in (*CASES, *EDGES) if 0 < case.query_length < 5]


@pytest.fixture
def _sets() -> Iterator[None]:
    require("native")
    yield
    native.use_instruction_set(None)


def in_place(result: mh.AttentionResult) -> bool:
    return isinstance(result._call["key"], mh.KeyValues)


def run(case: Case, dtype: torch.dtype, kv: mh.KeyValues, **more: object) -> mh.AttentionResult:
    query, _, _ = case.tensors(dtype)
    return mh.attention_with_stats(
        query, kv, stats=mh.STATISTICS, **{**case.options(dtype), **more}
    )


@functools.cache
def defined(case: Case, dtype: torch.dtype, layout: str) -> tuple[mh.AttentionResult, ...]:
    """The definition on the numbers that are held: in float64 and in float32."""
    query, *held = case.tensors(dtype)
    kv = LAYOUTS[layout](*held)
    return tuple(
        mh.attention_with_stats(
            query.to(it), *kv.tensors(it), stats=mh.STATISTICS, backend="reference",
            **case.options(dtype),
        )
        for it in (torch.float64, torch.float32)
    )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("instruction_set", "dtype"), HELD)
@pytest.mark.usefixtures("_sets")
def test_few_queries_read_what_is_held(instruction_set, dtype, layout):
    """Pages give the bits of plain tensors; int8 what the definition makes of its numbers."""
    use(instruction_set, dtype)
    read = 0
    for case in FEW:
        kv = LAYOUTS[layout](*case.tensors(dtype)[1:])
        found = run(case, dtype, kv)
        read += in_place(found)
        if kv.key_scale is not None and in_place(found):
            exact, single = defined(case, dtype, layout)
            # Numbers are not rounded to query's dtype on the way, the output is.
            compare(found, exact, replace(single, out=single.out.to(dtype)))
            continue
        plain = run(case, dtype, mh.KeyValues(*(x.contiguous() for x in kv.tensors(dtype))))
        for name in ("out", *mh.STATISTICS):
            got, want = getattr(found, name), getattr(plain, name)
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), (case.name, name)
    assert read >= (2 if instruction_set == "baseline" else len(FEW) // 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_tokens_reach_nothing(layout):
    """NaN in keys, values and scales that no row sees; seen by one row, they are that row's."""
    require("native")
    query, key, value = draw_qkv((2, 4, 2, 16), (2, 2, 150, 16), 9)
    visible = torch.rand((2, 1, 2, 150), generator=torch.Generator().manual_seed(0)) < 0.6
    hidden = ~visible.any(2)  # [B, 1, Lk]
    expected = mh.attention(query, LAYOUTS[layout](key, value), mask=visible)
    for x in (key, value):
        x.masked_fill_(hidden[..., None], torch.nan)
    assert torch.equal(mh.attention(query, LAYOUTS[layout](key, value), mask=visible), expected)
    one = int((visible[0, 0, 0] & ~visible[0, 0, 1]).nonzero()[0])
    value[0, :, one] = torch.nan
    found = mh.attention(query, LAYOUTS[layout](key, value), mask=visible)
    assert found[0, :, 0].isnan().all()
    assert torch.equal(found[0, :, 1], expected[0, :, 1])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("query_length", [1, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_backend_takes_what_is_held(backend, query_length, layout):
    """Where it is not read in place it is written out; so are the keys of `weights`."""
    if backend == "native":
        require("native")
    query, key, value = draw_qkv((2, 4, query_length, 8), (2, 2, 150, 8), 9)
    kv = LAYOUTS[layout](key, value)
    found = mh.attention_with_stats(query, kv, mask=mh.Causal(), backend=backend)
    keys, values = kv.tensors(torch.float32)
    want = mh.attention_with_stats(query, keys, values, mask=mh.Causal(), backend=backend)
    assert torch.allclose(found.out, want.out, atol=1e-6)
    assert torch.allclose(found.lse, want.lse, atol=1e-6)
    rows, columns = slice(None), [0, 3, 149]
    assert torch.allclose(found.weights(rows, columns), want.weights(rows, columns), atol=1e-6)
    assert in_place(found) == (backend == "native" and query_length == 1)


def test_a_table_of_pages_may_lie_in_any_way():
    query, key, value = draw_qkv((3, 4, 1, 16), (3, 2, 130, 16))
    contiguous = LAYOUTS["pages of 64"](key, value)
    transposed = replace(contiguous, pages=contiguous.pages.mT.contiguous().mT)
    assert transposed.pages.stride() != contiguous.pages.stride()
    assert in_place(mh.attention_with_stats(query, transposed))
    assert torch.equal(mh.attention(query, transposed), mh.attention(query, contiguous))


def test_a_map_of_what_is_held():
    require("native")
    query, key, value = draw_qkv((2, 4, 1, 8), (2, 2, 150, 8), 9)
    kv = int8(key, value)
    found = mh.attention_with_stats(query, kv, bins=5)
    want = mh.attention_with_stats(query, *kv.tensors(torch.float32), bins=5)
    assert torch.allclose(found.map, want.map, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_queries_on_what_is_held(layout):
    query, key, value = draw_qkv((2, 4, 1, 8), (2, 2, 33, 8), 9)
    kv = LAYOUTS[layout](key, value)
    slopes = torch.tensor([0.5, 0.2, 0.1, 0.3])
    leaves = query.clone().requires_grad_(), slopes.clone().requires_grad_()
    others = query.clone().requires_grad_(), slopes.clone().requires_grad_()
    mh.attention(leaves[0], kv, bias=mh.ALiBi(leaves[1])).square().sum().backward()
    keys, values = kv.tensors(torch.float32)
    mh.attention(others[0], keys, values, bias=mh.ALiBi(others[1])).square().sum().backward()
    for leaf, other in zip(leaves, others, strict=True):
        assert torch.allclose(leaf.grad, other.grad, atol=1e-6)
    # A trained bias alone is recorded too.
    out = mh.attention(query, kv, bias=mh.ALiBi(leaves[1]))
    assert out.requires_grad


@pytest.mark.parametrize("layout", ["pages of 20", "int8"])
def test_compiled(layout):
    query, key, value = draw_qkv((2, 4, 1, 8), (2, 2, 33, 8), 9)
    kv = LAYOUTS[layout](key, value)

    @torch.compile(fullgraph=True, backend="eager")
    def call(query: Tensor, kv: mh.KeyValues) -> Tensor:
        return mh.attention(query, kv, mask=mh.Causal())

    assert torch.allclose(call(query, kv), mh.attention(query, kv, mask=mh.Causal()), atol=1e-6)


def test_under_autocast():
    query, key, value = draw_qkv((2, 4, 1, 8), (2, 2, 33, 8), 9)
    for kv in (int8(key, value), in_pages(64)(key, value)):
        with torch.autocast("cpu", torch.bfloat16):
            found = mh.attention(query, kv)
        assert found.dtype == torch.bfloat16
        keys, values = kv.tensors(torch.bfloat16)
        parts = query.bfloat16(), keys.bfloat16(), values.bfloat16()
        assert torch.equal(found, mh.attention(*parts))


def test_watched_calls_are_shown_their_keys():
    from multihead.ops import dispatch

    shown = []

    class Watching:
        def wants(self, problem):
            return ("lse",)

        def record(self, problem, out, stats):
            shown.append(problem.key)

    query, key, value = draw_qkv((2, 4, 1, 8), (2, 2, 33, 8), 9)
    token = dispatch.observer.set(Watching())
    try:
        mh.attention(query, in_pages(20)(key, value))
    finally:
        dispatch.observer.reset(token)
    assert torch.equal(shown[0], key)


def test_what_does_not_fit_the_query_is_refused():
    query, key, value = draw_qkv((2, 4, 1, 8), (2, 2, 33, 8), 9)
    for layout in LAYOUTS.values():
        kv = layout(key, value)
        with pytest.raises(mh.ArgumentError, match="differ in batch"):
            mh.attention(query[:1], kv)
        with pytest.raises(mh.ArgumentError, match="differ in head width"):
            mh.attention(query[..., :7], kv)
        with pytest.raises(mh.ArgumentError, match="share 2 KV heads"):
            mh.attention(query[:, :3], kv)
        with pytest.raises(mh.ArgumentError, match="four dimensions"):
            mh.attention(query[0], kv)
        with pytest.raises(mh.MaskError, match="covers 32"):
            mh.attention(query, kv, mask=mh.KeyPadding(torch.ones(2, 32, dtype=torch.bool)))
    with pytest.raises(mh.DtypeError, match="must share one dtype"):
        mh.attention(query.bfloat16(), in_pages(64)(key, value))
