"""The smallest, the largest and the most awkward shapes that are legal.

Users met crashes on empty tensors, values read beyond the keys, weights of no shape, and limits on
the product of batch and heads. What is refused stands in test_validation.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import multihead as mh
from serving import BACKENDS, FLOATS, assert_call, assert_gradients, draw, draw_qkv, require_serving

# batch, heads, KV heads, queries, keys, D, Dv
EMPTY = [
    (0, 2, 1, 3, 5, 4, 4),
    (2, 0, 0, 3, 5, 4, 4),
    (2, 2, 1, 0, 5, 4, 4),
    (2, 2, 1, 3, 0, 4, 4),
    (2, 2, 1, 0, 0, 4, 4),
    (0, 0, 0, 0, 0, 1, 1),
    (2, 2, 1, 3, 5, 4, 0),
]
AWKWARD = [
    (1, 1, 1, 1, 1, 1, 1),
    (1, 1, 1, 1, 2, 1, 3),
    (1, 1, 1, 2, 1, 288, 1),
    (3, 1, 1, 1, 257, 8, 8),
    (1, 7, 7, 31, 1, 8, 8),
    (1, 2, 1, 127, 131, 7, 11),
    (1, 2, 2, 263, 67, 13, 3),
    (1, 1, 1, 17, 1031, 4, 4),
    (1, 64, 2, 5, 7, 3, 3),
    (37, 2, 1, 3, 5, 4, 4),
    (1, 1, 1, 5, 7, 1031, 2),
    (1, 1, 1, 5, 7, 2, 1031),
]
MASKS = {
    "none": None,
    "causal": mh.Causal(),
    "window": mh.Window(3, 2, keep_first=1),
    "two windows": mh.Window(3, 0, keep_first=1) & mh.Window(1, 0, keep_first=2),
    "prefix": mh.PrefixCausal(2),
    "start": mh.Causal() & mh.QueryStart(1),
    "bools": mh.Dense(torch.ones(1, 1, 1, 1).bool()),
}


def tensors(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, kv_heads, queries, keys, head_dim, value_dim = shape
    return draw_qkv(
        (batch, heads, queries, head_dim), (batch, kv_heads, keys, head_dim), value_dim, dtype=dtype
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [*EMPTY, *AWKWARD], ids=str)
def test_a_legal_shape(shape: tuple[int, ...], backend: str, dtype: torch.dtype) -> None:
    require_serving(backend, dtype)
    for name, mask in MASKS.items():
        result = assert_call(tensors(shape, dtype), backend, mask=mask)
        batch, heads, _, queries, keys, _, value_dim = shape
        assert result.out.shape == (batch, heads, queries, value_dim), name
        weights = result.weights(slice(None), slice(None))
        assert weights.shape == (batch, heads, queries, keys), name
        if keys == 0:
            assert not bool(result.out.any())
            assert bool((result.lse == -torch.inf).all())


@pytest.mark.parametrize("shape", [*EMPTY, *AWKWARD], ids=str)
def test_a_legal_shape_with_everything(shape: tuple[int, ...]) -> None:
    """Sinks, bias, softcap and per-sample rules on it, forward and backward."""
    batch, heads, _, queries, keys, *_ = shape
    for backend, bias in itertools.product(BACKENDS, ("alibi", "full", "over keys")):
        slopes, full = draw(heads, seed=2).abs(), draw(batch, heads, queries, keys, seed=3)
        options: dict[str, object] = {
            "bias": {"alibi": mh.ALiBi(slopes), "full": full, "over keys": full[:1, :1, :1]}[bias]
            if batch and heads and queries else mh.ALiBi(slopes),
            "softcap": 2.0,
            "sinks": draw(heads, seed=4),
            "mask": mh.KeyPadding(draw(batch, keys, seed=5) < 0.8) & mh.PrefixCausal(1),
        }  # fmt: skip
        if not mh.explain(*tensors(shape)).reasons[backend]:
            assert_call(tensors(shape), backend, **options)
        assert_gradients(tensors(shape), **options)
        assert_gradients(tensors(shape, torch.float64), **options)


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_pieces_of_an_empty_matrix(shape: tuple[int, ...]) -> None:
    query, key, value = tensors(shape)
    batch, heads, _, queries, keys, _, _ = shape
    result = mh.attention_with_stats(query, key, value)
    received, mean = mh.received_attention(query, key, result.lse)
    assert received.shape == mean.shape == (batch, heads, keys)
    assert not bool(received.any()) or keys
    cells = mh.attention_map(query, key, result.lse, bins=3)
    assert cells.shape == (batch, heads, min(queries, 3), min(keys, 3))
    cost = mh.explain(query, key, value, mask=mh.Causal()).cost
    assert cost.exponentials == batch * heads * mh.Causal().visible_pairs(queries, keys)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_more_samples_than_a_grid_dimension(backend: str, dtype: torch.dtype) -> None:
    require_serving(backend, dtype)
    query, key, value = draw_qkv((70_000, 1, 10, 16), (70_000, 1, 10, 16), dtype=dtype)
    out = mh.attention(query, key, value, backend=backend)
    for part in (slice(0, 1), slice(65_534, 65_538), slice(69_999, 70_000)):
        alone = mh.attention(query[part], key[part], value[part], backend=backend)
        torch.testing.assert_close(out[part], alone, rtol=0, atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "lengths", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0), (2, 1, 1)], ids=str
)
def test_a_layer_on_empty_inputs(lengths: tuple[int, int, int]) -> None:
    batch, queries, keys = lengths
    layer = mh.MultiHeadAttention(12, 4, num_kv_heads=2, context_dim=9, out_bias=True)
    x, context = torch.randn(batch, queries, 12), torch.randn(batch, keys, 9)
    x.requires_grad_()
    out, heads = layer.forward_with_stats(x, context, mask=mh.Causal(), stats=mh.STATISTICS)
    assert out.shape == (batch, queries, 12)
    assert heads.weights(slice(None), slice(None)).shape == (batch, 4, queries, keys)
    out.sum().backward()
    assert x.grad.shape == x.shape
    if keys == 0:
        assert torch.equal(out, layer.out_proj.bias.expand_as(out))
    alone = mh.MultiHeadAttention(12, 4)
    assert alone(x.detach(), mask=mh.Causal()).shape == x.shape
