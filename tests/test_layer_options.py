"""Every option of MultiHeadAttention against the textbook's formula, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from close import assert_close
from layers import by_formula, formula, orders, reordered, worst

BATCH, LENGTH, CONTEXT, WIDTH, CONTEXT_WIDTH = 2, 13, 7, 20, 11
RMS = partial(nn.RMSNorm, eps=1e-5)
Options = dict[str, object]

CASES: dict[str, Options] = {
    "queries and keys normed": {"qk_norm": RMS},
    "window": {"window": 4},
    "window to both sides": {"window": mh.Window(2, 3)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "scale": {"scale": -0.7},
    "rope": {"rope": mh.RoPE(base=100.0), "head_dim": 6},
    "biases": {"qkv_bias": True, "out_bias": True},
    "heads wider than the input": {"head_dim": 10, "value_dim": 3},
    "what a cross-attention may have": {
        "qk_norm": RMS, "softcap": 2.0, "sinks": True, "scale": 0.9, "qkv_bias": True,
        "out_bias": True, "head_dim": 6, "value_dim": 7, "num_kv_heads": 2,
    },
}  # fmt: skip
CASES["all together"] = {**CASES["what a cross-attention may have"], "window": 5, "rope": mh.RoPE()}
CROSS = [name for name, options in CASES.items() if not {"window", "rope"} & set(options)]


def build(options: Options, **more: object) -> mh.MultiHeadAttention:
    """A layer with every number drawn, so that none that is lost goes unseen."""
    torch.manual_seed(1)
    layer = mh.MultiHeadAttention(WIDTH, 4, **options, **more)
    for parameter in layer.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=0.5)
    return layer


def mask_and_bias(keys: int) -> Options:
    draw = torch.Generator().manual_seed(2)
    visible = torch.arange(keys) >= torch.tensor([[0], [3]])
    return {
        "mask": mh.KeyPadding(visible),
        "bias": torch.randn(4, 1, keys, generator=draw)[None],
    }


@pytest.mark.parametrize("name", CASES)
def test_self_attention(name: str) -> None:
    layer = build(CASES[name])
    x = torch.randn(BATCH, LENGTH, WIDTH)
    for call in ({}, mask_and_bias(LENGTH), {"mask": mh.Causal()}):
        check(layer, x, None, call)


@pytest.mark.parametrize("name", CROSS)
def test_cross_attention(name: str) -> None:
    layer = build(CASES[name], context_dim=CONTEXT_WIDTH)
    x, context = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, CONTEXT, CONTEXT_WIDTH)
    for call in ({}, mask_and_bias(CONTEXT)):
        check(layer, x, context, call)


def check(layer: mh.MultiHeadAttention, x: Tensor, context: Tensor | None, call: Options) -> None:
    """The output and the gradients of everything; the statistics' output in the same bits."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))

    def run(model: nn.Module, compute: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        model = copy.deepcopy(model).to(dtype)
        leaves = [it.to(dtype, copy=True).requires_grad_() for it in (x, context) if it is not None]
        out = compute(model, *leaves, **call)
        inputs = [*leaves, *model.parameters()]
        return [out, *torch.autograd.grad((out * weight.to(dtype)).sum(), inputs)]

    ours = run(layer, lambda model, *inputs, **call: model(*inputs, **call), torch.float32)
    exact = run(layer, formula, torch.float64)
    variants = [run(reordered(layer, order), formula, torch.float32) for order in orders()]
    plain = [worst(*each) for each in zip(exact, zip(*variants, strict=True), strict=True)]
    names = ["x", *(["context"] if context is not None else [])]
    names += [name for name, _ in layer.named_parameters()]
    assert_close(ours[0], exact[0], plain[0], what="output")
    for name, triple in zip(names, zip(ours[1:], exact[1:], plain[1:], strict=True), strict=True):
        assert_close(*triple, factor=3.0, what=f"gradient of {name}")
    with torch.no_grad():
        inputs = (x,) if context is None else (x, context)
        out, heads = layer.forward_with_stats(*inputs, **call, stats=("max_weight",), bins=3)
        assert_close(out, exact[0], plain[0], what="output beside statistics")
    assert heads.map.shape == (BATCH, 4, 3, 3)
    assert heads.max_weight.shape == (BATCH, 4, LENGTH)


def test_a_window_is_intersected_with_every_kind_of_mask() -> None:
    layer = build({"window": 4})
    x = torch.randn(BATCH, LENGTH, WIDTH)
    visible = torch.rand(LENGTH, LENGTH) < 0.7
    visible.fill_diagonal_(True)
    windowless = build({})
    assert torch.equal(layer(x), windowless(x, mask=mh.SlidingWindow(4)))
    masks = (mh.Causal(), mh.Dense(visible), mh.KeyPadding(torch.arange(LENGTH)[None] < 9))
    for mask in masks:
        joined = mask & mh.SlidingWindow(4)
        assert torch.equal(layer(x, mask=mask), windowless(x, mask=joined))
    assert torch.equal(layer(x, mask=visible), layer(x, mask=mh.Dense(visible)))


def test_queries_and_keys_are_normed_by_what_the_caller_builds() -> None:
    layer = mh.MultiHeadAttention(WIDTH, 4, qk_norm=partial(nn.LayerNorm, eps=1e-12))
    assert isinstance(layer.q_norm, nn.LayerNorm)
    assert layer.q_norm is not layer.k_norm
    assert layer.q_norm.normalized_shape == (5,)
    # Scores do not depend on the size of what is normed.
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    layer.double()
    with torch.no_grad():
        before = layer.forward_with_stats(x, stats=("max_logit",))[1].max_logit
        layer.qkv_proj.weight[: 2 * WIDTH] *= 1000
        after = layer.forward_with_stats(x, stats=("max_logit",))[1].max_logit
    torch.testing.assert_close(after, before, rtol=1e-9, atol=0)


def test_sinks_start_at_zero_and_take_weight() -> None:
    layer = mh.MultiHeadAttention(WIDTH, 4, sinks=True)
    assert torch.equal(layer.sinks, torch.zeros(4))
    x = torch.randn(BATCH, 1, WIDTH)
    weight = layer.forward_with_stats(x, stats=("max_weight",))[1].max_weight
    assert (weight < 1).all()


@pytest.mark.parametrize(("head_dim", "value_dim"), [(3, 5), (16, 8), (8, 16), (1, 1)])
def test_the_scale_is_that_of_the_queries(head_dim: int, value_dim: int) -> None:
    layer = build({"head_dim": head_dim, "value_dim": value_dim, "num_kv_heads": 2})
    x = torch.randn(BATCH, LENGTH, WIDTH)
    left_out = layer(x)
    layer.scale = head_dim**-0.5
    assert torch.equal(layer(x), left_out)
    assert_close(left_out, by_formula(layer, x.double()), by_formula(layer, x))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"softcap": 0.0}, mh.ArgumentError, "softcap must be above 0; got 0.0"),
        ({"softcap": "x"}, mh.DtypeError, "softcap must be a number; got 'x'"),
        ({"window": 0}, mh.ArgumentError, "window must be at least 1; got 0"),
        ({"window": 2.0}, mh.DtypeError, r"window must be an integer; got 2\.0\. Write 2"),
        ({"window": mh.Causal()}, mh.DtypeError, r"must be an int or a Window; got Causal\(\)"),
        ({"window": 3, "context_dim": 5}, mh.ArgumentError, "window compares the positions"),
        ({"rope": True}, mh.DtypeError, r"rope must be a multihead\.RoPE or None; got True"),
        ({"rope": mh.RoPE(), "head_dim": 5}, mh.ArgumentError, "head_dim must be even"),
        ({"rope": mh.RoPE(), "context_dim": 5}, mh.ArgumentError, "rope compares the positions"),
        ({"qk_norm": True}, mh.DtypeError, r"got True\. Write qk_norm=torch\.nn\.RMSNorm"),
        ({"qk_norm": nn.RMSNorm(5)}, mh.DtypeError, r"qk_norm must build a norm"),
        ({"qk_norm": nn.Linear}, mh.DtypeError, "qk_norm must build a norm"),
        ({"sinks": torch.zeros(4)}, mh.DtypeError, "sinks must be True or False; got Tensor"),
        ({"dropout": 1.5}, mh.ArgumentError, r"dropout must lie between 0 and 1; got 1\.5"),
        ({"dropout": True}, mh.DtypeError, "dropout must be a number from 0 to 1; got True"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: Options, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mh.MultiHeadAttention(WIDTH, 4, **options)


@pytest.mark.parametrize("rows", [None, 1, BATCH])
def test_positions_are_those_of_the_call(rows: int | None) -> None:
    layer = build({"rope": mh.RoPE(base=100.0), "head_dim": 6})
    x = torch.randn(BATCH, LENGTH, WIDTH)
    draw = torch.Generator().manual_seed(4)
    shape = (LENGTH,) if rows is None else (rows, LENGTH)
    positions = torch.randint(0, 99, shape, generator=draw)
    exact = by_formula(layer, x.double(), positions=positions)
    plain = [by_formula(reordered(layer, it), x, positions=positions) for it in orders()]
    out = layer(x, positions=positions)
    assert_close(out, exact, worst(exact, plain))
    rotation = layer.rope.rotation(positions, layer.head_dim)
    assert torch.equal(layer(x, positions=rotation), out)
    assert torch.equal(layer.forward_with_stats(x, positions=rotation)[0], out)
    counted = layer(x, positions=torch.arange(LENGTH))
    assert torch.equal(layer(x), counted)
    assert not torch.allclose(counted, out)


@pytest.mark.parametrize("rope", [mh.RoPE(interleaved=True), mh.RoPE(rotary_dim=4)])
def test_a_rotation_of_other_lanes_is_refused(rope: mh.RoPE) -> None:
    layer = build({"rope": mh.RoPE(), "head_dim": 6})
    rotation = rope.rotation(torch.arange(LENGTH), 6)
    with pytest.raises(mh.ArgumentError, match=r"the layer turns 6 with interleaved=False"):
        layer(torch.randn(BATCH, LENGTH, WIDTH), positions=rotation)


def test_positions_that_do_not_fit_are_refused() -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(mh.ArgumentError, match=r"rotates nothing.*rope=RoPE\(\)"):
        build({})(x, positions=torch.arange(LENGTH))
    cross = build({}, context_dim=CONTEXT_WIDTH)
    with pytest.raises(mh.ArgumentError, match="cross-attention compares no positions"):
        cross(x, torch.randn(BATCH, CONTEXT, CONTEXT_WIDTH), positions=torch.arange(LENGTH))
    layer = build({"rope": mh.RoPE(), "head_dim": 6})
    with pytest.raises(mh.ArgumentError, match=r"shape \(13,\) or \(2, 13\); got \(7,\)"):
        layer(x, positions=torch.arange(7))
    with pytest.raises(mh.DtypeError, match=r"positions must be integers; got float32"):
        layer(x, positions=torch.arange(13.0))
    for wrong in (mh.RoPE().rotation(torch.arange(7), 6), mh.RoPE().rotation(torch.arange(13), 4)):
        with pytest.raises(mh.ArgumentError, match="positions"):
            layer(x, positions=wrong)
    with pytest.raises(mh.DtypeError, match="positions must be integers or a Rotation; got list"):
        layer(x, positions=[1, 2])
