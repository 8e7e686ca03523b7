"""Step by step from a cache is the whole at once: under every mask, by single tokens and chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import multihead as mh
from close import assert_close
from multihead.nn.cache.quantized import quantize
from serving import draw_qkv

BATCH, KV_HEADS, TOTAL, WIDTH, VALUE_WIDTH = 2, 2, 23, 5, 7
STEPS = (6, 1, 1, 4, 1, 2, 5, 1, 1, 1)  # of which the window of 4 sees all but the first roll


@dataclass(frozen=True)
class Kind:
    """A cache, what it adds to the mask, and how many tokens each row of the first step has."""

    make: Callable[[torch.dtype], mh.Cache]
    hides: mh.Mask | None = None
    first: tuple[int, int] = (6, 6)
    rounds: bool = False


def static(dtype: torch.dtype) -> mh.Cache:
    return mh.StaticKVCache(BATCH, KV_HEADS, TOTAL + 3, WIDTH, VALUE_WIDTH, dtype=dtype)


def paged(dtype: torch.dtype) -> mh.Cache:
    return mh.PagedKVCache(BATCH, KV_HEADS, WIDTH, VALUE_WIDTH, page_size=4, dtype=dtype)


KINDS = {
    "growing": Kind(lambda _: mh.KVCache()),
    "static": Kind(static),
    "static, ragged": Kind(static, first=(6, 2)),
    "window": Kind(lambda _: mh.WindowKVCache(4), hides=mh.Window(3, None)),
    "window with first": Kind(
        lambda _: mh.WindowKVCache(4, keep_first=2), hides=mh.Window(3, None, keep_first=2)
    ),
    "paged": Kind(paged),
    "paged, ragged": Kind(paged, first=(5, 6)),
    "int8": Kind(lambda _: mh.QuantizedKVCache(), rounds=True),
}
RULES = [
    "nothing", "causal", "window", "sliding", "left padding", "inner padding", "documents",
    "dense", "bias", "alibi", "prefix",
]  # fmt: skip

_COLUMNS = torch.arange(TOTAL)
_LEFT_PADDED = torch.tensor([[2], [0]]) <= _COLUMNS
_INNER_PADDED = (_COLUMNS + torch.tensor([[0], [1]])) % 5 != 3
_IDS = _COLUMNS // torch.tensor([[4], [7]])
_DENSE = torch.rand((BATCH, 1, TOTAL, TOTAL), generator=torch.Generator().manual_seed(3)) < 0.7
_BIAS = torch.randn((BATCH, 1, TOTAL, TOTAL), generator=torch.Generator().manual_seed(4))

# The batch row, and its tokens of this step.
Span = tuple[int, int, int]


def rule(name: str, heads: int, spans: list[Span], columns: int) -> dict[str, object]:
    """Mask and bias of the call of these rows, whose keys are the first `columns` tokens."""
    rows = [row for row, _, _ in spans]

    def block(x: Tensor) -> Tensor:
        return torch.stack([x[row, :, begin:end, :columns] for row, begin, end in spans])

    ids = torch.stack([_IDS[row, begin:end] for row, begin, end in spans])
    match name:
        case "nothing":
            return {}
        case "causal":
            return {"mask": mh.Causal()}
        case "window":
            return {"mask": mh.Window(5, None, keep_first=1)}
        case "sliding":
            return {"mask": mh.SlidingWindow(3)}
        case "left padding":
            return {"mask": mh.Causal() & mh.KeyPadding(_LEFT_PADDED[rows, :columns])}
        case "inner padding":
            return {"mask": mh.KeyPadding(_INNER_PADDED[rows, :columns]) & mh.Causal()}
        case "documents":
            return {"mask": mh.Causal() & mh.Documents(ids, _IDS[rows, :columns])}
        case "dense":
            return {"mask": block(_DENSE)}
        case "bias":
            return {"mask": mh.Causal(), "bias": block(_BIAS)}
        case "alibi":
            return {"mask": mh.Causal(), "bias": mh.ALiBi(torch.linspace(0.1, 1.0, heads))}
        case "prefix":
            return {"mask": mh.PrefixCausal(3)}
    raise ValueError(name)


def decode(kind: Kind, name: str, tensors: tuple[Tensor, ...]) -> list[tuple[Span, Tensor]]:
    """The output of each row and step."""
    query, key, value = tensors
    cache, found = kind.make(query.dtype), []
    lengths = [0] * BATCH
    for n, length in enumerate(STEPS):
        counts = list(kind.first) if n == 0 else [length] * BATCH
        most = max(counts)
        spans = [(row, lengths[row], lengths[row] + most) for row in range(BATCH)]

        def step(x: Tensor, spans: list[Span] = spans) -> Tensor:
            return torch.stack([x[row, :, begin:end] for row, begin, end in spans])

        if counts[0] == counts[1]:
            kv = cache.update(step(key), step(value))
        else:
            assert isinstance(cache, mh.StaticKVCache | mh.PagedKVCache)
            kv = cache.update(step(key), step(value), query_lengths=torch.tensor(counts))
        lengths = [a + b for a, b in zip(lengths, counts, strict=True)]
        options = rule(name, query.shape[1], spans, max(lengths))
        out = mh.attention(step(query), kv, **options)
        for row, count in enumerate(counts):
            span = row, lengths[row] - count, lengths[row]
            found.append((span, out[row : row + 1, :, :count]))
    return found


def alone(
    kind: Kind, name: str, span: Span, tensors: tuple[Tensor, ...], dtype: torch.dtype
) -> Tensor:
    """A row's step by itself, from all of its tokens at once, by the definition."""
    row, begin, end = span
    query, key, value = (x[row : row + 1].to(dtype) for x in tensors)
    options = rule(name, query.shape[1], [span], end)
    mask = options.pop("mask", None)
    if isinstance(mask, Tensor):
        mask = mh.Dense(mask)
    if kind.hides is not None:
        mask = kind.hides if mask is None else mask & kind.hides
    return mh.attention(
        query[:, :, begin:end], key[:, :, :end], value[:, :, :end],
        mask=mask, backend="reference", **options,
    )  # fmt: skip


