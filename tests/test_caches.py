"""The life of a key-value cache: crop, reset, fork, reorder, copies, bytes, and what is refused.

After transformers#47433 (crop), #48809 (reset), #37078 (a prefix is changed by each use), #32681
(deepcopy), #46612 (reorder); nanochat#485, transformers#30414, flash-attention#1402 (rows of
different length); aiter#4289, sglang#20705 (scales of int8).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead.nn.cache.quantized import quantize
from serving import draw, draw_qkv

BATCH, HEADS, WIDTH, VALUE_WIDTH = 2, 2, 5, 7

Make = Callable[[], mh.Cache]
KINDS: dict[str, Make] = {
    "growing": mh.KVCache,
    "static": lambda: mh.StaticKVCache(BATCH, HEADS, 24, WIDTH, VALUE_WIDTH),
    "window": lambda: mh.WindowKVCache(16),
    "rolling": lambda: mh.WindowKVCache(2, keep_first=1),
    "paged": lambda: mh.PagedKVCache(BATCH, HEADS, WIDTH, VALUE_WIDTH, page_size=4),
    "quantized": mh.QuantizedKVCache,
}


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Make:
    return KINDS[request.param]


def tokens(length: int, seed: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    key = draw(batch, HEADS, length, WIDTH, seed=2 * seed)
    return key, draw(batch, HEADS, length, VALUE_WIDTH, seed=2 * seed + 1)


def step(cache: mh.Cache, key: Tensor, value: Tensor) -> Tensor:
    """What two query heads for each KV head make of the cache after `key` and `value` came."""
    query = draw(key.shape[0], 2 * HEADS, key.shape[2], WIDTH, seed=99)
    return mh.attention(query, cache.update(key, value), mask=mh.Causal())


def three(make: Make) -> mh.Cache:
    """A cache of three tokens, whose keys are 0, 1 and 2 in every lane."""
    cache = make()
    key = torch.arange(3.0)[:, None].expand(BATCH, HEADS, 3, WIDTH)
    cache.update(key, torch.zeros(BATCH, HEADS, 3, VALUE_WIDTH))
    return cache


def keys(cache: mh.Cache) -> Tensor:
    """The keys in memory, by their position."""
    nothing = torch.zeros(BATCH, HEADS, 0, WIDTH), torch.zeros(BATCH, HEADS, 0, VALUE_WIDTH)
    kv = cache.update(*nothing)
    key, _ = kv.tensors(torch.float32)
    return key if kv.columns is None else key[:, :, kv.columns.argsort()]


def test_growing_continues_prefill():
    query, key, value = draw_qkv((2, 6, 11, 5), (2, 2, 11, 5), 7)
    cache = mh.KVCache()
    parts = []
    for begin, end in ((0, 5), (5, 6), (6, 6), (6, 11)):
        kv = cache.update(key[:, :, begin:end], value[:, :, begin:end])
        parts.append(mh.attention(query[:, :, begin:end], kv, mask=mh.Causal()))
    whole = mh.attention(query, key, value, mask=mh.Causal())
    assert torch.allclose(torch.cat(parts, 2), whole, atol=1e-6)


@pytest.mark.parametrize(("length", "kept"), [(0, 0), (-5, 0), (-1, 2), (5, 3), (2, 2), (-3, 0)])
def test_crop(make, length, kept):
    cache = three(make)
    cache.crop(length)
    assert cache.length == kept
    found = keys(cache)[0, 0, :, 0]
    assert torch.allclose(found, torch.arange(float(kept))[-len(found) :])


def test_what_follows_a_crop_sees_only_what_was_kept(make):
    cropped, fresh = make(), make()
    prefix = tokens(3, 0)
    cropped.update(*prefix)
    cropped.crop(-1)
    fresh.update(*(x[:, :, :2] for x in prefix))
    for seed in range(1, 7):  # past the end of a window of 2
        new = tokens(1, seed)
        assert torch.equal(step(cropped, *new), step(fresh, *new))


def test_a_shallow_copy_is_a_fork(make):
    """Two caches that write to one memory, or free its pages twice, would spoil each other."""
    cache, alone = make(), make()
    for each in (cache, alone):
        each.update(*tokens(3, 1))
    copied = copy.copy(cache)
    for each in (cache, alone):
        each.update(*tokens(2, 2))
    step(copied, *tokens(2, 3))
    del copied
    step(cache.fork(), *tokens(5, 4))
    assert cache.length == 5
    assert torch.equal(step(cache, *tokens(2, 5)), step(alone, *tokens(2, 5)))


def test_reset_is_as_new(make):
    cache, fresh = make(), make()
    step(cache, *tokens(5, 0))
    cache.reset()
    assert cache.length == 0
    for seed, length in enumerate((3, 1, 4)):
        new = tokens(length, seed)
        assert torch.equal(step(cache, *new), step(fresh, *new))
    assert cache.nbytes == fresh.nbytes
    assert cache.filled_nbytes == fresh.filled_nbytes


@pytest.mark.parametrize(
    "duplicate", [lambda cache: cache.fork(), copy.deepcopy], ids=["fork", "deepcopy"]
)
@pytest.mark.parametrize("origin_first", [True, False])
def test_a_prefix_serves_many_continuations(make, duplicate, origin_first):
    """Each equals a run from a fresh prefix, whichever writes first, step by step in turns."""
    prefix = tokens(6, 0)
    origin = make()
    origin.update(*prefix)
    caches = [origin, duplicate(origin), duplicate(origin)]
    caches.append(duplicate(caches[-1]))
    if not origin_first:
        caches.reverse()
    fresh = [make() for _ in caches]
    for cache in fresh:
        cache.update(*prefix)
    for seed in range(1, 5):
        for n, (cache, alone) in enumerate(zip(caches, fresh, strict=True)):
            new = tokens(1 + (n == 2), 10 * n + seed)
            assert torch.equal(step(cache, *new), step(alone, *new))
    caches[0].crop(-1)
    fresh[0].crop(-1)
    for seed in range(3):
        for n, (cache, alone) in enumerate(zip(caches, fresh, strict=True)):
            new = tokens(1, 50 + 10 * n + seed)
            assert torch.equal(step(cache, *new), step(alone, *new))


def test_what_was_handed_out_does_not_change_with_a_fork(make):
    cache = make()
    kv = cache.update(*tokens(3, 0))
    before = [x.clone() for x in kv.tensors(torch.float32)]
    fork = cache.fork()
    fork.update(*tokens(2, 1))
    fork.crop(1)
    fork.update(*tokens(4, 2))
    assert all(map(torch.equal, kv.tensors(torch.float32), before))


@pytest.mark.parametrize("rows", [[1, 1, 0], [1, 0], [0]])
def test_reorder_moves_rows(make, rows):
    cache = make()
    prefix = tokens(5, 0)
    cache.update(*prefix)
    cache.reorder(torch.tensor(rows))
    each = []
    for row in rows:
        alone = make()
        alone.update(*prefix)
        alone.reorder([row])
        each.append(alone)
    for seed in range(1, 5):
        new = tokens(1, seed, batch=len(rows))
        together = step(cache, *new)
        query = draw(len(rows), 2 * HEADS, 1, WIDTH, seed=99)
        for n, alone in enumerate(each):
            kv = alone.update(*(x[n : n + 1] for x in new))
            expected = mh.attention(query[n : n + 1], kv, mask=mh.Causal())
            assert torch.equal(together[n : n + 1], expected)


def test_reorder_refuses_rows_that_are_not_there(make):
    cache = make()
    cache.update(*tokens(3, 0))
    with pytest.raises(mh.ArgumentError, match="from 0 to 1"):
        cache.reorder([0, 2])
    with pytest.raises(mh.ArgumentError, match="from 0 to 1"):
        cache.reorder([-1])
    with pytest.raises(mh.ArgumentError, match=r"\[B\]"):
        cache.reorder(torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(mh.DtypeError, match="integers"):
        cache.reorder(torch.tensor([True, False]))


@pytest.mark.parametrize("kind", ["growing", "window", "quantized"])
def test_reorder_of_nothing_is_refused(kind):
    with pytest.raises(mh.ArgumentError, match="empty"):
        KINDS[kind]().reorder([0])


def test_attention_stores_nothing(make):
    cache = make()
    kv = cache.update(*tokens(3, 0))
    before = [x.clone() for x in (kv.key, kv.value)]  # bytes: unused pages hold anything
    for length in (1, 2):
        mh.attention(draw(BATCH, HEADS, length, WIDTH, seed=5), kv, mask=mh.Window(1, None))
    assert cache.length == 3
    for x, y in zip((kv.key, kv.value), before, strict=True):
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def test_what_does_not_fit_is_refused_and_changes_nothing(make):
    cache = make()
    key, value = tokens(3, 0)
    cache.update(key, value)
    before = keys(cache).clone()
    for error, match, bad in (
        (mh.ArgumentError, "batch is 2, but 1", (key[:1], value[:1])),
        (mh.ArgumentError, "KV heads is 2, but 1", (key[:, :1], value[:, :1])),
        (mh.ArgumentError, "D of the keys is 5, but 4", (key[..., :4], value)),
        (mh.ArgumentError, "Dv of the values is 7, but 6", (key, value[..., :6])),
        (mh.ArgumentError, "key must be", (key, value[:, :, :2])),
        (mh.ArgumentError, "key must be", (key[0], value[0])),
        (mh.DtypeError, "holds float32, but bfloat16", (key.bfloat16(), value.bfloat16())),
        (mh.DtypeError, "share one float dtype", (key, value.double())),
        (mh.DeviceError, "value is on meta", (key, value.to("meta"))),
        (mh.DeviceError, "cache is on cpu", (key.to("meta"), value.to("meta"))),
    ):
        with pytest.raises(error, match=match):
            cache.update(*bad)
        assert cache.length == 3
        assert torch.equal(keys(cache), before)


def test_sizes_that_no_cache_has_are_refused():
    for error, name, build in (
        (mh.ArgumentError, "batch must be at least 0", lambda: mh.StaticKVCache(-1, 2, 8, 5)),
        (mh.ArgumentError, "capacity must be at least 0", lambda: mh.StaticKVCache(2, 2, -1, 5)),
        (mh.DtypeError, "head_dim must be an integer", lambda: mh.StaticKVCache(2, 2, 8, 5.0)),
        (mh.ArgumentError, "num_kv_heads must be", lambda: mh.PagedKVCache(2, -1, 5)),
        (mh.ArgumentError, "page_size must be", lambda: mh.PagedKVCache(2, 2, 5, page_size=0)),
        (mh.ArgumentError, "num_pages must be", lambda: mh.PagedKVCache(2, 2, 5, num_pages=0)),
        (mh.ArgumentError, "window must be at least 1", lambda: mh.WindowKVCache(0)),
        (mh.ArgumentError, "keep_first must be at least 0", lambda: mh.WindowKVCache(3, -1)),
        (mh.DtypeError, "takes tensors", lambda: mh.KVCache().update(torch.ones(1, 1, 1, 1), None)),
    ):
        with pytest.raises(error, match=name):
            build()


def test_a_batch_of_none(make):
    cache = make()
    if isinstance(cache, mh.StaticKVCache):
        cache = mh.StaticKVCache(0, HEADS, 24, WIDTH, VALUE_WIDTH)
    elif isinstance(cache, mh.PagedKVCache):
        cache = mh.PagedKVCache(0, HEADS, WIDTH, VALUE_WIDTH)
    for seed, length in enumerate((3, 1, 2)):
        assert step(cache, *tokens(length, seed, batch=0)).shape == (0, 4, length, VALUE_WIDTH)


def test_positions_continue(make):
    cache = make()
    assert torch.equal(cache.positions(3), torch.arange(3))
    cache.update(*tokens(4, 0))
    assert torch.equal(cache.positions(2), torch.tensor([4, 5]))


def test_gradients_are_kept_or_refused(make):
    cache = make()
    leaves = [x.requires_grad_() for x in tokens(3, 0)]
    if not isinstance(cache, mh.KVCache):
        with pytest.raises(mh.ArgumentError, match="no_grad"):
            cache.update(*leaves)
        assert cache.length == 0
        with torch.no_grad():
            cache.update(*leaves)
        assert cache.length == 3
        return
    query, key, value = draw_qkv((2, 4, 9, 5), (2, 2, 9, 5), 7)
    parts, wholes = [[x.clone().requires_grad_() for x in (key, value)] for _ in range(2)]
    cache.update(*(x[:, :, :4] for x in parts))
    cache = copy.deepcopy(cache)  # with its history, as under grad mode it must
    outs = [
        mh.attention(query[:, :, i : i + 1], cache.update(*(x[:, :, i : i + 1] for x in parts)))
        for i in range(4, 9)
    ]
    torch.cat(outs, 2).square().sum().backward()
    whole = mh.attention(query[:, :, 4:], *wholes, mask=mh.Causal())
    whole.square().sum().backward()
    for part, want in zip(parts, wholes, strict=True):
        assert torch.allclose(part.grad, want.grad, atol=1e-6)


def test_queries_may_be_trained_on_a_growing_cache():
    """What the backward pass keeps of earlier steps is not overwritten by later ones."""
    query, key, value = draw_qkv((2, 4, 9, 5), (2, 2, 9, 5), 7)
    query.requires_grad_()
    cache = mh.KVCache()
    outs = []
    for i in range(9):
        kv = cache.update(key[:, :, i : i + 1], value[:, :, i : i + 1])
        outs.append(mh.attention(query[:, :, i : i + 1], kv))
    found = torch.autograd.grad(torch.cat(outs, 2).square().sum(), query)[0]
    whole = mh.attention(query, key, value, mask=mh.Causal())
    assert torch.allclose(found, torch.autograd.grad(whole.square().sum(), query)[0], atol=1e-6)


def test_filled_in_inference_mode_and_used_outside(make):
    cache = make()
    with torch.inference_mode():
        cache.update(*tokens(3, 0))
        cache.reorder([1, 0])
        fork = cache.fork()
    with torch.no_grad():
        for it in (cache, fork):
            it.update(*tokens(1, 1))
            it.crop(-1)
            it.update(*tokens(2, 2))
    assert cache.length == fork.length == 5


# --- bytes ---------------------------------------------------------------------------------------


def test_bytes_of_a_growing_cache():
    cache = mh.KVCache()
    assert cache.nbytes == cache.filled_nbytes == 0
    token = BATCH * HEADS * (WIDTH + VALUE_WIDTH) * 4
    for seed, length in enumerate((3, 1, 80)):
        kv = cache.update(*tokens(length, seed))
    assert cache.filled_nbytes == 84 * token == kv.key.nbytes + kv.value.nbytes
    assert (
        cache.nbytes == 128 * token == sum(x.untyped_storage().nbytes() for x in (kv.key, kv.value))
    )


def test_a_step_of_a_growing_cache_moves_nothing():
    cache = mh.KVCache()
    moves, place = 0, None
    for seed in range(400):
        kv = cache.update(*tokens(1, seed))
        moves += place != kv.key.data_ptr()
        place = kv.key.data_ptr()
    assert moves <= 8  # the memory of 64 tokens, and a quarter more each time


def test_bytes_of_a_static_cache():
    cache = mh.StaticKVCache(3, 2, 11, 5, 7, dtype=torch.bfloat16)
    assert cache.nbytes == 3 * 2 * 11 * (5 + 7) * 2 + 3 * 4
    assert cache.filled_nbytes == 3 * 4
    key, value = draw(3, 2, 4, 5, seed=0), draw(3, 2, 4, 7, seed=1)
    cache.update(key.bfloat16(), value.bfloat16(), query_lengths=torch.tensor([4, 0, 1]))
    assert cache.filled_nbytes == 5 * 2 * (5 + 7) * 2 + 3 * 4


def test_bytes_of_a_window_cache():
    cache = mh.WindowKVCache(4, keep_first=2)
    token = BATCH * HEADS * (WIDTH + VALUE_WIDTH) * 4 + 4  # and the column's number
    for seed, filled in enumerate((1, 2, 3, 4, 5, 6, 6, 6)):
        cache.update(*tokens(1, seed))
        assert cache.nbytes == 6 * token
        assert cache.filled_nbytes == filled * token
    cache.crop(-1)
    assert cache.filled_nbytes == 5 * token


def test_bytes_of_a_paged_cache():
    cache = mh.PagedKVCache(BATCH, HEADS, WIDTH, VALUE_WIDTH, page_size=4, num_pages=6)
    page = HEADS * 4 * (WIDTH + VALUE_WIDTH) * 4
    assert cache.nbytes == 6 * page
    assert cache.filled_nbytes == 0
    cache.update(*tokens(5, 0))
    assert cache.nbytes == 6 * page + 2 * 2 * 4
    assert cache.filled_nbytes == 4 * page + 2 * 2 * 4
    fork = cache.fork()
    assert fork.filled_nbytes == cache.filled_nbytes  # the same pages


def test_bytes_of_a_quantized_cache():
    cache = mh.QuantizedKVCache()
    cache.update(*tokens(3, 0))
    token = BATCH * HEADS * (WIDTH + VALUE_WIDTH + 2 * 4)
    assert cache.filled_nbytes == 3 * token
    assert cache.nbytes == 64 * token


# --- rows of different length --------------------------------------------------------------------

RAGGED: dict[str, Callable[[int, int], mh.StaticKVCache | mh.PagedKVCache]] = {
    "static": lambda batch, room: mh.StaticKVCache(batch, 2, room, 5, 7),
    "paged": lambda batch, room: mh.PagedKVCache(
        batch, 2, 5, 7, page_size=4, num_pages=batch * room // 4
    ),
}


@pytest.mark.parametrize("capacity", [16, 64])
@pytest.mark.parametrize("kind", RAGGED)
def test_each_row_is_as_alone(kind, capacity):
    """Lengths 0, 3 and 7, two tokens more for each, and then one by one."""
    cache = RAGGED[kind](3, capacity)
    query, key, value = draw_qkv((3, 4, 7, 5), (3, 2, 7, 5), 7)
    before = torch.tensor([0, 3, 7])
    cache.update(key, value, query_lengths=before)
    assert cache.lengths.tolist() == [0, 3, 7]
    alone = [mh.KVCache() for _ in range(3)]
    for row, length in enumerate(before):
        alone[row].update(*(x[row : row + 1, :, :length] for x in (key, value)))
    for seed, count in enumerate((2, 1, 1, 3)):
        query, key, value = draw_qkv((3, 4, count, 5), (3, 2, count, 5), 7, seed=seed + 1)
        assert torch.equal(cache.positions(count)[:, 0], cache.lengths.long())
        together = mh.attention(query, cache.update(key, value), mask=mh.Causal())
        for row, other in enumerate(alone):
            kv = other.update(key[row : row + 1], value[row : row + 1])
            expected = mh.attention(query[row : row + 1], kv, mask=mh.Causal())
            assert torch.equal(together[row : row + 1], expected)
        if seed == 0:
            assert cache.lengths.tolist() == [2, 5, 9]


@pytest.mark.parametrize("kind", RAGGED)
def test_a_ragged_prompt_is_right_padded(kind):
    """Rows beyond a prompt's end see nothing; what they hold is not stored."""
    cache = RAGGED[kind](3, 16)
    lengths = torch.tensor([2, 7, 4])
    query, key, value = draw_qkv((3, 4, 7, 5), (3, 2, 7, 5), 7)
    for row, length in enumerate(lengths):
        key[row, :, length:] = value[row, :, length:] = torch.nan
    found = mh.attention(query, cache.update(key, value, query_lengths=lengths), mask=mh.Causal())
    for row, length in enumerate(lengths):
        expected = mh.attention(
            *(x[row : row + 1, :, :length] for x in (query, key, value)), mask=mh.Causal()
        )
        assert torch.equal(found[row : row + 1, :, :length], expected)
        assert not found[row, :, length:].any()


