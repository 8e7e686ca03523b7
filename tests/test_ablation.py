"""Heads replaced while a model runs, against weights edited by hand."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import families
import multihead as mh
import tiny
from ablated import outputs, zeroed
from multihead.heads import ablate, mean_loss
from multihead.heads.removing.ablation import head_means
from multihead.integrations.attention_layers import attention_layers
from requires import require

HEADS = {(0, 1), (1, 0), (1, 2)}
OURS = {
    "rope": lambda: tiny.language_model("rope"),
    "alibi": lambda: tiny.language_model("alibi"),
    "sinks": lambda: tiny.language_model("rope", sinks=True, softcap=2.0, out_bias=True),
}
THEIRS = ("llama", "gpt2", "qwen3", "gemma2", "gpt_oss", "deepseek_v3", "bert")


@pytest.mark.parametrize("name", OURS)
def test_zero_is_the_model_whose_output_columns_are_zero(name):
    model, ids = OURS[name]().double(), tiny.tokens(2, 7)
    before = outputs(model, ids)
    with ablate(model, HEADS):
        got = outputs(model, ids)
    torch.testing.assert_close(got, outputs(zeroed(model, HEADS), ids), rtol=0, atol=1e-12)
    assert not torch.allclose(got, before)
    assert torch.equal(outputs(model, ids), before)


@pytest.mark.parametrize("family", THEIRS)
def test_zero_in_transformers_families(family):
    require("models")
    from multihead.integrations.transformers import register

    register()
    model, ids = families.build(family).double(), tiny.tokens(2, 7)
    edited = zeroed(model, HEADS)
    plain = () if family in families.WITHOUT_SDPA else ("sdpa",)
    for implementation in ("eager", *plain, "multihead"):
        for each in (model, edited):
            each.set_attn_implementation(implementation)
        whole = outputs(model, ids)
        with ablate(model, HEADS):
            got = outputs(model, ids)
        torch.testing.assert_close(got, outputs(edited, ids), rtol=0, atol=1e-12)
        assert not torch.allclose(got, whole)


def test_layers_are_counted_with_cross_attention_among_them():
    require("models")
    model = families.build("bart").double()
    names = [layer.name for layer in attention_layers(model)]
    assert names[2:4] == ["model.decoder.layers.0.self_attn", "model.decoder.layers.0.encoder_attn"]
    ids = tiny.tokens(2, 5)
    with ablate(model, {(3, 1)}), torch.no_grad():
        got = model(input_ids=ids, decoder_input_ids=ids).logits
    with torch.no_grad():
        expected = zeroed(model, {(3, 1)})(input_ids=ids, decoder_input_ids=ids).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    ours = tiny.encoder_decoder().double()
    with ablate(ours, {(0, 0), (3, 1)}), torch.no_grad():
        got = ours(ids, ids)
    torch.testing.assert_close(got, zeroed(ours, {(0, 0), (3, 1)})(ids, ids), rtol=0, atol=1e-12)


def test_an_infinity_of_an_ablated_head_goes_nowhere():
    layer = mh.MultiHeadAttention(8, 2).eval()
    with torch.no_grad():
        layer.qkv_proj.weight[20:] = float("inf")  # the values of head 1
    x = torch.randn(1, 3, 8)
    assert not layer(x).isfinite().all()
    with ablate(layer, {(0, 1)}):
        assert layer(x).isfinite().all()


def test_mean_writes_one_vector_for_all_tokens():
    model, ids = tiny.language_model().double(), tiny.tokens(3, 7)
    layer = attention_layers(model)[0]
    seen = []
    with torch.no_grad():
        hook = layer.out_proj.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
        model(ids)
        hook.remove()
    mean = seen[0].mean((0, 1))
    other = tiny.tokens(2, 5, seed=8)

    def by_hand(_, arguments):
        changed = arguments[0].clone()
        changed[..., layer.columns(4)] = mean[layer.columns(4)]
        return (changed,)

    with torch.no_grad():
        hook = layer.out_proj.register_forward_pre_hook(by_hand)
        expected = model(other)
        hook.remove()
    with ablate(model, {(0, 4)}, "mean", calibration=ids):
        torch.testing.assert_close(outputs(model, other), expected, rtol=0, atol=1e-12)


def test_means_of_a_model_in_training_are_those_of_eval_mode():
    model = tiny.language_model().double().train()
    for block in model.blocks:
        block.attention.dropout = 0.5
    layers, ids = attention_layers(model), tiny.tokens(3, 7)
    state = torch.get_rng_state()
    means = head_means(model, layers, ids)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    for index, mean in head_means(model.eval(), layers, ids).items():
        assert torch.equal(means[index], mean)


def test_padding_is_no_part_of_a_mean():
    require("models")
    model = families.build("llama").double()
    ids, mask = families.padded([7, 4], "right")
    means = head_means(model, attention_layers(model), {"input_ids": ids, "attention_mask": mask})
    apart = [
        head_means(model, attention_layers(model), ids[row : row + 1, :length])
        for row, length in ((0, 7), (1, 4))
    ]
    for index, mean in means.items():
        expected = (7 * apart[0][index] + 4 * apart[1][index]) / 11
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-6)  # eager's softmax is float32


def test_resample_takes_the_head_from_another_row_of_the_batch():
    model, ids = tiny.language_model().double(), tiny.tokens(2, 7)
    heads = {(0, head) for head in range(6)}
    layer, x = model.blocks[0].attention, torch.randn(2, 7, 42, dtype=torch.float64)
    with ablate(layer, heads, "resample"), torch.no_grad():
        got = layer(x)
    torch.testing.assert_close(got, layer(x).detach().flip(0), rtol=0, atol=1e-12)
    batch = tiny.tokens(5, 7)
    with ablate(model, heads, "resample", seed=3):
        first, again = outputs(model, batch), outputs(model, batch)
    with ablate(model, heads, "resample", seed=4):
        other = outputs(model, batch)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with (
        ablate(model, heads, "resample"),
        pytest.raises(mh.ArgumentError, match="got a batch of one"),
    ):
        outputs(model, ids[:1])
    outputs(model, ids[:1])  # the hooks are gone


def test_no_row_stands_in_for_itself():
    from multihead.heads.removing.ablation import _derangement

    for count in (2, 3, 8):
        for seed in range(20):
            order = _derangement(count, seed)
            assert sorted(order.tolist()) == list(range(count))
            assert not (order == torch.arange(count)).any()


def test_blocks_nest_and_end_after_an_error():
    model, ids = tiny.language_model().double(), tiny.tokens(2, 7)
    whole = outputs(model, ids)
    with ablate(model, {(0, 1)}):
        with ablate(model, {(1, 2), (1, 0)}):
            got = outputs(model, ids)
        torch.testing.assert_close(outputs(model, ids), outputs(zeroed(model, {(0, 1)}), ids))
    torch.testing.assert_close(got, outputs(zeroed(model, HEADS), ids), rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match="stop"), ablate(model, HEADS):
        raise RuntimeError("stop")
    assert torch.equal(outputs(model, ids), whole)
    with ablate(model, set()):
        assert torch.equal(outputs(model, ids), whole)


def test_gradients_flow_through_what_is_left():
    model, ids = tiny.language_model().double(), tiny.tokens(2, 7)
    expected = zeroed(model, HEADS)
    expected(ids).square().mean().backward()
    with ablate(model, HEADS):
        model(ids).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        got, want = ours.grad.clone(), theirs.grad.clone()
        if name.endswith("attention.out_proj.weight"):
            for layer, head in HEADS:  # weights that read zeros take no gradient
                if name == f"blocks.{layer}.attention.out_proj.weight":
                    got[:, head * 10 : head * 10 + 10] = want[:, head * 10 : head * 10 + 10] = 0
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_decoding_with_a_cache():
    model, ids = tiny.language_model().double(), tiny.tokens(2, 7)
    with ablate(model, HEADS), torch.no_grad():
        caches = model.make_caches()
        steps = [
            model(ids[:, :4], caches=caches),
            *(model(ids[:, i : i + 1], caches=caches) for i in (4, 5, 6)),
        ]
    torch.testing.assert_close(
        torch.cat(steps, 1), outputs(zeroed(model, HEADS), ids), rtol=0, atol=1e-12
    )


def test_heads_may_be_numpys_integers():
    model, ids = tiny.language_model(), tiny.tokens(2, 7)
    chosen = np.argwhere(np.arange(12).reshape(2, 6) % 5 == 1)
    with ablate(model, chosen), torch.no_grad():
        found = outputs(model, ids)
    with ablate(model, {(0, 1), (1, 0), (1, 5)}), torch.no_grad():
        assert torch.equal(found, outputs(model, ids))


REFUSED = [
    (
        {(2, 0)},
        {},
        mh.ArgumentError,
        r"no layer 2; the model's layers of attention are numbered 0 to 1\.",
    ),
    ({(0, 6)}, {}, mh.ArgumentError, r"layer 0 has no head 6; its heads are 0, 1, 2, 3, 4, 5\."),
    ({(0, -1)}, {}, mh.ArgumentError, "has no head -1"),
    ({3, 4}, {}, mh.DtypeError, r"heads must be pairs \(layer, head\) of integers"),
    ((0, 1), {}, mh.DtypeError, "heads must be pairs"),
    ({(0, 1.0)}, {}, mh.DtypeError, "heads must be pairs"),
    ({(0, True)}, {}, mh.DtypeError, "heads must be pairs"),
    (5, {}, mh.DtypeError, "heads must be pairs"),
    (
        HEADS,
        {"how": "noise"},
        mh.ArgumentError,
        "how must be 'zero', 'mean' or 'resample'; got 'noise'",
    ),
    (HEADS, {"how": "mean"}, mh.ArgumentError, "how='mean' needs calibration="),
    (
        HEADS,
        {"calibration": torch.ones(1, 3).long()},
        mh.ArgumentError,
        "calibration is read for how='mean' alone",
    ),
    (
        HEADS,
        {"how": "mean", "calibration": [1, 2]},
        mh.DtypeError,
        "inputs must be a tensor of token ids",
    ),
]


@pytest.mark.parametrize(("heads", "options", "error", "message"), REFUSED)
def test_what_cannot_be_ablated_is_refused(heads, options, error, message):
    model = tiny.language_model()
    with pytest.raises(error, match=message), ablate(model, heads, **options):
        pass
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_models_whose_heads_cannot_be_told_apart_are_refused():
    for model, message in (
        (nn.TransformerEncoderLayer(8, 2), "self_attn, a MultiheadAttention, cannot.*from_torch"),
        (nn.Linear(2, 2), "Linear has no layer of attention"),
    ):
        with pytest.raises(mh.ModelError, match=message), ablate(model, {(0, 0)}):
            pass
    require("models")
    with pytest.raises(mh.ModelError, match="ModernBertAttention, cannot be told apart"):
        attention_layers(families.build("modernbert"))


def test_a_compiled_model_is_ablated_too():
    layer, x = mh.MultiHeadAttention(8, 2).eval(), torch.randn(2, 3, 8)
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        whole = compiled(x)
        with ablate(compiled, {(0, 1)}):
            got = compiled(x)
        torch.testing.assert_close(got, zeroed(layer, {(0, 1)})(x))
        assert not torch.allclose(got, whole)
        torch.testing.assert_close(compiled(x), whole)


def test_the_loss_of_a_copy_equals_that_of_edited_weights():
    model, ids = tiny.language_model().double(), tiny.tokens(4, 9)
    with ablate(model, HEADS):
        got = mean_loss(model, [ids[:1], ids[1:]])
    assert got == pytest.approx(mean_loss(zeroed(copy.deepcopy(model), HEADS), ids), abs=1e-12)