def as_kept(numbers: Tensor) -> Tensor:
    """What int8 keeps of these numbers."""
    elements, scale = quantize(numbers)
    return elements * scale[..., None].double()


# What is kept of a left-padded row's first tokens is padding, as the class says.
PAIRS = [
    (kind, name)
    for kind, name in itertools.product(KINDS, RULES)
    if not (kind == "window with first" and name in ("left padding", "window"))
]


# Dtypes and query heads, on two KV heads.
CALLS = [(torch.float32, 4), (torch.bfloat16, 2), (torch.float32, 2), (torch.float16, 6)]


@pytest.mark.parametrize(
    ("kind", "name", "call"),
    [(*pair, call) for pair, call in zip(PAIRS, itertools.cycle(CALLS), strict=False)],
)
def test_steps_are_the_whole(kind, name, call):
    check(kind, name, *call)


@pytest.mark.proof
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_all_steps_are_the_whole(kind, name, call):
    check(kind, name, *call)


def check(kind: str, name: str, dtype: torch.dtype, heads: int) -> None:
    """All steps of both rows against each row's by itself, in float64."""
    it = KINDS[kind]
    tensors = draw_qkv(
        (BATCH, heads, TOTAL, WIDTH), (BATCH, KV_HEADS, TOTAL, WIDTH), VALUE_WIDTH, dtype=dtype
    )
    steps = decode(it, name, tensors)
    held = (tensors[0], *map(as_kept, tensors[1:])) if it.rounds else tensors
    parts = {
        wanted: [alone(it, name, span, held, wanted) for span, _ in steps]
        for wanted in (torch.float64, dtype)
    }

    def flat(rows: list[Tensor]) -> Tensor:
        return torch.cat([x.flatten() for x in rows])

    found = flat([out for _, out in steps])
    assert found.dtype == dtype
    assert_close(found, flat(parts[torch.float64]), flat(parts[dtype]), what=f"{kind}, {name}")


def test_a_window_keeps_the_first_columns_of_padded_rows_in_every_call():
    """By single tokens, in chunks and at once: also where padding hides what is kept."""
    query, key, value = draw_qkv((2, 4, 9, 5), (2, 2, 9, 5))
    visible, outs = torch.tensor([[3], [0]]) <= torch.arange(9), []
    for cuts in ((0, 9), range(10), (0, 4, 9), (0, 7, 8, 9)):
        cache, parts = mh.WindowKVCache(3, keep_first=2), []
        for begin, end in itertools.pairwise(cuts):
            kv = cache.update(key[:, :, begin:end], value[:, :, begin:end])
            mask = mh.Causal() & mh.KeyPadding(visible[:, :end])
            parts.append(mh.attention(query[:, :, begin:end], kv, mask=mask))
        outs.append(torch.cat(parts, dim=2))
    sees = mh.Causal() & mh.Dense(visible[:, None, None]) & mh.Window(2, 0, keep_first=2)
    exact, plain = (
        mh.attention(
            query.to(dtype), key.to(dtype), value.to(dtype), mask=sees, backend="reference"
        )
        for dtype in (torch.float64, torch.float32)
    )
    for out in outs:
        assert_close(out, exact, plain)


