"""Heads taken out of a layer for good: equal to the whole layer with their outputs at zero."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import multihead as mh
from close import assert_close
from multihead.nn import Pruned, prune_heads
from multihead.nn.packed_linear import PackedLinear, Rows

WIDTH, LENGTH = 11, 7


def layer(heads=4, kv_heads=None, seed=5, **options):
    torch.manual_seed(seed)
    options = dict(head_dim=6, qkv_bias=True, out_bias=True) | options
    made = mh.MultiHeadAttention(WIDTH, heads, num_kv_heads=kv_heads, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made.double().eval()


def masked(whole, heads):
    """The definition: these heads' outputs are zero before the output projection."""
    reference = copy.deepcopy(whole)
    with torch.no_grad():
        for head in heads:
            columns = slice(head * whole.value_dim, (head + 1) * whole.value_dim)
            reference.out_proj.weight[:, columns] = 0
    return reference


def pruned(whole, heads):
    copied = copy.deepcopy(whole)
    prune_heads(copied, heads)
    return copied


def x(batch=2, dtype=torch.float64):
    return torch.randn(
        batch, LENGTH, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1)
    )


SELF = {
    "plain": {},
    "no biases": {"qkv_bias": False, "out_bias": False},
    "values of another width": {"value_dim": 3},
    "rope and normed": {"rope": mh.RoPE(), "qk_norm": nn.RMSNorm},
    "sinks": {"sinks": True},
    "softcap and scale": {"softcap": 2.0, "scale": 0.7},
    "a window": {"window": 3},
    "a window per head": {
        "window": mh.Window(torch.tensor([0, 1, 2, 5]), torch.tensor([0, 1, 0, 2]))
    },
}


@pytest.mark.parametrize("name", SELF)
@pytest.mark.parametrize("heads", [(), (1,), (0, 1), (1, 3), (3, 1, 3), (1, 2, 3), (0, 1, 2, 3)])
def test_a_pruned_layer_is_the_whole_one_with_those_heads_at_zero(name, heads):
    whole = layer(**SELF[name])
    got = pruned(whole, heads)
    assert got.num_heads == 4 - len(set(heads))
    expected = masked(whole, heads)
    torch.testing.assert_close(
        got(x(), mask=mh.Causal()), expected(x(), mask=mh.Causal()), rtol=0, atol=1e-12
    )
    # In float32 by the one tolerance, against the masked layer's own error.
    assert_close(got.float()(x().float()), expected(x()), expected.float()(x().float()))


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [
        ((0, 1), 1),
        ((2, 3), 1),
        ((0, 2), 2),
        ((1, 3), 2),
        ((1, 2), 2),
        ((0, 1, 2), 1),
        ((0, 1, 2, 3), 0),
    ],
)
def test_grouped_heads_take_their_kv_head_along_when_all_are_gone(heads, kv_heads):
    whole = layer(kv_heads=2, sinks=True, rope=mh.RoPE(), value_dim=5)
    got = pruned(whole, heads)
    assert got.num_kv_heads == kv_heads
    torch.testing.assert_close(got(x()), masked(whole, heads)(x()), rtol=0, atol=1e-12)


def test_a_context_is_read_by_the_heads_that_are_left():
    whole = layer(kv_heads=2, context_dim=9, value_dim=5)
    context = torch.randn(2, 5, 9, dtype=torch.float64)
    for heads in ((0, 1), (1, 3), (0, 1, 2, 3)):
        got = pruned(whole, heads)
        torch.testing.assert_close(
            got(x(), context), masked(whole, heads)(x(), context), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("heads", [(1,), (0,)])
def test_part_of_a_group_is_refused(heads):
    whole = layer(kv_heads=2)
    before = copy.deepcopy(whole.state_dict())
    with pytest.raises(
        mh.ArgumentError, match=r"groups of 1 and 2 query heads.*\{0, 1\}, \{2, 3\}: remove whole"
    ):
        prune_heads(whole, heads)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, before[name])
    assert whole.pruned is None


def test_numbers_stay_those_of_the_whole_layer():
    whole = layer(sinks=True)
    twice = pruned(pruned(whole, [1]), [2])
    assert twice.pruned == Pruned(4, 4, (1, 2))
    assert twice.pruned.kept == (0, 3)
    torch.testing.assert_close(twice(x()), masked(whole, [1, 2])(x()), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        twice.state_dict(), pruned(whole, [1, 2]).state_dict(), rtol=0, atol=0
    )
    with pytest.raises(
        mh.ArgumentError, match=r"head 2 of the layer is gone already; it has heads 0 and 3\."
    ):
        prune_heads(twice, [2])
    with pytest.raises(mh.ArgumentError, match=r"no head 4; its heads are numbered 0 to 3\."):
        prune_heads(twice, [4])
    with pytest.raises(mh.ArgumentError, match="no head -1"):
        prune_heads(twice, [-1])


