"""Grouped queries: query head h reads KV head h // (H / Hkv), and shared heads sum their gradients.

Users met tiling where interleaving was meant (in the ONNX standard itself), gradients of shared
heads that were averaged or not summed, and faults that only show when the number of groups is not
the number of heads in one.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import multihead as mh
from serving import BACKENDS, FLOATS, assert_call, draw, draw_qkv, require_serving

HEADS = [(6, 2), (6, 3), (6, 1), (6, 6), (4, 2), (9, 3), (10, 2)]
LENGTHS = [(3, 5), (1, 5), (1, 70), (37, 37)]


def tensors(
    heads: tuple[int, int], lengths: tuple[int, int] = (3, 5), dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    return draw_qkv((2, heads[0], lengths[0], 8), (2, heads[1], lengths[1], 8), 6, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_groups_are_neighbours(heads: tuple[int, int], backend: str, dtype: torch.dtype) -> None:
    require_serving(backend, dtype)
    group = heads[0] // heads[1]
    for lengths in LENGTHS:
        query, key, value = tensors(heads, lengths, dtype)
        grouped = assert_call((query, key, value), backend, mask=mh.Causal())
        repeated = (x.repeat_interleave(group, 1) for x in (key, value))
        result = mh.attention(query, *repeated, mask=mh.Causal(), backend=backend)
        atol = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(grouped.out, result, rtol=0, atol=atol)
        if 1 not in (group, heads[1]):
            tiled = (x.repeat(1, group, 1, 1) for x in (key, value))
            other = mh.attention(query, *tiled, mask=mh.Causal(), backend=backend)
            assert not torch.allclose(grouped.out, other, atol=0.05)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mh.Causal().to_dense(*lengths)[0, 0], enable_gqa=True
        )
        atol = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(grouped.out, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_gradients_of_a_shared_head_are_summed_over_its_group(heads: tuple[int, int]) -> None:
    group = heads[0] // heads[1]
    for lengths in LENGTHS:
        leaves = [x.requires_grad_() for x in tensors(heads, lengths, torch.float64)]
        query, key, value = leaves
        weight = draw(2, heads[0], lengths[0], 6, seed=9, dtype=torch.float64)
        grouped = mh.attention(query, key, value, mask=mh.Causal())
        repeated = (x.repeat_interleave(group, 1) for x in (key, value))
        apart = mh.attention(query, *repeated, mask=mh.Causal(), backend="reference")
        for got, want in zip(
            torch.autograd.grad((grouped * weight).sum(), leaves),
            torch.autograd.grad((apart * weight).sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_heads_of_one_group_are_alike(heads: tuple[int, int], backend: str) -> None:
    """Permuting them permutes what they give, statistics too; each works alone."""
    require_serving(backend, torch.float32)
    query, key, value = tensors(heads)
    group = heads[0] // heads[1]
    whole = assert_call((query, key, value), backend)
    order = torch.arange(heads[0]).view(heads[1], group).flip(1).flatten()
    permuted = assert_call((query[:, order], key, value), backend)
    torch.testing.assert_close(permuted.out, whole.out[:, order], rtol=0, atol=1e-6)
    for name in mh.STATISTICS:
        torch.testing.assert_close(
            permuted.stats[name], whole.stats[name][:, order], rtol=1e-5, atol=1e-6
        )
    for h in range(heads[0]):
        g = slice(h // group, h // group + 1)
        alone = mh.attention(query[:, h : h + 1], key[:, g], value[:, g], backend=backend)
        torch.testing.assert_close(alone, whole.out[:, h : h + 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["mask", "bias", "window", "both windows", "alibi", "sinks"])
def test_what_is_per_head_follows_the_query_head(
    kind: str, backend: str, dtype: torch.dtype
) -> None:
    require_serving(backend, dtype)
    sizes = torch.tensor([0, 1, 2, 3, 4, 5])
    per_head = draw(6, seed=3).abs()
    given: dict[str, dict[str, object]] = {
        "mask": {"mask": draw(1, 6, 3, 5, seed=1) < 0.5},
        "bias": {"bias": draw(1, 6, 3, 5, seed=1)},
        "window": {"mask": mh.Window(sizes, 0)},
        "both windows": {"mask": mh.Window(sizes, sizes.flip(0))},
        "alibi": {"bias": mh.ALiBi(per_head)},
        "sinks": {"sinks": per_head},
    }
    query, key, value = tensors((6, 2), dtype=dtype)
    whole = assert_call((query, key, value), backend, **given[kind])
    for h in range(6):
        one, g = slice(h, h + 1), slice(h // 3, h // 3 + 1)
        own: dict[str, dict[str, object]] = {
            "mask": {"mask": draw(1, 6, 3, 5, seed=1)[:, one] < 0.5},
            "bias": {"bias": draw(1, 6, 3, 5, seed=1)[:, one]},
            "window": {"mask": mh.Window(h, 0)},
            "both windows": {"mask": mh.Window(h, 5 - h)},
            "alibi": {"bias": mh.ALiBi(per_head[one])},
            "sinks": {"sinks": per_head[one]},
        }
        alone = mh.attention(query[:, one], key[:, g], value[:, g], backend=backend, **own[kind])
        atol = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(whole.out[:, one], alone, rtol=0, atol=atol)
    wide = key.repeat_interleave(3, 1), value.repeat_interleave(3, 1)
    apart = mh.attention_with_stats(
        query, *wide, stats=mh.STATISTICS, backend=backend, **given[kind]
    )
    for name in mh.STATISTICS:
        torch.testing.assert_close(whole.stats[name], apart.stats[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_pieces_of_the_matrix_read_the_group_s_key(heads: tuple[int, int]) -> None:
    query, key, value = tensors(heads)
    group = heads[0] // heads[1]
    result = mh.attention_with_stats(query, key, value)
    weights = result.weights(slice(None), slice(None))
    wide = key.repeat_interleave(group, 1)
    expected = torch.softmax(query @ wide.mT / 8**0.5, -1)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    received, _ = mh.received_attention(query, key, result.lse)
    torch.testing.assert_close(received, expected.sum(2), rtol=0, atol=1e-5)
    cells = mh.attention_map(query, key, result.lse, bins=2)
    torch.testing.assert_close(cells, mh.attention_map(query, wide, result.lse, bins=2))


@pytest.mark.parametrize("heads", [(6, 2), (6, 3), (6, 1)], ids=str)
def test_a_layer_s_shared_heads_are_trained_by_their_group(heads: tuple[int, int]) -> None:
    """A layer whose KV heads are written out once for each query head: gradients add up."""
    few = mh.MultiHeadAttention(12, heads[0], num_kv_heads=heads[1], head_dim=5).double()
    many = mh.MultiHeadAttention(12, heads[0], head_dim=5).double()
    group = heads[0] // heads[1]
    sizes = [5 * heads[0], 5 * heads[1], 5 * heads[1]]
    q, k, v = few.qkv_proj.weight.detach().split(sizes)
    k, v = (x.unflatten(0, (-1, 5)).repeat_interleave(group, 0).flatten(0, 1) for x in (k, v))
    with torch.no_grad():
        many.qkv_proj.weight.copy_(torch.cat((q, k, v)))
        many.out_proj.load_state_dict(few.out_proj.state_dict())
    x = draw(2, 7, 12, seed=1, dtype=torch.float64)
    outs = [layer(x, mask=mh.Causal()) for layer in (few, many)]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-12)
    (got,) = torch.autograd.grad(outs[0].square().sum(), few.qkv_proj.weight)
    (apart,) = torch.autograd.grad(outs[1].square().sum(), many.qkv_proj.weight)
    q, k, v = apart.chunk(3)
    k, v = (x.unflatten(0, (heads[1], group, 5)).sum(1).flatten(0, 1) for x in (k, v))
    torch.testing.assert_close(got, torch.cat((q, k, v)), rtol=0, atol=1e-12)
