"""What would be lost without a head, against definitions worked out one head at a time."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import families
import multihead as mh
import tiny
from ablated import zeroed
from multihead.heads import (
    Importance,
    Unit,
    ablate,
    gate_gradient,
    head_units,
    leave_one_out,
    mean_loss,
    next_token_loss,
    prune,
    random_importance,
    rank_correlation,
    removal_curve,
    token_rows,
)
from multihead.heads.removing.ablation import changing
from multihead.integrations.attention_layers import attention_layers
from requires import require

IDS = tiny.tokens(4, 9)


def model(**options):
    return tiny.language_model(**options).double()


def by_definition(model, ids, heads_of_unit):
    """The mean over rows of |dL / d gate| for a gate that multiplies some heads, by differences."""
    layers = attention_layers(model)
    found = []
    for layer, heads in heads_of_unit:
        columns = torch.zeros(
            len(layers[layer].heads) * layers[layer].value_dim, dtype=torch.double
        )
        for head in heads:
            columns[layers[layer].columns(head)] = 1

        def loss(gate, layer=layer, columns=columns):
            with (
                torch.no_grad(),
                changing(layers, {layer: lambda x: x * (1 + (gate - 1) * columns)}),
            ):
                return next_token_loss(model, ids)

        step = 1e-4
        found.append(float(((loss(1 + step) - loss(1 - step)) / (2 * step)).abs().mean()))
    return found


@pytest.mark.parametrize("kind", ["head", "kv_group"])
def test_gate_gradients_are_derivatives_by_gates_of_each_example(kind):
    whole = model()
    got = gate_gradient(whole, IDS, kind=kind)
    expected = by_definition(whole, IDS, [(unit.layer, unit.heads) for unit in got.units])
    np.testing.assert_allclose(got.scores, expected, rtol=0, atol=1e-7)
    assert got.examples == 4
    assert (got.method, got.kind) == ("gate gradient", kind)
    apart = gate_gradient(whole, [IDS[:1], IDS[1:]], kind=kind)
    np.testing.assert_allclose(apart.scores, got.scores, rtol=0, atol=1e-12)


def test_absolute_values_are_taken_of_each_example_not_of_their_mean():
    whole = model()
    alone = [gate_gradient(whole, IDS[row : row + 1]).scores for row in range(4)]
    np.testing.assert_allclose(gate_gradient(whole, IDS).scores, np.mean(alone, 0), atol=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gate_gradients_of_transformers_models(family):
    require("models")
    theirs = families.build(family).double()
    theirs.set_attn_implementation("sdpa")
    with families.Float64Throughout():  # a difference of losses shows float32 in a norm
        got = gate_gradient(theirs, IDS)
        expected = by_definition(theirs, IDS, [(unit.layer, unit.heads) for unit in got.units])
    np.testing.assert_allclose(got.scores, expected, rtol=0, atol=1e-7)


def test_nothing_of_the_model_is_changed():
    whole = model().train()
    whole.blocks[1].eval()
    whole.embedding.weight.requires_grad_(False)
    for work in (gate_gradient, leave_one_out):
        work(whole, IDS)
        assert whole.training
        assert whole.blocks[0].attention.training
        assert not whole.blocks[1].attention.training
        assert not whole.embedding.weight.requires_grad
        assert whole.norm.weight.requires_grad
        assert all(parameter.grad is None for parameter in whole.parameters())
        assert not any(module._forward_pre_hooks for module in whole.modules())
    with torch.no_grad():
        assert (gate_gradient(whole, IDS).scores > 0).all()


def test_inference_mode_around_it_changes_nothing():
    expected = gate_gradient(model(), IDS).scores
    whole = model()
    with torch.inference_mode():
        assert (gate_gradient(whole, IDS).scores == expected).all()


def test_a_model_without_heads_has_none_to_score():
    empty = model()
    prune(empty, {address for unit in head_units(empty) for address in unit.addresses})
    for score in (gate_gradient, leave_one_out):
        with pytest.raises(mh.ModelError, match="LanguageModel has no head left"):
            score(empty, IDS)
    with pytest.raises(mh.ModelError, match="has no head left"):
        random_importance(empty, 0)


def test_half_precision_is_summed_in_double():
    half = tiny.language_model().bfloat16()
    exact = gate_gradient(tiny.language_model().bfloat16().double(), IDS).scores
    got = gate_gradient(half, IDS).scores
    assert np.abs(got - exact).max() < 0.1 * np.abs(exact).max()


def test_leaving_out_is_the_loss_of_edited_weights():
    whole = model()
    seen = []
    got = leave_one_out(whole, [IDS[:3], IDS[3:]], progress=lambda *done: seen.append(done))
    before = mean_loss(whole, IDS)
    expected = [mean_loss(zeroed(whole, unit.addresses), IDS) - before for unit in got.units]
    np.testing.assert_allclose(got.scores, expected, rtol=0, atol=1e-12)
    assert seen[-1] == (12, 12)
    assert got.examples == 4
    groups = leave_one_out(whole, IDS, kind="kv_group")
    assert groups.units[1] == Unit(0, 1, (3, 4, 5))
    assert groups.scores[1] == pytest.approx(
        mean_loss(zeroed(whole, {(0, 3), (0, 4), (0, 5)}), IDS) - before, abs=1e-12
    )


def test_a_removal_curve_is_the_loss_without_the_least_important():
    whole = model()
    scores = leave_one_out(whole, IDS)
    curve = removal_curve(whole, IDS, scores, [0, 2, 12])
    assert curve[0] == pytest.approx(mean_loss(whole, IDS), abs=1e-12)
    for count, loss in zip((2, 12), curve[1:], strict=True):
        assert loss == pytest.approx(mean_loss(zeroed(whole, scores.least(count)), IDS), abs=1e-12)
    with pytest.raises(mh.ArgumentError, match="count must be from 0 to 12 units; got 13"):
        removal_curve(whole, IDS, scores, [13])


def test_units_are_heads_or_groups_and_keep_their_numbers():
    whole = model()
    assert head_units(whole)[7] == Unit(1, 1, (1,))
    prune(whole, {(0, 0), (0, 1), (0, 2), (1, 0), (1, 5)})
    assert [unit.number for unit in head_units(whole)] == [3, 4, 5, 1, 2, 3, 4]
    assert head_units(whole, "kv_group") == (
        Unit(0, 1, (3, 4, 5)),
        Unit(1, 0, (1, 2)),
        Unit(1, 1, (3, 4)),
    )
    got = gate_gradient(whole, IDS)
    np.testing.assert_allclose(
        got.scores, by_definition(whole, IDS, [(u.layer, u.heads) for u in got.units]), atol=1e-7
    )
    table = got.table()
    assert table.shape == (2, 6)
    assert np.isnan(table).tolist() == [[True] * 3 + [False] * 3, [True] + [False] * 4 + [True]]
    prune(whole, {(0, 3), (0, 4), (0, 5)})
    assert [unit.layer for unit in gate_gradient(whole, IDS).units] == [1] * 4
    with pytest.raises(mh.ArgumentError, match="kind must be 'head' or 'kv_group'; got 'layer'"):
        head_units(whole, "layer")


def scored(scores, layers=2):
    per_layer = len(scores) // layers
    units = tuple(Unit(i // per_layer, i % per_layer, (i % per_layer,)) for i in range(len(scores)))
    return Importance("given", "head", units, np.array(scores, dtype=float), 1)


def test_orders_and_normalized_scores():
    given = scored([3.0, 4.0, 0.0, 0.5])
    assert [(unit.layer, unit.number) for unit in given.order()] == [(1, 0), (1, 1), (0, 0), (0, 1)]
    assert given.least(2) == {(1, 0), (1, 1)}
    np.testing.assert_allclose(given.normalized().scores, [0.6, 0.8, 0.0, 1.0])
    assert scored([0.0, 0.0, 1.0, 1.0]).normalized().scores[:2].tolist() == [0.0, 0.0]


def test_rank_correlation():
    first = scored([1.0, 2.0, 3.0, 4.0])
    assert rank_correlation(first, scored([10.0, 20.0, 30.0, 35.0])) == pytest.approx(1)
    assert rank_correlation(first, scored([4.0, 3.0, 2.0, 1.0])) == pytest.approx(-1)
    # Spearman's own formula, 1 - 6 sum d^2 / (n (n^2 - 1)), where no scores are equal.
    assert rank_correlation(first, scored([2.0, 1.0, 4.0, 3.0])) == pytest.approx(1 - 6 * 4 / 60)
    # Equal scores share the mean rank: ranks 0.5, 0.5, 2, 3 against 0, 1, 2, 3.
    assert rank_correlation(first, scored([1.0, 1.0, 2.0, 3.0])) == pytest.approx(
        4.5 / (4.5 * 5) ** 0.5
    )
    assert np.isnan(rank_correlation(first, scored([1.0] * 4)))
    with pytest.raises(mh.ArgumentError, match="both must score the same units"):
        rank_correlation(first, scored([1.0, 2.0]))


def test_random_scores_are_a_permutation_by_seed():
    whole = model()
    first, same, other = (random_importance(whole, seed) for seed in (1, 1, 2))
    assert sorted(first.scores) == list(range(12))
    assert (first.scores == same.scores).all()
    assert (first.scores != other.scores).any()
    assert first.units == head_units(whole)


def test_an_encoder_needs_a_loss_and_takes_one():
    require("models")
    encoder = families.build("bert").double()
    with pytest.raises(mh.ModelError, match=r"BertModel does not predict the next token .* loss=f"):
        gate_gradient(encoder, IDS)
    target = torch.randn(4, 9, 33, dtype=torch.float64)

    def distance(model, ids):
        hidden = model(input_ids=ids).last_hidden_state
        return F.mse_loss(hidden, target, reduction="none").mean((1, 2))

    got = leave_one_out(encoder, IDS, loss=distance)
    assert got.scores[0] == pytest.approx(
        mean_loss(zeroed(encoder, {(0, 0)}), IDS, distance) - mean_loss(encoder, IDS, distance),
        abs=1e-10,
    )
    gates = gate_gradient(encoder, IDS, loss=distance)
    assert gates.examples == 4
    assert (gates.scores > 0).all()
    for family in ("bart", "t5"):
        with pytest.raises(mh.ModelError, match="does not predict the next token"):
            mean_loss(families.build(family), IDS)
    with pytest.raises(mh.ModelError, match="Encoder does not predict"):
        mean_loss(tiny.encoder_decoder().encoder, IDS)


def test_what_a_tokenizer_gives_is_one_batch():
    import collections

    def loss(model, batch):
        return next_token_loss(model, batch["input_ids"])

    batch = collections.UserDict(input_ids=IDS)  # as transformers' BatchEncoding is
    assert mean_loss(model(), batch, loss) == mean_loss(model(), IDS)


def test_losses_that_hide_the_examples_are_refused():
    whole = model()
    with pytest.raises(
        mh.ArgumentError, match=r"must return the loss of each example, .*; got \[\]"
    ):
        gate_gradient(whole, IDS, loss=lambda m, ids: next_token_loss(m, ids).mean())
    with pytest.raises(mh.ArgumentError, match="got float"):
        mean_loss(whole, IDS, lambda m, ids: 1.0)
    with pytest.raises(mh.ArgumentError, match="loss returned 2 numbers for a batch of 4 examples"):
        gate_gradient(whole, IDS, loss=lambda m, ids: next_token_loss(m, ids)[:2])
    for work in (gate_gradient, leave_one_out):
        with pytest.raises(mh.ArgumentError, match="at least one batch; got none"):
            work(whole, [])
    with pytest.raises(
        mh.ArgumentError, match=r"token_ids must be \[rows, length\].*; got \[4, 1\]"
    ):
        mean_loss(whole, IDS[:, :1])


def test_the_next_tokens_loss_is_cross_entropy():
    whole = model()
    logits = whole(IDS).detach()
    expected = -logits.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0].mean(1)
    torch.testing.assert_close(next_token_loss(whole, IDS).detach(), expected, rtol=0, atol=1e-12)
    assert next_token_loss(tiny.language_model().bfloat16(), IDS).dtype == torch.float32
    require("models")
    theirs = families.build("gpt2").double()
    labeled = theirs(IDS, labels=IDS).loss
    assert float(next_token_loss(theirs, IDS).mean()) == pytest.approx(float(labeled), abs=1e-6)


def test_rows_of_a_text():
    rows = token_rows(range(100), 10, 3, skip=5, start=99)
    assert rows.shape == (3, 10)
    assert rows[:, 0].tolist() == [99] * 3
    assert rows[:, 1:].flatten().tolist() == list(range(5, 32))
    with pytest.raises(
        mh.InputError, match=r"30 tokens are needed \(3 rows of 10, after 0\).* has 29"
    ):
        token_rows(range(29), 10, 3)


@pytest.mark.slow
def test_smollm2_loses_less_by_gate_gradients_than_at_random():
    require("models")
    from multihead.heads import text
    from multihead.integrations import load

    loaded = load("smollm2")
    ids = text.tokenize(loaded.tokenizer, text.built_in(), 512).ids
    rows = token_rows(ids, 128, 4)
    scores = gate_gradient(loaded.model, rows[:2].split(1), kind="kv_group")
    assert len(scores.units) == 90
    (by_gate,) = removal_curve(loaded.model, rows[2:], scores, [9])
    by_chance = [
        removal_curve(
            loaded.model, rows[2:], random_importance(loaded.model, seed, kind="kv_group"), [9]
        )[0]
        for seed in (1, 2)
    ]
    assert by_gate < min(by_chance)
    with ablate(loaded.model, scores.least(9)):
        masked = mean_loss(loaded.model, rows[2:])
    prune(loaded.model, scores.least(9))
    assert mean_loss(loaded.model, rows[2:]) == pytest.approx(masked, abs=2e-5)