@pytest.mark.parametrize("kind", RAGGED)
def test_no_room_is_refused_before_anything_changes(kind):
    cache = RAGGED[kind](3, 8)
    if kind == "paged":
        cache = mh.PagedKVCache(3, 2, 5, 7, page_size=4, num_pages=5)
    key, value = draw(3, 2, 8, 5, seed=0), draw(3, 2, 8, 7, seed=1)
    cache.update(key, value, query_lengths=torch.tensor([0, 5, 8]))
    nothing = key[:, :, :0], value[:, :, :0]
    before = [x.clone() for x in cache.update(*nothing).tensors(torch.float32)]
    with pytest.raises(mh.ArgumentError, match=r"row 2 holds 8|num_pages"):
        cache.update(key[:, :, :1], value[:, :, :1])
    assert cache.lengths.tolist() == [0, 5, 8]
    after = cache.update(*nothing).tensors(torch.float32)
    for row, length in enumerate((0, 5, 8)):
        for x, y in zip(before, after, strict=True):
            assert torch.equal(x[row, :, :length], y[row, :, :length])
    cache.crop(-1)
    assert cache.lengths.tolist() == [0, 4, 7]
    cache.crop(6)
    assert cache.lengths.tolist() == [0, 4, 6]
    cache.update(key[:, :, :1], value[:, :, :1])
    assert cache.lengths.tolist() == [1, 5, 7]


