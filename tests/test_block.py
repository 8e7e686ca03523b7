"""TransformerBlock: where norms stand, what is dropped out, what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import multihead as mh

BATCH, LENGTH, CONTEXT, WIDTH, CONTEXT_WIDTH = 2, 7, 5, 12, 11


def attention(**options: object) -> mh.MultiHeadAttention:
    return mh.MultiHeadAttention(WIDTH, 3, **options)


def build(placement: str = "pre", *, crosses: bool = False, **options: object) -> nn.Module:
    torch.manual_seed(0)
    block = mh.TransformerBlock(
        attention(),
        mh.GatedFeedForward(WIDTH, 17),
        cross_attention=attention(context_dim=CONTEXT_WIDTH) if crosses else None,
        norm=partial(nn.RMSNorm, eps=1e-6),
        norm_placement=placement,
        **options,
    )
    for parameter in block.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=1.0)
    return block


def inputs_of(crosses: bool) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=draw)
    return (x, torch.randn(BATCH, CONTEXT, CONTEXT_WIDTH, generator=draw))[: 1 + crosses]


@pytest.mark.parametrize("crosses", [False, True])
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_norms_stand_where_they_are_said_to(placement: str, crosses: bool) -> None:
    block = build(placement, crosses=crosses)
    x, *rest = inputs_of(crosses)
    sublayers = [(lambda h: block.attention(h, mask=mh.Causal()), "attention")]
    if crosses:
        sublayers.append((lambda h: block.cross_attention(h, rest[0]), "cross_attention"))
    sublayers.append((block.feed_forward, "feed_forward"))
    expected = x
    for sublayer, name in sublayers:
        norm = getattr(block, f"{name}_norm")
        if placement == "pre":
            expected = expected + sublayer(norm(expected))
        elif placement == "post":
            expected = norm(expected + sublayer(expected))
        else:
            out_norm = getattr(block, f"{name}_out_norm")
            expected = expected + out_norm(sublayer(norm(expected)))
    assert torch.equal(block(x, *rest, mask=mh.Causal()), expected)
    norms = sum(isinstance(part, nn.RMSNorm) for part in block.modules())
    assert norms == len(sublayers) * (2 if placement == "sandwich" else 1)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_piece_by_piece_is_the_whole(placement: str) -> None:
    block = build(placement, crosses=True).double()
    x, context = (it.double() for it in inputs_of(True))
    visible = mh.KeyPadding(torch.arange(CONTEXT) < torch.tensor([[5], [3]]))
    call = {"mask": mh.Causal(), "context_mask": visible}
    cache, cross_cache = mh.KVCache(), mh.KVCache()
    caches = {"cache": cache, "cross_cache": cross_cache}
    whole = block(x, context, **call)
    parts = [block(x[:, :3], context, **call, **caches)]
    parts += [block(x[:, i : i + 1], **call, **caches) for i in range(3, LENGTH)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-12, atol=1e-12)
    assert (cache.length, cross_cache.length) == (LENGTH, CONTEXT)
    everything = block(x, context, mask=mh.Causal())
    assert torch.equal(everything[0], whole[0])
    assert not torch.allclose(everything[1], whole[1])


def test_arguments_reach_the_attention() -> None:
    block = mh.TransformerBlock(
        attention(rope=mh.RoPE()), mh.FeedForward(WIDTH, 17), norm=nn.LayerNorm
    )
    (x,) = inputs_of(False)
    normed = block.attention_norm(x)
    for call in (
        {"bias": torch.randn(LENGTH, LENGTH)},
        {"positions": torch.arange(0, 3 * LENGTH, 3)},
        {"positions": block.attention.rope.rotation(torch.arange(0, 3 * LENGTH, 3), 4)},
        {"mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()},
    ):
        half = x + block.attention(normed, **call)
        expected = half + block.feed_forward(block.feed_forward_norm(half))
        assert torch.equal(block(x, **call), expected)
        assert not torch.equal(block(x), expected)


def test_latent_attention_has_a_block_too() -> None:
    torch.manual_seed(0)
    latent = mh.LatentAttention(WIDTH, 3, latent_dim=8, nope_dim=4, rope_dim=2, value_dim=5)
    block = mh.TransformerBlock(latent, mh.FeedForward(WIDTH, 17), norm=nn.RMSNorm).double()
    x = inputs_of(False)[0].double()
    half = x + latent(block.attention_norm(x), mask=mh.Causal())
    whole = block(x, mask=mh.Causal())
    assert torch.equal(whole, half + block.feed_forward(block.feed_forward_norm(half)))
    cache = mh.LatentKVCache(8)
    parts = [block(x[:, i : i + 1], mask=mh.Causal(), cache=cache) for i in range(LENGTH)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-12, atol=1e-12)


def test_what_is_added_is_dropped_out_in_training_alone() -> None:
    block = build(dropout=0.5)
    (x,) = inputs_of(False)
    block.feed_forward = nn.Identity()  # leaves x + dropout(x)
    block.feed_forward_norm = nn.Identity()
    block.attention.out_proj.weight.data.zero_()
    torch.manual_seed(0)
    factor = block(x) / x
    counts = [int(torch.isclose(factor, torch.tensor(value)).sum()) for value in (1.0, 3.0)]
    assert sum(counts) == x.numel()
    assert all(count > x.numel() // 3 for count in counts)
    block.eval()
    assert torch.equal(block(x), x + x)
    assert torch.equal(build(dropout=1.0)(x), x)


def test_feed_forwards_equal_their_formulas() -> None:
    (x,) = inputs_of(False)
    plain = mh.FeedForward(WIDTH, 17, activation=F.relu)
    up, down = plain.up_proj, plain.down_proj
    expected = torch.clamp(x @ up.weight.T + up.bias, min=0) @ down.weight.T + down.bias
    torch.testing.assert_close(plain(x), expected)
    gated = mh.GatedFeedForward(WIDTH, 17)
    gate, up = (x @ weight.T for weight in gated.gate_up_proj.weight.split(17))
    expected = (gate / (1 + torch.exp(-gate)) * up) @ gated.down_proj.weight.T
    torch.testing.assert_close(gated(x), expected)
    assert sum(p.numel() for p in gated.parameters()) == 3 * WIDTH * 17
    assert sum(p.numel() for p in plain.parameters()) == 2 * WIDTH * 17 + WIDTH + 17
    for module in (
        mh.FeedForward(WIDTH, 17, dropout=1.0),
        mh.GatedFeedForward(WIDTH, 17, dropout=1.0),
    ):
        bias = module.down_proj.bias
        nothing = torch.zeros_like(x) if bias is None else bias.expand_as(x)
        assert torch.equal(module(x), nothing)
        assert not torch.equal(module.eval()(x), nothing)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"norm_placement": "before"}, mh.ArgumentError, "'pre', 'post', 'sandwich'; got 'before'"),
        ({"norm": "rms"}, mh.DtypeError, "norm must build a norm .* got 'rms'"),
        ({"norm": nn.LayerNorm(12)}, mh.DtypeError, "norm must build a norm"),
        ({"dropout": 2.0}, mh.ArgumentError, r"dropout must lie between 0 and 1; got 2\.0"),
        ({"cross_attention": "self"}, mh.ArgumentError, "must be a layer with a context_dim"),
        ({"attention": "cross"}, mh.ArgumentError, "got a layer with context_dim=12"),
        (
            {"attention": nn.MultiheadAttention(12, 3)},
            mh.DtypeError,
            r"got MultiheadAttention\. Convert it with MultiHeadAttention\.from_torch",
        ),
        ({"attention": nn.Linear(3, 3)}, mh.DtypeError, r"LatentAttention; got Linear\.$"),
        ({"cross_attention": nn.Linear(3, 3)}, mh.ArgumentError, "must be a layer with a context"),
        ({"feed_forward": mh.FeedForward(13, 5)}, mh.ArgumentError, "embed_dim=12; got 13"),
        ({"feed_forward": F.relu}, mh.DtypeError, "feed_forward must be a module; got function"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    layers = {"self": attention(), "cross": attention(context_dim=12)}
    given = {"attention": "self", "feed_forward": mh.FeedForward(WIDTH, 5), **options}
    given = {name: layers.get(it, it) if isinstance(it, str) else it for name, it in given.items()}
    with pytest.raises(error, match=message):
        mh.TransformerBlock(**given)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hidden_dim": 0}, mh.ArgumentError, "hidden_dim must be at least 1"),
        ({"activation": "gelu"}, mh.DtypeError, "activation must be a function or a module"),
        ({"activation": nn.GELU}, mh.DtypeError, r"got the class GELU\. Write activation=GELU\(\)"),
        ({"dropout": -0.1}, mh.ArgumentError, "dropout must lie between"),
    ],
)
@pytest.mark.parametrize("kind", [mh.FeedForward, mh.GatedFeedForward])
def test_feed_forwards_refuse_what_makes_no_sense(
    kind: type[nn.Module], options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**{"embed_dim": 12, "hidden_dim": 17, **options})


def test_a_context_for_a_block_that_reads_none_is_refused() -> None:
    x, context = inputs_of(True)
    block = build()
    for name, given in (
        ("context", {"context": context}),
        ("context_mask", {"context_mask": mh.Causal()}),
        ("cross_cache", {"cross_cache": mh.KVCache()}),
    ):
        with pytest.raises(mh.ArgumentError, match=f"^{name} was given to a block without"):
            block(x, **given)
    with pytest.raises(mh.ArgumentError, match="context is missing"):
        build(crosses=True)(x)
    with pytest.raises(mh.ArgumentError, match=r"x must have the width embed_dim=12"):
        block.feed_forward(context)


def test_modes_agree_to_the_bit() -> None:
    block = build("sandwich", crosses=True)
    given = inputs_of(True)
    expected = block(*given, mask=mh.Causal())
    for training in (True, False):
        block.train(training)
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                out = block(*given, mask=mh.Causal())
                assert torch.equal(out, expected), f"{training=} {mode.__name__}"
    with torch.autocast("cpu", torch.bfloat16):
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                # The residual stays in the dtype that it came in.
                assert block(*given, mask=mh.Causal()).dtype == torch.float32


def test_blocks_follow_their_device() -> None:
    """On meta tensors nothing is computed, but a tensor made on another device is refused."""
    with torch.device("meta"):
        block = mh.TransformerBlock(
            attention(rope=mh.RoPE(), window=3, sinks=True), mh.FeedForward(WIDTH, 17)
        )
    cache = mh.KVCache()
    for length in (LENGTH, 1):
        x = torch.empty(BATCH, length, WIDTH, device="meta")
        out = block(x, mask=mh.Causal(), cache=cache)
        assert out.is_meta
        assert out.shape == x.shape
    assert cache.length == LENGTH + 1
    assert cache.positions(2).is_meta
