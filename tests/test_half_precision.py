"""Half precision: overflow in the scores, float32 masks beside it, and autocast.

Users met inf - inf = NaN in float16 although the scaled scores are moderate, values beyond 65504,
and dtype errors that appear only inside of autocast, or only in one mode of a layer.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

import multihead as mh
from serving import BACKENDS, assert_call, assert_gradients, draw, draw_qkv, require_serving

HALVES = [torch.float16, torch.bfloat16]
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [256.0, 3e4])
def test_scores_beyond_the_largest_half(size: float, backend: str, dtype: torch.dtype) -> None:
    """Raw scores of 4e6 and 6e10, scaled ones that nearly agree: no NaN, and the right weights."""
    require_serving(backend, dtype)
    query = torch.full((1, 2, 4, 64), size, dtype=dtype)
    key = query.clone()
    key[:, :, 2, 5:] *= 1 - 1 / 64
    value = draw(1, 2, 4, 64, seed=1, dtype=dtype)
    for mask in (None, mh.Causal()):
        for scale in (None, 1 / size**2, -(1 / size**2), 1.0):
            result = assert_call((query, key, value), backend, mask=mask, scale=scale)
            assert bool(result.out.isfinite().all())
            assert bool(result.lse.isfinite().all())
    assert_gradients((query, key, value), mask=mh.Causal(), scale=1 / size**2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_values_beyond_the_largest_half(backend: str) -> None:
    """Every value is 6e4, and so is their mean; its partial sums are not."""
    require_serving(backend, torch.float16)
    query, key, _ = draw_qkv((1, 2, 5, 8), (1, 2, 70, 8), dtype=torch.float16)
    value = torch.full((1, 2, 70, 8), 6e4, dtype=torch.float16)
    for stats in ((), mh.STATISTICS):
        out = mh.attention_with_stats(query, key, value, stats=stats, backend=backend).out
        assert torch.equal(out, value[:, :, :5])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_biases_and_sinks_are_not_rounded_to_half(backend: str, dtype: torch.dtype) -> None:
    """Values that differ in float32 alone, and the lowest float32, which no half can hold."""
    require_serving(backend, dtype)
    tensors = draw_qkv((1, 2, 5, 8), (1, 2, 7, 8), dtype=dtype)
    fine = 1000 + torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) / 4
    slopes = torch.tensor([0.123456789, 0.987654321])
    hiding = torch.zeros(5, 7)
    hiding[:, 5:] = LOWEST
    hiding[3] = LOWEST
    for options in (
        {"bias": fine},
        {"bias": fine.double()},
        {"bias": mh.ALiBi(slopes)},
        {"bias": hiding},
        {"bias": hiding, "mask": mh.Causal()},
        {"bias": fine, "sinks": torch.tensor([1000.123, 999.987])},
        {"sinks": torch.tensor([LOWEST, 0.1234567])},
    ):
        result = assert_call(tensors, backend, **options)
        assert result.out.dtype == dtype
        assert result.lse.dtype == torch.float32
        assert bool(result.out.isfinite().all())
    whole = mh.attention_with_stats(*tensors, bias=fine, stats=("lse",), backend=backend).lse
    rough = mh.attention_with_stats(
        *tensors, bias=fine.to(dtype), stats=("lse",), backend=backend
    ).lse
    assert not torch.allclose(whole, rough, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_come_in_each_input_s_dtype(dtype: torch.dtype) -> None:
    query, key, value = (
        x.requires_grad_() for x in draw_qkv((1, 2, 5, 8), (1, 2, 7, 8), dtype=dtype)
    )
    bias = draw(1, 1, 5, 7, seed=4).requires_grad_()
    sinks = draw(2, seed=5).double().requires_grad_()
    slopes = draw(2, seed=6).abs().to(dtype).requires_grad_()
    for options in ({"bias": bias, "sinks": sinks}, {"bias": mh.ALiBi(slopes)}):
        mh.attention(query, key, value, **options).float().square().sum().backward()
    for leaf in (query, key, value, bias, sinks, slopes):
        assert leaf.grad.dtype == leaf.dtype
        assert bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize(
    "dtypes",
    [
        pairs
        for pairs in itertools.product((torch.float32, torch.bfloat16, torch.float16), repeat=3)
        if len(set(pairs)) > 1
    ],
    ids=str,
)
def test_a_mix_of_dtypes_is_refused_by_name(dtypes: tuple[torch.dtype, ...]) -> None:
    tensors = draw_qkv((1, 2, 5, 8), (1, 2, 7, 8))
    mixed = [x.to(dtype) for x, dtype in zip(tensors, dtypes, strict=True)]
    odd = "key" if dtypes[1] != dtypes[0] else "value"
    with pytest.raises(mh.DtypeError, match=rf"{odd} is .*{odd}\.to\(query\.dtype\)"):
        mh.attention(*mixed)


@pytest.mark.parametrize("amp", HALVES, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_a_layer_under_autocast(cross: bool, training: bool, amp: torch.dtype) -> None:
    """Statistics asked for or not, gradients or not: one dtype, the same numbers, float32 masks."""
    layer = mh.MultiHeadAttention(12, 4, context_dim=9 if cross else None, qkv_bias=True)
    layer.train(training)
    x = draw(2, 7, 12, seed=1)
    context = draw(2, 7, 9, seed=2) if cross else None
    hiding = torch.zeros(7, 7).masked_fill(~torch.ones(7, 7).bool().tril(), LOWEST)
    masks = {"mask": mh.Causal()}, {"bias": hiding}
    outs: list[Tensor] = []
    for grad, options in itertools.product(
        (True, False), ({"mask": mh.Causal()}, {"bias": hiding})
    ):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=amp):
            outs.append(layer(x, context, **options))
            out, heads = layer.forward_with_stats(x, context, **options)
            outs.append(out)
            weights = heads.weights(slice(None), slice(None))
        assert heads.lse.dtype == weights.dtype == torch.float32
        assert bool(weights.isfinite().all())
    assert {out.dtype for out in outs} == {amp}
    for out in outs:
        assert torch.equal(out, outs[0])
    wholly = copy.deepcopy(layer).to(amp)
    assert torch.equal(
        outs[0], wholly(x.to(amp), None if context is None else context.to(amp), **masks[0])
    )


@pytest.mark.parametrize("amp", HALVES, ids=str)
def test_a_layer_trains_under_autocast(amp: torch.dtype) -> None:
    layer = mh.MultiHeadAttention(12, 4, num_kv_heads=2)
    x = draw(2, 7, 12, seed=1).requires_grad_()
    with torch.autocast("cpu", dtype=amp):
        loss = layer(x, mask=mh.Causal()).float().square().sum()
    loss.backward()
    for leaf in (x, *layer.parameters()):
        assert leaf.grad.dtype == torch.float32
        assert bool(leaf.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=str)
def test_a_layer_of_another_dtype(dtype: torch.dtype) -> None:
    layer = mh.MultiHeadAttention(12, 4).to(dtype)
    x = draw(2, 7, 12, seed=1, dtype=dtype)
    out, heads = layer.forward_with_stats(x, mask=mh.Causal())
    assert out.dtype == dtype
    assert heads.entropy.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    with pytest.raises((mh.DtypeError, RuntimeError)):
        layer(x.float() if dtype != torch.float32 else x.double())