def test_a_window_takes_masks_for_all_tokens():
    query, key, value = draw_qkv((1, 2, 9, 5), (1, 2, 9, 5))
    cache = mh.WindowKVCache(4)
    cache.update(key, value)
    kv = cache.update(key[:, :, :1], value[:, :, :1])
    assert kv.key.shape[2] == 4
    mh.attention(query[:, :, :1], kv, mask=mh.KeyPadding(torch.ones(1, 10, dtype=torch.bool)))
    for mask in (
        mh.KeyPadding(torch.ones(1, 4, dtype=torch.bool)),
        mh.Documents(torch.zeros(1, dtype=torch.int64), torch.zeros(9, dtype=torch.int64)),
        torch.ones(1, 11, dtype=torch.bool),
    ):
        with pytest.raises(mh.MaskError, match="10 tokens came"):
            mh.attention(query[:, :, :1], kv, mask=mask)


def test_a_window_goes_back_one_token_and_no_further():
    cache = mh.WindowKVCache(4, keep_first=1)
    cache.update(*(torch.ones(1, 1, 9, 2) for _ in range(2)))
    cache.crop(-1)
    with pytest.raises(mh.ArgumentError, match="token 7 would see tokens from 4 on"):
        cache.crop(-1)
    assert cache.length == 8
    cache.crop(1)
    assert cache.length == 1


# --- torch.compile -------------------------------------------------------------------------------


@pytest.mark.parametrize("ragged", [False, True])
def test_decoding_from_a_static_cache_is_one_graph(ragged):
    query, key, value = draw_qkv((2, 4, 12, 5), (2, 2, 12, 5), 7)
    caches = [mh.StaticKVCache(2, 2, 16, 5, 7) for _ in range(2)]
    for cache in caches:
        first = torch.tensor([4, 2]) if ragged else None
        cache.update(key[:, :, :4], value[:, :, :4], query_lengths=first)
    counter = CompileCounter()

    @torch.compile(fullgraph=True, backend=counter)
    def step(query: Tensor, key: Tensor, value: Tensor, cache: mh.StaticKVCache) -> Tensor:
        return mh.attention(query, cache.update(key, value), mask=mh.Causal())

    for i in range(4, 9):
        parts = [x[:, :, i : i + 1] for x in (query, key, value)]
        expected = mh.attention(parts[0], caches[1].update(*parts[1:]), mask=mh.Causal())
        assert torch.allclose(step(*parts, caches[0]), expected, atol=1e-6)
        assert torch.equal(caches[0].lengths, caches[1].lengths)
    assert counter.frame_count == 1
    assert caches[0].length == 9  # and eager steps go on from there
    caches[0].update(*parts[1:])
    assert caches[0].length == 10


def test_a_ragged_prompt_in_a_graph():
    query, key, value = draw_qkv((2, 4, 5, 5), (2, 2, 5, 5), 7)
    caches = [mh.StaticKVCache(2, 2, 8, 5, 7) for _ in range(2)]

    @torch.compile(fullgraph=True, backend="eager")
    def step(cache: mh.StaticKVCache, counts: Tensor) -> Tensor:
        return mh.attention(query, cache.update(key, value, query_lengths=counts))

    counts = torch.tensor([5, 2])
    found = step(caches[0], counts)
    expected = mh.attention(query, caches[1].update(key, value, query_lengths=counts))
    assert torch.allclose(found, expected, atol=1e-6)
    assert caches[0].lengths.tolist() == [5, 2]


def test_a_growing_cache_in_a_graph():
    query, key, value = draw_qkv((2, 4, 9, 5), (2, 2, 9, 5), 7)
    caches = [mh.KVCache() for _ in range(2)]

    counter = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def step(query: Tensor, key: Tensor, value: Tensor, cache: mh.KVCache) -> Tensor:
        return mh.attention(query, cache.update(key, value), mask=mh.Causal())

    for begin, end in ((0, 4), (4, 5), (5, 6), (6, 7)):
        parts = [x[:, :, begin:end] for x in (query, key, value)]
        expected = mh.attention(parts[0], caches[1].update(*parts[1:]), mask=mh.Causal())
        assert torch.allclose(step(*parts, caches[0]), expected, atol=1e-6)
    assert counter.frame_count == 3  # an empty cache, the first step, and every later length