def test_capacity_of_even_rows():
    cache = mh.StaticKVCache(BATCH, HEADS, 4, WIDTH, VALUE_WIDTH)
    cache.update(*tokens(3, 0))
    with pytest.raises(mh.ArgumentError, match=r"holds 3 when 2 more come.*capacity=5"):
        cache.update(*tokens(2, 1))
    assert cache.length == 3
    with pytest.raises(mh.MaskError, match="between 0 and 1"):
        cache.update(*tokens(1, 1), query_lengths=torch.tensor([1, 2]))
    with pytest.raises(mh.ArgumentError, match=r"\[B\] = \[2\]"):
        cache.update(*tokens(1, 1), query_lengths=torch.tensor([1]))
    for wrong in ([1, 1], torch.tensor([0.5, 1.0]), torch.tensor([True, False])):
        with pytest.raises(mh.DtypeError, match="must be a tensor of integers"):
            cache.update(*tokens(1, 1), query_lengths=wrong)


# --- pages ---------------------------------------------------------------------------------------


def test_forks_share_pages_until_they_write():
    cache = mh.PagedKVCache(BATCH, HEADS, WIDTH, VALUE_WIDTH, page_size=4, num_pages=12)
    cache.update(*tokens(6, 0))
    forks = [cache.fork() for _ in range(5)]
    assert all(torch.equal(fork.table, cache.table) for fork in forks)
    forks[0].update(*tokens(1, 1))  # the last page of each row alone is copied
    assert torch.equal(forks[0].table[:, 0], cache.table[:, 0])
    assert not (forks[0].table[:, 1:] == cache.table[:, 1:]).any()
    del forks[1:]  # their pages were shared: none is free for that
    forks[0].update(*tokens(9, 2))  # 4 pages a row: 8 of 12, of which 2 shared
    with pytest.raises(mh.ArgumentError, match="in use but for 2"):
        cache.update(*tokens(7, 3))
    del forks[:]
    cache.update(*tokens(7, 3))
    assert cache.length == 13


