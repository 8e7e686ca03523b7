"""Choosing a token: the likeliest, or drawn from what top_k and top_p leave."""

import pytest
import torch

from multihead import ArgumentError, ModelError
from multihead.models import Sampling

LOGITS = torch.tensor([[0.5, 2.0, -1.0, 2.0, float("-inf")], [3.0, 0.0, 1.0, -2.0, 0.5]])


def test_greedy_takes_the_first_of_the_largest():
    assert Sampling().choose(LOGITS).tolist() == [1, 0]
    assert Sampling().probabilities(LOGITS).tolist() == [[0, 1, 0, 0, 0], [1, 0, 0, 0, 0]]


def test_temperature_divides_the_logits():
    expected = (LOGITS.double() / 0.7).softmax(-1)
    torch.testing.assert_close(Sampling(0.7).probabilities(LOGITS), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature):
    chosen = Sampling(temperature).probabilities(LOGITS[1:])
    assert chosen.tolist() == [[1, 0, 0, 0, 0]]
    assert Sampling(temperature, top_p=0.5).choose(LOGITS[1:]).tolist() == [0]


def test_top_k_keeps_exactly_k():
    probabilities = Sampling(1.0, top_k=2).probabilities(LOGITS)
    assert (probabilities > 0).sum(-1).tolist() == [2, 2]
    expected = LOGITS[1, [0, 2]].double().softmax(-1)
    torch.testing.assert_close(probabilities[1, [0, 2]], expected, rtol=0, atol=1e-15)
    everything = Sampling(1.0).probabilities(LOGITS)
    assert torch.equal(Sampling(1.0, top_k=99).probabilities(LOGITS) > 0, everything > 0)


def test_top_p_keeps_the_fewest_that_reach_it():
    whole = LOGITS.double().softmax(-1)[1]
    order = whole.argsort(descending=True)
    for kept in range(1, 5):
        edge = float(whole[order[:kept]].sum())
        for share, expected in ((edge - 1e-9, kept), (edge + 1e-9, kept + 1)):
            left = Sampling(1.0, top_p=min(share, 1.0)).probabilities(LOGITS[1:])[0]
            assert sorted(left.nonzero()[:, 0].tolist()) == sorted(order[:expected].tolist())
            assert float(left.sum()) == pytest.approx(1.0, abs=1e-12)
    likeliest = Sampling(1.0, top_p=1e-9).probabilities(LOGITS)
    assert (likeliest > 0).sum(-1).tolist() == [1, 1]


def test_top_p_is_of_what_top_k_left():
    """As transformers does: 0.6 of two equal tokens is both of them, of five it were fewer."""
    level = torch.zeros(1, 5)
    assert (Sampling(1.0, top_k=2, top_p=0.6).probabilities(level) > 0).sum() == 2


def test_as_transformers_leaves_out():
    pytest.importorskip("transformers")
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(7, 211)
    theirs = logits.double()
    for step in (TemperatureLogitsWarper(1.3), TopKLogitsWarper(53), TopPLogitsWarper(0.8)):
        theirs = step(None, theirs)
    ours = Sampling(1.3, top_k=53, top_p=0.8).probabilities(logits)
    torch.testing.assert_close(ours, theirs.softmax(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("limits", [{}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 4, "top_p": 0.95}])
def test_draws_follow_the_probabilities(limits):
    """Within four standard deviations of each count, and never a token that is left out."""
    sampling, draws = Sampling(1.7, **limits), 20_000
    expected = sampling.probabilities(LOGITS[1:])[0]
    generator = torch.Generator().manual_seed(5)
    drawn = sampling.choose(LOGITS[1:].expand(draws, -1), generator).bincount(minlength=5)
    spread = (draws * expected * (1 - expected)).sqrt()
    assert bool(((drawn - draws * expected).abs() <= 4 * spread).all())


def test_a_seed_gives_its_tokens_again():
    logits = torch.randn(3, 1009)

    def draw(seed):
        return Sampling(1.0, top_p=0.9).choose(logits, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(3), draw(3))
    assert not torch.equal(draw(3), draw(4))


def test_greedy_draws_nothing():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    Sampling().choose(LOGITS, generator)
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(bad):
    logits = LOGITS.clone()
    logits[1, 2] = bad
    for temperature in (0.0, 1.0):
        with pytest.raises(ModelError, match="not finite"):
            Sampling(temperature).choose(logits)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_options_out_of_range(options, named):
    with pytest.raises(ArgumentError, match=named):
        Sampling(**options)
