"""Weights from torch's layers and back: the same function, the same gradients, the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from close import assert_close
from layers import formula, orders, reordered, worst

BATCH, LENGTH, CONTEXT, WIDTH, HEADS = 2, 13, 7, 20, 4
KINDS: dict[str, dict[str, object]] = {
    "self": {},
    "cross": {"context_dim": WIDTH},
    "cross of another width": {"context_dim": 11},
}


def build(kind: str, **options: object) -> mh.MultiHeadAttention:
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(WIDTH, HEADS, **KINDS[kind], **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def inputs_of(kind: str) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=draw)
    if kind == "self":
        return (x,)
    return x, torch.randn(BATCH, CONTEXT, KINDS[kind]["context_dim"], generator=draw)


def by_torch(module: nn.MultiheadAttention, x: Tensor, context: Tensor | None = None) -> Tensor:
    context = x if context is None else context
    visible = torch.ones(x.shape[1], context.shape[1], dtype=torch.bool).tril(2)
    return module(x, context, context, attn_mask=~visible, need_weights=False)[0]


def dense(layer: mh.MultiHeadAttention, *inputs: Tensor) -> Tensor:
    return formula(layer, *inputs, mask=mh.Window(None, 2) & mh.QueryStart(0))


def by_us(layer: mh.MultiHeadAttention, x: Tensor, context: Tensor | None = None) -> Tensor:
    return layer(x, context, mask=mh.Window(None, 2) & mh.QueryStart(0))


def outcome(
    model: nn.Module, run: Callable[..., Tensor], inputs: tuple[Tensor, ...], dtype: torch.dtype
) -> list[Tensor]:
    """The output, and the gradients of the inputs and of every weight, in torch's order."""
    model = copy.deepcopy(model).to(dtype)
    leaves = [it.to(dtype, copy=True).requires_grad_() for it in inputs]
    out = run(model, *leaves)
    weight = torch.linspace(-1, 2, out.numel(), dtype=dtype).view_as(out)
    (out * weight).sum().backward()
    return [out, *(it.grad for it in leaves), *gradients(model)]


def gradients(model: nn.Module) -> list[Tensor]:
    """Of query, key, value and output projections, their weights and then their biases."""
    if isinstance(model, mh.MultiHeadAttention):
        parts = [part for name, part in model.named_children() if name.endswith("proj")]
        inputs, out = parts[:-1], parts[-1]
        weights = [rows for it in inputs for rows in it.weight.grad.split(WIDTH)]
        biases = [it.bias.grad for it in inputs if it.bias is not None]
    else:
        out = model.out_proj
        packed = model.in_proj_weight is not None
        weights = (
            list(model.in_proj_weight.grad.split(WIDTH))
            if packed
            else [model.q_proj_weight.grad, model.k_proj_weight.grad, model.v_proj_weight.grad]
        )
        biases = [] if model.in_proj_bias is None else [model.in_proj_bias.grad]
    out_bias = [] if out.bias is None else [out.bias.grad]
    return [*weights, out.weight.grad, *([torch.cat(biases)] if biases else []), *out_bias]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_function_both_ways(kind: str, bias: bool) -> None:
    layer = build(kind, qkv_bias=bias, out_bias=bias)
    inputs = inputs_of(kind)
    module = layer.to_torch()
    back = mh.MultiHeadAttention.from_torch(module, cross=kind != "self")
    exact = outcome(module, by_torch, inputs, torch.float64)
    variants = [outcome(module, by_torch, inputs, torch.float32)]
    for order in orders():
        variants.append(outcome(reordered(layer, order), dense, inputs, torch.float32))
    plain = [worst(*each) for each in zip(exact, zip(*variants, strict=True), strict=True)]
    for ours in (layer, back):
        found = outcome(ours, by_us, inputs, torch.float32)
        for place, triple in enumerate(zip(found, exact, plain, strict=True)):
            assert_close(*triple, factor=3.0 if place else 2.0, what=f"number {place} of {kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_are_the_same_numbers(kind: str) -> None:
    layer = build(kind, qkv_bias=True, out_bias=True, dropout=0.25).double().eval()
    module = layer.to_torch(batch_first=False)
    assert not module.batch_first
    assert not module.training
    assert module.dropout == 0.25
    back = mh.MultiHeadAttention.from_torch(module, cross=kind != "self")
    assert back.dropout == 0.25
    assert not back.training
    for name, weight in layer.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight), name
    again = back.to_torch(batch_first=False)
    for name, weight in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(weight.abs().max() > 0 for weight in layer.state_dict().values())