def test_all_heads_gone_leaves_the_output_bias():
    whole = layer(sinks=True, kv_heads=2)
    got = pruned(pruned(whole, [0, 1]), [2, 3])
    assert torch.equal(got(x()), got.out_proj.bias.expand(2, LENGTH, WIDTH))
    assert sum(it.numel() for it in got.parameters()) == WIDTH
    out, stats = got.forward_with_stats(x(), mask=mh.Causal())
    assert stats.entropy.shape == (2, 0, LENGTH)
    assert torch.equal(out, got(x()))
    with pytest.raises(mh.ArgumentError, match="it has none left"):
        prune_heads(got, [0])


def test_parameters_are_counted_and_reload():
    whole = layer(kv_heads=2, sinks=True)
    got = pruned(whole, [0, 1])
    projections = (2 + 1 + 1) * 6 * (WIDTH + 1)  # two query heads, one key and one value head
    assert sum(it.numel() for it in got.parameters()) == projections + 2 * 6 * WIDTH + WIDTH + 2
    again = layer(kv_heads=2, sinks=True, seed=8)
    prune_heads(again, [0, 1])
    again.load_state_dict(got.state_dict())
    assert torch.equal(again(x()), got(x()))
    assert "pruned=[0, 1]" in repr(got)


def test_bias_and_slopes_of_a_call_are_those_of_the_heads_that_are_left():
    whole = layer()
    got = pruned(whole, [1, 3])
    kept = list(got.pruned.kept)
    bias = torch.randn(1, 4, LENGTH, LENGTH, dtype=torch.float64)
    torch.testing.assert_close(
        got(x(), bias=bias[:, kept]), masked(whole, [1, 3])(x(), bias=bias), rtol=0, atol=1e-12
    )
    slopes = mh.alibi_slopes(4)
    torch.testing.assert_close(
        got(x(), bias=mh.ALiBi(slopes[kept])),
        masked(whole, [1, 3])(x(), bias=mh.ALiBi(slopes)),
        rtol=0,
        atol=1e-12,
    )
    with pytest.raises(mh.MaskError, match=r"must broadcast to \[2, 2, 7, 7\]"):
        got(x(), bias=bias)


def test_what_is_left_trains_and_stays_frozen_where_it_was():
    whole = layer()
    whole.out_proj.weight.requires_grad_(False)
    got, expected = pruned(whole, [0, 2]), masked(whole, [0, 2])
    got(x()).square().sum().backward()
    expected(x()).square().sum().backward()
    assert got.out_proj.weight.grad is None
    rows = torch.cat(
        [torch.arange(6) + 6 * (4 * part + head) for part in range(3) for head in (1, 3)]
    )
    torch.testing.assert_close(
        got.qkv_proj.weight.grad, expected.qkv_proj.weight.grad[rows], rtol=0, atol=1e-10
    )


def test_an_adapter_is_refused():
    whole = layer()
    whole.out_proj = nn.Sequential(whole.out_proj)
    with pytest.raises(
        mh.DtypeError, match=r"torch\.nn\.Linear with plain weights; got Sequential\. Merge"
    ):
        prune_heads(whole, [1])


@pytest.mark.parametrize("heads", [(1,), (0, 1, 2, 3)])
def test_a_packed_layer_is_packed_anew(heads):
    whole = layer().float()
    got = copy.deepcopy(whole)
    for linear in (got.qkv_proj, got.out_proj):
        linear.__class__ = PackedLinear  # as prepack does where it measures a gain
        linear.pack(Rows(1))
    prune_heads(got, heads)
    expected = masked(whole, heads)
    with torch.no_grad():
        assert_close(got(x().float()), expected.double()(x()), expected.float()(x().float()))


def test_a_description_counts_what_is_left():
    block = mh.BlockConfig(embed_dim=12, num_heads=4, ffn_dim=5)
    got = block.without_heads([1]).without_heads([3])
    assert (got.num_heads, got.kv_heads, got.width, got.pruned) == (2, 2, 3, Pruned(4, 4, (1, 3)))
    assert got.whole() == block
    with pytest.raises(mh.ArgumentError, match="num_heads must count the 2 heads"):
        replace(got, num_heads=3)
    with pytest.raises(mh.ArgumentError, match="all layers must have the same"):
        mh.LanguageModelConfig(5, (block, replace(block, num_heads=2)), positions="alibi")
    assert mh.LanguageModelConfig(5, (block, got), positions="alibi").layers == (block, got)
