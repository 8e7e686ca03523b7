"""A cache whose heads look back differently far: what is dropped is what nobody sees."""

import copy

import pytest
import torch

import multihead as mh
from close import assert_close
from multihead.nn import SplitKVCache
from multihead.ops.split_key_values import UNBOUNDED

B, H, G, D, DV = 2, 6, 3, 10, 7
WINDOWS = {
    "mixed": (5, None, 5),
    "one": (None, 4, None),
    "two kinds": (3, 6, None),
    "none": (None, None, None),
    "all": (5, 5, 5),
}


def lefts(windows: tuple, keep_first: int) -> mh.Window:
    left = torch.tensor([UNBOUNDED if it is None else it - 1 for it in windows])
    return mh.Window(left.repeat_interleave(H // G), 0, keep_first)


def drawn(length: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = (B, H, length, D), (B, G, length, D), (B, G, length, DV)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("steps", [(29,), (1,) * 29, (11, 1, 1, 7, 1, 1, 1, 6), (4, 25)])
@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("keep_first", [0, 2])
def test_attention_sees_what_the_windows_let_in(kind: str, keep_first: int, steps: tuple) -> None:
    query, key, value = drawn(29, torch.float32)
    visible = torch.ones(B, 29, dtype=torch.bool)
    visible[1, 12:15] = False
    bias, sinks = torch.randn(1, H, 29, 29), torch.randn(H)
    cache = SplitKVCache(WINDOWS[kind], keep_first)
    outputs, begin = [], 0
    for count in steps:
        end = begin + count
        new = slice(begin, end)
        held = cache.update(key[:, :, new], value[:, :, new])
        outputs.append(
            mh.attention(
                query[:, :, new],
                held,
                mask=mh.Causal() & mh.KeyPadding(visible[:, :end]),
                bias=bias[:, :, new, :end],
                sinks=sinks,
                scale=0.7,
                softcap=4.0,
            )
        )
        begin = end
    assert cache.length == 29

    def whole(dtype: torch.dtype) -> torch.Tensor:
        return mh.attention(
            *(x.to(dtype) for x in (query, key, value)),
            mask=lefts(WINDOWS[kind], keep_first) & mh.KeyPadding(visible),
            bias=bias.to(dtype),
            sinks=sinks.to(dtype),
            scale=0.7,
            softcap=4.0,
            backend="reference",
        )

    got = torch.cat(outputs, 2)
    assert_close(got, whole(torch.float64), whole(torch.float32))


def test_masks_of_single_heads_go_with_their_heads() -> None:
    query, key, value = drawn(9, torch.float64)
    dense = torch.rand(1, H, 9, 9) > 0.3
    slopes = torch.rand(H, dtype=torch.float64)
    held = SplitKVCache((4, None, 4)).update(key, value)
    mask, bias = mh.Causal() & mh.Dense(dense), mh.ALiBi(slopes)
    got = mh.attention(query, held, mask=mask, bias=bias)
    want = mh.attention(query, key, value, mask=mask & lefts((4, None, 4), 0), bias=bias)
    assert torch.allclose(got, want, atol=1e-12)


def test_query_heads_of_one_kv_head_may_see_differently_far() -> None:
    query, key, value = drawn(21, torch.float64)
    mask = mh.Window(torch.tensor([2, 3, UNBOUNDED, 3, UNBOUNDED, UNBOUNDED]), 0, 1)
    cache = SplitKVCache((4, None, None), 1)  # what the farthest head of each group sees
    parts = []
    for place in range(21):
        new = slice(place, place + 1)
        held = cache.update(key[:, :, new], value[:, :, new])
        parts.append(mh.attention(query[:, :, new], held, mask=mask))
    want = mh.attention(query, key, value, mask=mask)
    assert torch.allclose(torch.cat(parts, 2), want, atol=1e-12)


def test_memory_is_of_what_heads_see() -> None:
    _, key, value = drawn(200, torch.float32)
    cache, whole = SplitKVCache((5, None, 5), 2), mh.KVCache()
    cache.update(key, value)
    whole.update(key, value)
    token = B * (D + DV) * 4
    assert whole.filled_nbytes == 200 * G * token
    columns = 7 * 4  # which token each slot holds
    assert cache.filled_nbytes == 200 * token + 7 * 2 * token + columns
    assert cache.nbytes < 0.45 * whole.nbytes


def test_crop_fork_reorder_reset() -> None:
    query, key, value = drawn(12, torch.float64)
    mask = lefts((3, None, 3), 1)

    def at(cache: SplitKVCache, place: int, rows: list[int] | None = None) -> torch.Tensor:
        rows = rows or [0, 1]
        new = slice(place, place + 1)
        held = cache.update(key[rows][:, :, new], value[rows][:, :, new])
        return mh.attention(query[rows][:, :, new], held)

    def want(place: int, rows: list[int] | None = None) -> torch.Tensor:
        part = slice(0, place + 1)
        out = mh.attention(query[:, :, part], key[:, :, part], value[:, :, part], mask=mask)
        return out[rows or [0, 1], :, -1:]

    cache = SplitKVCache((3, None, 3), 1)
    cache.update(key[:, :, :8], value[:, :, :8])
    other = cache.fork()
    at(copy.copy(cache), 9)
    assert torch.allclose(at(cache, 8), want(8))
    cache.crop(8)
    assert torch.allclose(at(cache, 8), want(8))
    assert torch.allclose(at(other, 8), want(8))
    with pytest.raises(mh.ArgumentError, match="can't go back that far"):
        cache.crop(5)
    assert cache.length == 9
    assert {part.length for part in cache._caches} == {9}
    assert torch.allclose(at(cache, 9), want(9))
    other.reorder([1, 1])
    assert torch.allclose(at(other, 9, [1, 1]), want(9, [1, 1]))
    assert other.positions(2).tolist() == [10, 11]
    cache.reset()
    assert (cache.length, cache.nbytes) == (0, 0)
    assert torch.allclose(at(cache, 0), want(0))
    copy.deepcopy(cache)


def test_mistakes_are_named() -> None:
    query, key, value = drawn(6, torch.float32)
    with pytest.raises(mh.ArgumentError, match="windows must hold a number or None for each KV h"):
        SplitKVCache(())
    with pytest.raises(mh.ArgumentError, match="window must be at least 1"):
        SplitKVCache((0, None))
    with pytest.raises(mh.ArgumentError, match="key has 3 KV heads, but the cache was made for 2"):
        SplitKVCache((4, None)).update(key, value)
    held = SplitKVCache((4, None, None)).update(key, value)
    for function in (mh.attention_with_stats, mh.explain):
        with pytest.raises(mh.ArgumentError, match=r"held in parts of different length"):
            function(query, held)
    with pytest.raises(mh.ArgumentError, match="5 query heads can't share 3 KV heads evenly"):
        mh.attention(query[:, :5], held)
    layer = mh.MultiHeadAttention(12, 2)
    cache = SplitKVCache((2, None))
    with mh.watch(layer), torch.no_grad(), pytest.raises(mh.ArgumentError, match="not watched"):
        layer(torch.randn(1, 5, 12), cache=cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_decodes_with_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(48, 6, num_kv_heads=3, rope=mh.RoPE(), sinks=True).to(dtype)
    layer.window = lefts((4, None, 4), 2)
    x = torch.randn(2, 19, 48).to(dtype)
    cache = SplitKVCache((4, None, 4), 2)
    with torch.no_grad():
        whole = layer(x, mask=mh.Causal())
        parts = [layer(x[:, :9], mask=mh.Causal(), cache=cache)]
        parts += [layer(x[:, i : i + 1], mask=mh.Causal(), cache=cache) for i in range(9, 19)]
        exact = copy.deepcopy(layer).double()
        want = exact(x.double(), mask=mh.Causal())
    assert_close(torch.cat(parts, 1), want, whole)