@pytest.mark.parametrize("which", ["qkv_bias", "out_bias"])
def test_a_bias_that_is_missing_is_zero_there(which: str) -> None:
    layer = build("self", **{which: True})
    module = layer.to_torch()
    missing = module.out_proj.bias if which == "qkv_bias" else module.in_proj_bias
    assert torch.equal(missing, torch.zeros_like(missing))
    (x,) = inputs_of("self")
    torch.testing.assert_close(by_torch(module, x), by_us(layer, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads=2"),
        ({"head_dim": 6}, "head_dim=6"),
        ({"value_dim": 3}, "value_dim=3"),
        ({"scale": 1.0}, r"scale=1\.0"),
        ({"rope": mh.RoPE(), "head_dim": 10}, r"head_dim=10, rope=RoPE"),
        ({"qk_norm": nn.RMSNorm}, "qk_norm"),
        ({"window": 3}, "window=Window"),
        ({"softcap": 2.0, "sinks": True}, r"softcap=2\.0, sinks"),
    ],
)
def test_what_torch_does_not_have_is_refused(options: dict[str, object], message: str) -> None:
    layer = mh.MultiHeadAttention(WIDTH, HEADS, **options)
    with pytest.raises(mh.ArgumentError, match=f"no counterpart for {message}"):
        layer.to_torch()


def test_a_replaced_projection_is_refused() -> None:
    layer = build("self")
    layer.out_proj = nn.Sequential(layer.out_proj)
    with pytest.raises(mh.DtypeError, match=r"reads the weights of out_proj.*got Sequential"):
        layer.to_torch()


ENCODER, DECODER = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer


def torch_layer(kind: type[nn.Module], **options: object) -> nn.Module:
    torch.manual_seed(2)
    layer = kind(WIDTH, HEADS, 31, batch_first=True, **{"dropout": 0.0, **options})
    for parameter in layer.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.3)
    return layer


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", [ENCODER, DECODER])
def test_a_block_is_torchs_layer(kind: type[nn.Module], norm_first: bool, activation: str) -> None:
    layer = torch_layer(kind, norm_first=norm_first, activation=activation, layer_norm_eps=1e-3)
    block = mh.TransformerBlock.from_torch(layer)
    inputs = inputs_of("self" if kind is ENCODER else "cross")
    hidden = nn.Transformer.generate_square_subsequent_mask(LENGTH) < 0

    def theirs(model: nn.Module, *given: Tensor) -> Tensor:
        if kind is ENCODER:
            return model(*given, src_mask=hidden)
        return model(*given, tgt_mask=hidden)

    def run(model: nn.Module, call: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        model = copy.deepcopy(model).to(dtype)
        leaves = [it.to(dtype, copy=True).requires_grad_() for it in inputs]
        out = call(model, *leaves)
        return [out, *torch.autograd.grad(out.sin().sum(), leaves)]

    exact = run(layer, theirs, torch.float64)
    variants = [run(reordered(layer, order), theirs, torch.float32) for order in orders()]
    plain = [worst(*each) for each in zip(exact, zip(*variants, strict=True), strict=True)]
    found = run(block, lambda m, *it: m(*it, mask=mh.Causal()), torch.float32)
    for place, triple in enumerate(zip(found, exact, plain, strict=True)):
        assert_close(*triple, factor=3.0 if place else 2.0, what=f"number {place}")
    with torch.no_grad():
        block.eval()
        assert_close(block(*inputs, mask=mh.Causal()), exact[0], plain[0], what="eval")


def test_a_layer_without_biases_converts() -> None:
    layer = torch_layer(ENCODER, bias=False)
    block = mh.TransformerBlock.from_torch(layer)
    assert not any("bias" in name for name in block.state_dict())
    count = sum(p.numel() for p in layer.parameters())
    assert sum(p.numel() for p in block.parameters()) == count
    (x,) = inputs_of("self")
    torch.testing.assert_close(block(x), layer(x), rtol=1e-5, atol=1e-5)


def test_a_converted_layer_keeps_dropout_and_mode() -> None:
    block = mh.TransformerBlock.from_torch(torch_layer(DECODER, dropout=0.5))
    assert block.training
    shares = (block.dropout.p, block.feed_forward.dropout.p, block.attention.dropout)
    assert shares == (0.5, 0.5, 0.5)
    assert block.cross_attention.dropout == 0.5
    assert not mh.TransformerBlock.from_torch(torch_layer(DECODER).eval()).training


def test_only_layers_that_a_block_can_be_are_converted() -> None:
    with pytest.raises(mh.DtypeError, match="got Linear"):
        mh.TransformerBlock.from_torch(nn.Linear(3, 3))
    layer = torch_layer(ENCODER)
    layer.dropout2.p = 0.3
    with pytest.raises(mh.ArgumentError, match=r"differ: 0\.0, 0\.3"):
        mh.TransformerBlock.from_torch(layer)
