"""torch.compile and torch.export of layers and blocks: one graph at every length, as in eager."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import multihead as mh

BATCH, WIDTH, CONTEXT_WIDTH = 2, 24, 10
LENGTHS = (5, 7, 1, 2)
RMS = partial(nn.RMSNorm, eps=1e-6)


def attention(**options: object) -> mh.MultiHeadAttention:
    return mh.MultiHeadAttention(WIDTH, 4, **options)


def decoder_block(**options: object) -> mh.TransformerBlock:
    inside = attention(
        num_kv_heads=2,
        rope=mh.RoPE(),
        qk_norm=RMS,
        window=4,
        softcap=3.0,
        sinks=True,
        qkv_bias=True,
    )
    return mh.TransformerBlock(
        inside, mh.GatedFeedForward(WIDTH, 31), norm=RMS, norm_placement="sandwich", **options
    )


MODULES = {
    "plain": attention,
    "rope": partial(attention, rope=mh.RoPE()),
    "partial interleaved rope": partial(attention, rope=mh.RoPE(rotary_dim=4, interleaved=True)),
    "window, softcap and sinks": partial(attention, window=3, softcap=2.0, sinks=True),
    "grouped": partial(attention, num_kv_heads=2, qk_norm=RMS, value_dim=3, scale=0.0),
    "decoder block": decoder_block,
}
# What is true of the block is true of its parts; these are traced one by one in the long tests.
NAMES = [
    pytest.param(name, marks=[] if name in ("plain", "decoder block") else pytest.mark.proof)
    for name in MODULES
]


class Counting:
    """A compiler backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        self.graphs += 1
        return graph


def build(name: str) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return MODULES[name]()


def run_at_every_length(module: nn.Module, *, unbacked: bool) -> int:
    """How many graphs serve all lengths; each gives the bits of eager."""
    counting = Counting()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend=counting)
    with torch.no_grad():
        for length in LENGTHS:
            x = torch.randn(BATCH, length, WIDTH)
            expected = module(x, mask=mh.Causal())
            if unbacked:
                torch._dynamo.decorators.mark_unbacked(x, 1)
            torch.testing.assert_close(compiled(x, mask=mh.Causal()), expected, rtol=0, atol=0)
    return counting.graphs


@pytest.mark.parametrize("name", NAMES)
def test_changing_lengths_share_one_graph(name: str) -> None:
    """Also length 1, of which torch makes a constant unless told that nothing is known of it."""
    assert run_at_every_length(build(name), unbacked=True) == 1


@pytest.mark.proof
def test_torch_sets_length_one_apart_and_nothing_else() -> None:
    assert run_at_every_length(build("decoder block"), unbacked=False) == 2


@pytest.mark.parametrize(
    "name", ["window, softcap and sinks", pytest.param("decoder block", marks=pytest.mark.proof)]
)
def test_compiled_training_gives_the_gradients_of_eager(name: str) -> None:
    module = build(name)
    compiled = torch.compile(
        copy.deepcopy(module), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length in LENGTHS[:2]:
        x = torch.randn(BATCH, length, WIDTH)
        for model in (module, compiled):
            model.zero_grad()
            model(x, mask=mh.Causal()).square().sum().backward()
        for got, want in zip(compiled.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.proof
def test_the_default_compiler_agrees_at_every_length() -> None:
    module = build("decoder block")
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in LENGTHS:
            x = torch.randn(BATCH, length, WIDTH)
            expected = module(x, mask=mh.Causal())
            torch.testing.assert_close(compiled(x, mask=mh.Causal()), expected)


def test_a_compiled_cross_attention_follows_both_lengths() -> None:
    torch._dynamo.reset()
    counting = Counting()
    block = decoder_block(cross_attention=attention(context_dim=CONTEXT_WIDTH))
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counting)
    with torch.no_grad():
        for length, keys in ((5, 9), (7, 3), (2, 4)):
            x, context = torch.randn(BATCH, length, WIDTH), torch.randn(BATCH, keys, CONTEXT_WIDTH)
            expected = block(x, context, mask=mh.Causal())
            actual = compiled(x, context, mask=mh.Causal())
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert counting.graphs == 1


@pytest.mark.parametrize("kind", ["growing", pytest.param("static", marks=pytest.mark.proof)])
def test_decoding_compiles_to_one_graph(kind: str) -> None:
    """Steps of one token after a prefill; the graph of the prefill aside."""
    module, counting = build("decoder block"), Counting()
    cache = mh.KVCache() if kind == "growing" else mh.StaticKVCache(BATCH, 2, 12, 6)
    x = torch.randn(BATCH, 9, WIDTH)

    @partial(torch.compile, fullgraph=True, dynamic=True, backend=counting)
    def step(token: Tensor, cache: mh.Cache) -> Tensor:
        return module(token, mask=mh.Causal(), cache=cache)

    with torch.no_grad():
        expected = module(x, mask=mh.Causal())
        module(x[:, :4], mask=mh.Causal(), cache=cache)
        steps = [step(x[:, i : i + 1], cache) for i in range(4, 9)]
    torch.testing.assert_close(torch.cat(steps, dim=1), expected[:, 4:])
    assert counting.graphs == 1


@pytest.mark.parametrize("kind", ["growing", "static"])
def test_decoding_beside_a_context_compiles_to_one_graph(kind: str) -> None:
    """A static cache may have room for more than the context."""
    torch._dynamo.reset()
    counting = Counting()
    layer = attention(context_dim=CONTEXT_WIDTH)
    cache = mh.KVCache() if kind == "growing" else mh.StaticKVCache(BATCH, 4, 12, 6)
    x, context = torch.randn(BATCH, 9, WIDTH), torch.randn(BATCH, 7, CONTEXT_WIDTH)

    @partial(torch.compile, fullgraph=True, dynamic=True, backend=counting)
    def step(token: Tensor, cache: mh.Cache) -> Tensor:
        return layer(token, cache=cache)

    with torch.no_grad():
        expected = layer(x, context)
        layer(x[:, :4], context, cache=cache)
        steps = [step(x[:, i : i + 1], cache) for i in range(4, 9)]
        rest = layer(x[:, 4:], cache=cache)
    torch.testing.assert_close(torch.cat(steps, dim=1), expected[:, 4:])
    torch.testing.assert_close(rest, expected[:, 4:])
    assert counting.graphs == 1


class Causal(nn.Module):
    """A module whose mask is its own, for export."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x, mask=mh.Causal())


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_module_follows_the_length(name: str) -> None:
    module = Causal(build(name)).eval()
    length = torch.export.Dim("length", min=1, max=64)
    example = torch.randn(BATCH, 6, WIDTH)
    program = torch.export.export(module, (example,), dynamic_shapes=({1: length},)).module()
    with torch.no_grad():
        for each in (1, 9, 6):
            x = torch.randn(BATCH, each, WIDTH)
            torch.testing.assert_close(program(x), module(x), rtol=0, atol=0)
