"""What a window of W means: W keys, the query's own among them, in prefill and in decoding.

Users of several libraries met windows that are one key too wide, or that a call with a single query
ignores, so that decoding drifts from the model that was trained.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import multihead as mh
from serving import BACKENDS, FLOATS, assert_call, assert_gradients, draw, draw_qkv, require_serving

L = 6
ZEROS, IDENTITY = torch.zeros(1, 1, L, L), torch.eye(L)[None, None]


def rows(size: int) -> Tensor:
    """Row i is the mean of the last `size` unit vectors up to the i-th."""
    seen = torch.ones(L, L).tril().triu(1 - size)
    return seen / seen.sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 7, 100])
def test_a_window_counts_the_query_itself(size: int, backend: str, dtype: torch.dtype) -> None:
    require_serving(backend, dtype)
    query, value = ZEROS.to(dtype), IDENTITY.to(dtype)
    expected = rows(size).to(dtype)
    for mask in (
        mh.SlidingWindow(size),
        mh.Window(size - 1),
        mh.Window(size - 1, None) & mh.Causal(),
        mh.Window(torch.tensor([size - 1]), torch.tensor([0])),
        mh.SlidingWindow(size) & mh.SlidingWindow(size + 1),
    ):
        whole = mh.attention(query, query, value, mask=mask, backend=backend)[0, 0]
        assert torch.equal(whole, expected)
        for i in range(L):  # a token at a time, and the last query against everything
            one = slice(i, i + 1)
            part = query[:, :, : i + 1], value[:, :, : i + 1]
            step = mh.attention(query[:, :, one], *part, mask=mask, backend=backend)
            assert torch.equal(step[0, 0, 0], expected[i])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_as_wide_as_the_sequence_hides_nothing_more(backend: str) -> None:
    require_serving(backend, torch.float32)
    tensors = draw_qkv((2, 3, 41, 8), (2, 3, 41, 8))
    causal = mh.attention(*tensors, mask=mh.Causal(), backend=backend)
    free = mh.attention(*tensors, backend=backend)
    for size in (41, 42, 2**31):
        out = mh.attention(*tensors, mask=mh.SlidingWindow(size), backend=backend)
        torch.testing.assert_close(out, causal, rtol=0, atol=1e-6)
        both = mh.Window(size - 1, size - 1)
        out = mh.attention(*tensors, mask=both, backend=backend)
        torch.testing.assert_close(out, free, rtol=0, atol=1e-6)
    alone = mh.attention(*tensors, mask=mh.SlidingWindow(1), backend=backend)
    torch.testing.assert_close(alone, tensors[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 3), (4, 0), (4, 3), (None, 3), (4, None)])
def test_both_sides_count_from_the_position(
    left: int | None, right: int | None, backend: str, dtype: torch.dtype
) -> None:
    require_serving(backend, dtype)
    for queries, keys in ((23, 23), (5, 23), (23, 5), (1, 67), (67, 131)):
        tensors = draw_qkv((2, 4, queries, 8), (2, 2, keys, 8), 5, dtype=dtype)
        mask = mh.Window(left, right)
        result = assert_call(tensors, backend, mask=mask)
        p = torch.arange(queries)[:, None] + keys - queries
        j = torch.arange(keys)
        visible = torch.ones(queries, keys, dtype=torch.bool)
        visible &= True if left is None else j >= p - left
        visible &= True if right is None else j <= p + right
        assert mask.visible_pairs(queries, keys) == int(visible.sum())
        dense = mh.attention(*tensors, mask=visible, backend="reference")
        atol = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(result.out, dense, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_gradients_of_windows(dtype: torch.dtype) -> None:
    for mask in (mh.SlidingWindow(3), mh.Window(4, 2), mh.Window(2, 0, keep_first=1)):
        assert_gradients(draw_qkv((1, 4, 23, 8), (1, 2, 23, 8), 5, dtype=dtype), mask=mask)


@pytest.mark.parametrize("size", [0, -1])
def test_a_window_without_a_key_is_refused(size: int) -> None:
    with pytest.raises(mh.MaskError, match="at least 1"):
        mh.SlidingWindow(size)
    with pytest.raises(mh.MaskError, match="at least 0"):
        mh.Window(size - 1)


def test_counts_of_operations_read_the_same_window() -> None:
    query = torch.zeros(1, 4, 16, 8)
    cost = mh.explain(query, query, query, mask=mh.SlidingWindow(3)).cost
    assert cost.exponentials == 4 * 45
    assert cost.flops == 2 * 4 * 45 * (8 + 8)


@pytest.mark.parametrize("size", [1, 2, 5, 11, 12])
def test_a_layer_reads_the_same_window_for_one_query(size: int) -> None:
    layer = mh.MultiHeadAttention(20, 4, num_kv_heads=2, context_dim=20)
    tokens = draw(2, 11, 20, seed=2)
    mask = mh.SlidingWindow(size)
    whole = layer(tokens, tokens, mask=mask)
    for i in range(11):
        step = layer(tokens[:, i : i + 1], tokens[:, : i + 1], mask=mask)
        torch.testing.assert_close(step, whole[:, i : i + 1], rtol=0, atol=1e-6)
    short = tokens[:, max(0, 11 - size) :]
    last = layer(tokens[:, 10:], short)
    torch.testing.assert_close(last, whole[:, 10:], rtol=0, atol=1e-6)
