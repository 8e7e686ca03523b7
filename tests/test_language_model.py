"""Whole models by themselves: what they are made of, their caches, what they refuse."""

from dataclasses import replace

import pytest
import torch

import tiny
from multihead import ArgumentError, DtypeError, KeyPadding, KVCache, MaskError
from multihead.models import (
    BlockConfig,
    Encoder,
    EncoderConfig,
    EncoderDecoderConfig,
    LanguageModel,
    LanguageModelConfig,
)

KINDS = ("growing", "static", "window", "paged", "int8")


def test_parameters_are_those_of_the_parts():
    """Four matrices of attention and three of the feed-forward network a layer, and one table."""
    block = BlockConfig(embed_dim=42, num_heads=6, num_kv_heads=2, head_dim=10, ffn_dim=37)
    model = LanguageModel(LanguageModelConfig(101, (block,) * 3))
    attention = 2 * 42 * 60 + 2 * 42 * 20
    layer = attention + 3 * 42 * 37 + 2 * 42
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 101 * 42 + 3 * layer + 42


def test_the_head_is_tied_or_its_own():
    model = tiny.language_model()
    assert model.head.weight is model.embedding.weight
    config = replace(model.config, tied=False)
    apart = LanguageModel(config)
    assert apart.head.weight is not apart.embedding.weight
    apart.load_state_dict(model.state_dict())
    assert apart.head.weight is not apart.embedding.weight
    ids = tiny.tokens(2, 7)
    assert torch.equal(apart.eval()(ids), model(ids))


