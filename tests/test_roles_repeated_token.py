"""One token repeated: what the first key receives when no key differs from another."""

import numpy as np
import pytest
import torch

import families
import multihead as mh
import planted
import tiny
from multihead import heads
from multihead.heads.probing.probes import Frame, random_tokens, words
from requires import require


def test_without_positions_every_head_is_uniform() -> None:
    model = tiny.language_model("rope", rope=None)
    found = heads.probe_repeated_token(model, seeds=(0, 1), length=29)
    np.testing.assert_allclose(found.repeated, found.uniform, rtol=1e-5)
    assert found.random.std() > 0.02
    assert (found.n, found.length) == (2, 29)


def test_absolute_positions_keep_a_first_key() -> None:
    found = heads.probe_repeated_token(planted.planted_model(), seeds=(0,))
    head = planted.PLANTED[0].index("first")
    assert found.repeated[0, head] > 0.99
    assert found.share_repeated == found.share_random == 1 / 16


def test_weights_are_those_of_eager() -> None:
    require("models")
    model = families.build("llama").double()
    found = heads.probe_repeated_token(model, seeds=(4,), length=17)
    ids = random_tokens(words(model, Frame()), 17, torch.Generator().manual_seed(4))[None]
    for kind, token_ids in (("random", ids), ("repeated", ids[:, :1].expand(1, 17))):
        outputs = families.output(model, input_ids=token_ids, output_attentions=True)
        expected = torch.cat(outputs.attentions)[..., 0].mean(-1)
        np.testing.assert_allclose(getattr(found, kind), expected, atol=1e-5)


def test_it_says_what_was_found() -> None:
    found = heads.RepeatedToken(
        np.array([[0.1, 0.2]]), np.array([[0.4, 0.2]]), uniform=0.074, length=64, n=4
    )
    assert str(found) == (
        "First key over 64 tokens (sequences of each kind: 4): mean weight 0.300 of random tokens, "
        "0.150 of one token repeated, 0.074 if all keys were alike. Heads above 0.3: 50% and 0%."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": ()}, "seeds must be at least one"),
        ({"length": 1}, "length must be at least 2"),
        ({"length": 62}, "62 tokens are needed, but the model has 61 positions"),
    ],
)
def test_what_proves_nothing_is_refused(options, message) -> None:
    with pytest.raises(mh.ArgumentError, match=message):
        heads.probe_repeated_token(tiny.language_model("learned"), **options)


@pytest.mark.slow
def test_smollm2_has_sinks_on_random_tokens_and_none_on_one_repeated() -> None:
    require("models")
    from multihead.integrations import load_language_model

    loaded = load_language_model()
    found = heads.probe_repeated_token(loaded.model, tokenizer=loaded.tokenizer)
    assert found.share_random > 0.7
    assert found.share_repeated == 0.0
    assert abs(found.repeated.mean() - found.uniform) < 0.01