def test_reordered_rows_share_pages():
    cache = mh.PagedKVCache(3, 2, 5, page_size=4, num_pages=6)
    cache.update(draw(3, 2, 5, 5, seed=0), draw(3, 2, 5, 5, seed=1))
    cache.reorder([2, 2, 2])  # two rows' pages are free, and the other's last page is shared
    cache.update(draw(3, 2, 1, 5, seed=2), draw(3, 2, 1, 5, seed=3))
    assert len(set(cache.table[:, 0].tolist())) == 1
    assert len(set(cache.table[:, 1].tolist())) == 3


def test_a_pool_that_grows_keeps_its_tokens():
    cache, growing = mh.PagedKVCache(2, 2, 5, 7, page_size=4), mh.KVCache()
    for seed in range(9):
        new = tokens(5, seed)
        assert torch.equal(step(cache, *new), step(growing, *new))


@pytest.mark.parametrize(
    ("error", "match", "changed"),
    [
        (mh.DtypeError, "pages must be an int32", dict(pages=torch.tensor([[0]]))),
        (mh.ArgumentError, "between 0 and 2", dict(pages=torch.tensor([[3]]).int())),
        (mh.ArgumentError, "between 0 and 2", dict(pages=torch.tensor([[-1]]).int())),
        (mh.ArgumentError, "0 to 4", dict(length=5)),
        (mh.ArgumentError, "0 to 4", dict(length=None)),
        (mh.ArgumentError, r"\[P, Hkv, S, D\]", dict(value=torch.zeros(3, 2, 5, 5))),
        (mh.ArgumentError, "together or not", dict(key_scale=torch.zeros(3, 2, 4))),
        (mh.DtypeError, "must be int8", dict(key_scale=torch.zeros(3, 2, 4),
                                             value_scale=torch.zeros(3, 2, 4))),
        (mh.ArgumentError, "pages alone", dict(pages=None)),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(error, match, changed):
    good = dict(
        key=torch.zeros(3, 2, 4, 5), value=torch.zeros(3, 2, 4, 5),
        pages=torch.tensor([[2]], dtype=torch.int32), length=3,
    )  # fmt: skip
    assert mh.KeyValues(**good).key_length == 3
    with pytest.raises(error, match=match):
        mh.KeyValues(**{**good, **changed})


# --- int8 ----------------------------------------------------------------------------------------


def test_rounding_is_half_a_scale_at_most():
    numbers = draw(2, 3, 17, 5, seed=0)
    numbers[:, :, :, 3] = 0  # a channel
    numbers[1, 2, 4] = 0  # a token
    numbers[0, 1, 5, 2] = 1000.0
    numbers[0, 0, 0] = 1e-40
    numbers[0, 0, 1, 1:] = 3e38
    elements, scale = quantize(numbers)
    back = elements.float() * scale[..., None]
    assert back.isfinite().all()
    assert torch.equal(back[..., 3], torch.zeros(2, 3, 17)) or numbers[0, 0, 0, 3] != 0
    assert not back[1, 2, 4].any()
    error = (back.double() - numbers.double()).abs()
    rounding = 2.0**-23 * numbers.abs().double()
    assert (error <= 0.5 * scale[..., None].double() + rounding).all()
    assert elements.min() >= -127


def test_a_token_of_nan_or_infinities_is_nan():
    numbers = torch.ones(1, 1, 3, 4)
    numbers[0, 0, 1, 2], numbers[0, 0, 2, 0] = torch.nan, torch.inf
    elements, scale = quantize(numbers)
    assert scale[0, 0].isnan().tolist() == [False, True, True]
    assert torch.equal(elements[0, 0, 0], torch.full((4,), 127, dtype=torch.int8))


def test_more_tokens_never_change_earlier_ones():
    cache = mh.QuantizedKVCache()
    key, value = tokens(9, 0)
    key[:, :, 4] *= 1000
    kv = cache.update(key[:, :, :3], value[:, :, :3])
    parts = kv.key, kv.value, kv.key_scale, kv.value_scale
    before = [x.clone() for x in parts]
    for i in range(3, 9):
        kv = cache.update(key[:, :, i : i + 1], value[:, :, i : i + 1])
    for x, y in zip((kv.key, kv.value, kv.key_scale, kv.value_scale), before, strict=True):
        assert torch.equal(x[:, :, :3], y)
    whole = quantize(key)
    assert torch.equal(kv.key, whole[0])
    assert torch.equal(kv.key_scale, whole[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_to_int8_is_near(dtype):
    """Off by what half a step of each number can do: scores by half a scale of each lane of q."""
    query, key, value = draw_qkv((2, 4, 1, 16), (2, 2, 33, 16), dtype=dtype)
    value[:, :, 3] = 0
    cache = mh.QuantizedKVCache()
    kv = cache.update(key, value)
    found = mh.attention(query, kv).double()
    exact = mh.attention(*(x.double() for x in (query, key, value)), backend="reference")
    assert found.isfinite().all()
    assert kv.key_scale is not None
    assert kv.value_scale is not None
    score = 0.5 * float(kv.key_scale.max()) * float(query.double().abs().sum(-1).max()) / 4
    weight = float(torch.tensor(2 * score, dtype=torch.float64).expm1())
    allowed = weight * float(value.abs().max()) + 0.5 * float(kv.value_scale.max())
    assert (found - exact).abs().max() <= allowed
    assert (found - exact).abs().max() < 0.1


# --- KeyValues -----------------------------------------------------------------------------------


def test_key_values_stand_in_place_of_key_and_value():
    query, key, value = draw_qkv((2, 6, 3, 5), (2, 2, 11, 5))
    lengths = torch.tensor([7, 4], dtype=torch.int32)
    kv = mh.KeyValues(key, value, mh.KeyLengths(lengths))
    for mask in (None, mh.Causal(), mh.Window(2, None), torch.rand(3, 11) < 0.6):
        rule = mh.Dense(mask) if isinstance(mask, torch.Tensor) else mask
        joined = mh.KeyLengths(lengths) if rule is None else rule & mh.KeyLengths(lengths)
        expected = mh.attention(query, key, value, mask=joined)
        assert torch.equal(mh.attention(query, kv, mask=mask), expected)
        stats = mh.attention_with_stats(query, kv, mask=mask)
        assert torch.equal(stats.out, expected)
        assert mh.explain(query, kv, mask=mask).backend == mh.explain(query, key, value).backend


def test_what_is_missing_or_too_much_is_named():
    query, key, value = draw_qkv((1, 2, 3, 5), (1, 2, 3, 5))
    with pytest.raises(mh.ArgumentError, match="value is missing"):
        mh.attention(query, key)
    with pytest.raises(mh.ArgumentError, match="beside KeyValues"):
        mh.attention(query, mh.KeyValues(key, value), value)