@pytest.mark.parametrize("positions", tiny.POSITIONS)
def test_the_last_row_alone(positions):
    model = tiny.language_model(positions)
    ids = tiny.tokens(2, 13)
    last = model(ids, rows="last")
    assert last.shape == (2, 1, tiny.VOCABULARY)
    torch.testing.assert_close(last, model(ids)[:, -1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", tiny.POSITIONS)
def test_caches_go_on_where_they_ended(positions, kind):
    model = tiny.language_model(positions, window=7)
    ids = tiny.tokens(2, 17)
    caches = model.make_caches(kind, batch=2, capacity=17)
    with torch.no_grad():
        parts = [model(part, caches=caches) for part in ids.split([5, 1, 9, 1, 1], dim=1)]
        # Stored by the byte, keys and values are rounded also where nothing is read again.
        at_once = model.make_caches("int8") if kind == "int8" else None
        whole = model(ids, caches=at_once)
    assert {cache.length for cache in caches} == {17}
    got = torch.cat(parts, dim=1)
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_padding_counts_no_position_in_a_graph_either():
    """A preallocated cache counts by row there, which hid the padding from the positions."""
    torch._dynamo.reset()
    model = tiny.language_model("learned")
    tokens = tiny.tokens(2, 5)
    visible = torch.tensor([[False, False, True, True, True], [True] * 5])
    caches = model.make_caches("static", batch=2, capacity=5)

    def run(tokens, visible):
        return model(tokens, mask=KeyPadding(visible), caches=caches)

    got = torch.compile(run, fullgraph=True, backend="eager")(tokens, visible)
    alone = model(tokens[:1, 2:])
    torch.testing.assert_close(got[0, 2:], alone[0], rtol=0, atol=1e-5)


def test_a_window_cache_rolls_where_the_layer_has_a_window():
    rolling = tiny.language_model(window=4).make_caches("window")
    growing = tiny.language_model().make_caches("window")
    assert [type(cache).__name__ for cache in rolling] == ["WindowKVCache"] * 2
    assert [type(cache).__name__ for cache in growing] == ["KVCache"] * 2


def test_gradients_reach_every_parameter():
    model = tiny.language_model()
    model(tiny.tokens(2, 9)).square().mean().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_softcapped_logits_stay_below_the_cap():
    model = tiny.language_model()
    capped = LanguageModel(replace(model.config, logit_softcap=2.0)).eval()
    capped.load_state_dict(model.state_dict())
    ids = tiny.tokens(2, 9)
    expected = 2.0 * (model(ids) / 2.0).tanh()
    assert torch.equal(capped(ids), expected)


def test_an_encoder_sees_both_ways():
    config = tiny.encoder_decoder().config.source
    model = Encoder(replace(config, num_types=3, pooler=True)).eval()
    ids = tiny.tokens(2, 9)
    changed = ids.clone()
    changed[:, -1] = (ids[:, -1] + 1) % tiny.VOCABULARY
    assert not torch.equal(model(ids)[:, 0], model(changed)[:, 0])
    hidden = KeyPadding(torch.arange(9).expand(2, -1) < 8)
    torch.testing.assert_close(
        model(ids, mask=hidden)[:, :8], model(changed, mask=hidden)[:, :8], rtol=0, atol=0
    )
    types = torch.ones_like(ids)
    assert not torch.equal(model(ids), model(ids, type_ids=types))
    assert model.pool(model(ids)).shape == (2, 34)


def test_an_encoder_decoder_reads_its_source_once():
    """Step by step from caches, the source given once: as the whole target without any."""
    model = tiny.encoder_decoder()
    source, target = tiny.tokens(2, 11), tiny.tokens(2, 7, seed=5)
    padding = KeyPadding(torch.tensor([[True] * 11, [False] * 2 + [True] * 6 + [False] * 3]))
    with torch.no_grad():
        whole = model(target, source, source_mask=padding)
        encoded = model.encode(source, source_mask=padding)
        assert torch.equal(model(target, encoded, source_mask=padding), whole)
        for kind in KINDS[:-1]:
            caches = model.make_caches(kind, batch=2, capacity=7)
            steps = [model(target[:, :3], source, source_mask=padding, caches=caches)]
            for column in range(3, 7):
                token = target[:, column : column + 1]
                steps.append(model(token, source_mask=padding, caches=caches))
            torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=0, atol=1e-5)
            assert caches.source[0].length == 11
        other = source.clone()
        other[1, [0, 1, 8, 9, 10]] = 3
        assert torch.equal(model(target, other, source_mask=padding), whole)


def test_one_table_for_source_and_target():
    parts = tiny.encoder_decoder().config
    width = parts.target.embed_dim
    source = replace(
        parts.source,
        layers=tuple(replace(layer, embed_dim=width, num_heads=6) for layer in parts.source.layers),
    )
    target = replace(
        parts.target, layers=tuple(replace(x, context_dim=width) for x in parts.target.layers)
    )
    model = tiny.build_model(EncoderDecoderConfig(source, target, shared=True))
    assert model.encoder.embedding.weight is model.decoder.embedding.weight


def test_models_in_half_precision():
    model = tiny.language_model(dtype=torch.bfloat16)
    assert model(tiny.tokens(2, 5)).dtype == torch.bfloat16
    assert model.make_caches("static", batch=2, capacity=5)[0].nbytes > 0


_BLOCK = BlockConfig(embed_dim=12, num_heads=3, ffn_dim=7)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: LanguageModelConfig(7, ()), "at least one"),
        (lambda: LanguageModelConfig(7, (_BLOCK, replace(_BLOCK, embed_dim=15))), r"\[12, 15\]"),
        (lambda: LanguageModelConfig(7, (_BLOCK,), positions="learned"), "max_positions"),
        (lambda: LanguageModelConfig(7, (_BLOCK,), positions="rope"), r"rope=RoPE\(\)"),
        (lambda: EncoderConfig(7, (_BLOCK,), positions="alibi"), "'sinusoidal'; got 'alibi'"),
        (lambda: EncoderConfig(7, (replace(_BLOCK, window=3),)), "window is causal"),
        (lambda: LanguageModelConfig(7, _BLOCK), r"write \(block,\)"),
        (lambda: LanguageModelConfig(0, (_BLOCK,)), "vocab_size must be at least 1"),
        (lambda: LanguageModelConfig(7, (_BLOCK,), logit_softcap=0.0), "logit_softcap"),
        (
            lambda: LanguageModelConfig(
                7, (_BLOCK,), positions="learned", max_positions=5, position_offset=-1
            ),
            "position_offset",
        ),
        (lambda: replace(_BLOCK, activation="swiglu"), "activation.*'relu'; got 'swiglu'"),
        (lambda: replace(_BLOCK, norm="batch"), "norm must be one of 'rms'.*got 'batch'"),
        (lambda: replace(_BLOCK, norm_placement="before"), "'sandwich'; got 'before'"),
        (
            lambda: LanguageModelConfig(
                7, (_BLOCK, replace(_BLOCK, num_heads=4)), positions="alibi"
            ),
            "same num_heads",
        ),
        (
            lambda: EncoderDecoderConfig(
                EncoderConfig(7, (_BLOCK,)), LanguageModelConfig(7, (_BLOCK,))
            ),
            "context_dim=12",
        ),
        (
            lambda: EncoderDecoderConfig(
                EncoderConfig(7, (_BLOCK,)),
                LanguageModelConfig(8, (replace(_BLOCK, context_dim=12),)),
                shared=True,
            ),
            "one table",
        ),
    ],
)
def test_configs_that_are_refused(build, named):
    with pytest.raises(ArgumentError, match=named):
        build()


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda m: m(tiny.tokens(5)), ArgumentError, r"token_ids\[None\]"),
        (lambda m: m(torch.ones(1, 5)), DtypeError, "float32"),
        (lambda m: m(torch.tensor([[3, 101]])), ArgumentError, "0 to 100; got 101"),
        (lambda m: m(tiny.tokens(1, 5), rows="first"), ArgumentError, "'first'"),
        (lambda m: m(tiny.tokens(1, 5), caches=m.make_caches()[:1]), ArgumentError, "2 layers"),
        (lambda m: m(tiny.tokens(1, 5), caches=KVCache()), DtypeError, "list.*got KVCache"),
        (lambda m: m(tiny.tokens(1, 5), caches=[KVCache()] * 2), ArgumentError, "there twice"),
        (lambda m: m(tiny.tokens(2, 5), positions=[0] * 5), DtypeError, "got list"),
        (lambda m: m(tiny.tokens(2, 5), positions=torch.arange(4)), ArgumentError, r"\(4,\)"),
        (
            lambda m: tiny.language_model("learned")(
                tiny.tokens(1, 5), positions=torch.zeros(1, 1).long()
            ),
            ArgumentError,
            r"one number a token.*got \(1, 1\)",
        ),
        (
            lambda m: tiny.language_model("alibi")(tiny.tokens(1, 5), positions=torch.arange(5)),
            ArgumentError,
            "no part of this model reads them",
        ),
        (lambda m: m.make_caches("static"), ArgumentError, "capacity"),
        (lambda m: m.make_caches("lasting"), ArgumentError, "'lasting'"),
        (
            lambda m: m(tiny.tokens(2, 5), mask=KeyPadding(torch.ones(2, 4).bool())),
            MaskError,
            "4",
        ),
    ],
)
def test_calls_that_are_refused(call, error, named):
    with pytest.raises(error, match=named):
        call(tiny.language_model())
