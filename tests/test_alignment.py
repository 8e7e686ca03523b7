"""Where the queries stand: new tokens continue the sequence, and torch's anchor has another name.

Users of several libraries met a causal flag that is anchored at the first key: the newest token
of a cached sequence then reads one key, and the output is plausible and wrong.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import multihead as mh
from checks import compare
from serving import BACKENDS, FLOATS, assert_call, baseline, draw, draw_qkv, exact, require_serving

LENGTH = 17
RULES: dict[str, dict[str, object]] = {
    "causal": {"mask": mh.Causal()},
    "window": {"mask": mh.SlidingWindow(5)},
    "window that keeps first keys": {"mask": mh.Window(3, 0, keep_first=2)},
    "window per head": {"mask": mh.Window(torch.tensor([0, 3, 6, 20]), 0)},
    "two windows": {"mask": mh.Window(2, 0, keep_first=4) & mh.Window(5, 1, 1) & mh.Causal()},
    "prefix": {"mask": mh.PrefixCausal(3)},
    "alibi": {"mask": mh.Causal(), "bias": mh.ALiBi(torch.tensor([0.5, 0.25, 0.125, 0.0625]))},
    "softcap and sinks": {"mask": mh.Causal(), "softcap": 2.0, "sinks": torch.ones(4)},
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_every_split_into_a_cache_and_new_tokens(
    rule: str, backend: str, dtype: torch.dtype
) -> None:
    """Each statistic too: distances and columns are those of the whole sequence."""
    require_serving(backend, dtype)
    options = RULES[rule]
    tensors = draw_qkv((2, 4, LENGTH, 8), (2, 2, LENGTH, 8), 5, dtype=dtype)
    expected = exact(tensors, options)
    near = baseline(tensors, options, expected)

    def call(rows: slice) -> mh.AttentionResult:
        query, key, value = (x[:, :, : rows.stop] for x in tensors)
        return mh.attention_with_stats(
            query[:, :, rows], key, value, stats=mh.STATISTICS, backend=backend, **options
        )

    # A prefix of three keys can't be seen before they are there.
    shortest = 3 if rule == "prefix" else 1
    for new in (1, 2, 3):
        steps = {end: call(slice(end - new, end)) for end in range(max(new, shortest), LENGTH + 1)}
        for row in range(new):
            # Every row of the sequence as the step gave it in which it was the row-th new token.
            whole = call(slice(0, LENGTH))
            for end, step in steps.items():
                place = end - new + row
                whole.out[:, :, place] = step.out[:, :, row]
                for name in mh.STATISTICS:
                    whole.stats[name][:, :, place] = step.stats[name][:, :, row]
            compare(whole, expected, near)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_two_anchors_differ(backend: str) -> None:
    """Weights that are all alike show which keys are seen: the choice can't flip unnoticed."""
    require_serving(backend, torch.float32)
    query, key, value = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 5, 8), torch.eye(5)[None, None]
    newest = mh.attention(query, key, value, mask=mh.Causal(), backend=backend)[0, 0]
    expected = [[0.25, 0.25, 0.25, 0.25, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]]
    assert torch.equal(newest, torch.tensor(expected))
    top_left = mh.Causal() & mh.QueryStart(0)
    first = mh.attention(query, key, value, mask=top_left, backend=backend)[0, 0]
    assert torch.equal(first, torch.tensor([[1.0, 0, 0, 0, 0], [0.5, 0.5, 0, 0, 0]]))
    middle = mh.Causal() & mh.QueryStart(2)
    third = mh.attention(query, key, value, mask=middle, backend=backend)[0, 0]
    assert torch.equal(third[1], expected_row := torch.tensor([0.25] * 4 + [0.0]))
    assert torch.equal(third[0, :3], torch.full((3,), 1 / 3))
    assert torch.equal(newest[0], expected_row)


@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (2, 5), (5, 5), (7, 5), (70, 131)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_anchors_at_either_end(backend: str, queries: int, keys: int) -> None:
    require_serving(backend, torch.float32)
    tensors = draw_qkv((2, 3, queries, 8), (2, 3, keys, 8))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    out = assert_call(tensors, backend, mask=mh.Causal() & mh.QueryStart(0)).out
    torch.testing.assert_close(out, sdpa(*tensors, is_causal=True), rtol=0, atol=1e-5)
    flag = causal_upper_left(queries, keys)
    torch.testing.assert_close(out, sdpa(*tensors, attn_mask=flag), rtol=0, atol=1e-5)
    out = assert_call(tensors, backend, mask=mh.Causal()).out
    if queries <= keys:  # torch's gives NaN for rows without keys
        flag = causal_lower_right(queries, keys)
        torch.testing.assert_close(out, sdpa(*tensors, attn_mask=flag), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_queries_than_keys_begin_before_the_first_key(backend: str) -> None:
    require_serving(backend, torch.float32)
    tensors = draw_qkv((1, 2, 7, 8), (1, 2, 3, 8))
    result = assert_call(tensors, backend, mask=mh.Causal())
    assert bool((result.out[:, :, :4] == 0).all())
    torch.testing.assert_close(result.out[:, :, 4], tensors[2][:, :, 0], rtol=0, atol=1e-6)
    last = mh.attention(tensors[0][:, :, 4:], *tensors[1:], mask=mh.Causal(), backend=backend)
    torch.testing.assert_close(result.out[:, :, 4:], last, rtol=0, atol=1e-6)


def test_gradients_of_new_tokens_are_those_of_the_whole() -> None:
    query, key, value = (x.double() for x in draw_qkv((1, 4, 9, 8), (1, 2, 9, 8)))
    leaves = [x.requires_grad_() for x in (query, key, value)]
    weight = draw(1, 4, 2, 8, seed=5, dtype=torch.float64)
    for mask in (mh.Causal(), mh.SlidingWindow(4)):
        whole = (mh.attention(*leaves, mask=mask)[:, :, 7:] * weight).sum()
        step = (mh.attention(query[:, :, 7:], key, value, mask=mask) * weight).sum()
        pairs = zip(
            torch.autograd.grad(step, leaves), torch.autograd.grad(whole, leaves), strict=True
        )
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_exact_pieces_of_the_newest_rows() -> None:
    query, key, value = draw_qkv((1, 4, 9, 8), (1, 2, 9, 8))
    mask = mh.Causal()
    whole = mh.attention_with_stats(query, key, value, mask=mask)
    step = mh.attention_with_stats(query[:, :, 7:], key, value, mask=mask)
    everything = slice(None)
    weights = step.weights(everything, everything)
    torch.testing.assert_close(weights, whole.weights([7, 8], everything), rtol=0, atol=1e-6)
    received, mean = mh.received_attention(query[:, :, 7:], key, step.lse, mask=mask)
    torch.testing.assert_close(received, weights.sum(2), rtol=0, atol=1e-6)
    torch.testing.assert_close(mean[..., -1], weights[:, :, 1, -1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("new", [1, 2, 3])
def test_a_layer_reads_a_longer_context_as_its_past(new: int) -> None:
    """A cross-attention whose context ends with x itself continues it, as a cache would."""
    layer = mh.MultiHeadAttention(20, 4, num_kv_heads=2, context_dim=20)
    tokens = draw(2, 11, 20, seed=2)
    whole = layer(tokens, tokens, mask=mh.Causal())
    for end in range(new, 12):
        step = layer(tokens[:, end - new : end], tokens[:, :end], mask=mh.Causal())
        torch.testing.assert_close(step, whole[:, end - new : end], rtol=0, atol=1e-6)
