"""A real model: SmolLM2's logits against float64, alone and in padded batches."""

import pydoc_data.topics

import pytest
import torch

from close import assert_close
from families import output
from requires import require

LENGTHS = (512, 389)


@pytest.fixture(scope="module")
def loaded():
    require("models")
    from multihead.integrations import load

    return load("smollm2")


def _texts(tokenizer):
    prose = "\n".join(pydoc_data.topics.topics.values())[:8000]
    return torch.tensor(tokenizer(prose).input_ids[: sum(LENGTHS)]).split(LENGTHS)


def _batch(texts, side, pad_token):
    """(input_ids, attention_mask, position_ids) of texts padded to the longest on one side."""
    pad = torch.nn.functional.pad
    gaps = [max(LENGTHS) - len(text) for text in texts]
    widths = [(gap, 0) if side == "left" else (0, gap) for gap in gaps]
    ids = [pad(text, width, value=pad_token) for text, width in zip(texts, widths, strict=True)]
    ones = [pad(torch.ones_like(text), w) for text, w in zip(texts, widths, strict=True)]
    mask = torch.stack(ones)
    return torch.stack(ids), mask, (mask.cumsum(-1) - 1).clamp(min=0)


def _logits(model, ids, mask=None, positions=None):
    """The logits of each row's real tokens, one tensor a row."""
    logits = output(
        model, input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
    ).logits
    if mask is None:
        return list(logits)
    return [row[real] for row, real in zip(logits, mask.bool(), strict=True)]


@pytest.mark.slow
def test_logits_are_as_exact_as_sdpa(loaded, capsys):
    """At most twice sdpa's error against the same model in float64 with eager attention.

    In float64 each text runs by itself: padding may not change what a text's tokens give.
    """
    from multihead.integrations.transformers import use

    model = loaded.model
    texts = _texts(loaded.tokenizer)
    batches = {"alone": (texts[0][None],)}
    for side in ("left", "right"):
        batches[side] = _batch(texts, side, loaded.tokenizer.pad_token_id)
    model.set_attn_implementation("sdpa")
    plain = {name: _logits(model, *batch) for name, batch in batches.items()}
    use(model)
    ours = {name: _logits(model, *batch) for name, batch in batches.items()}
    model.double().set_attn_implementation("eager")
    expected = [_logits(model, text[None])[0] for text in texts]
    with capsys.disabled():
        print("\nSmolLM2, largest |logits - float64|, by batch and text:")
        for name in batches:
            for text, exact in enumerate(expected[: len(ours[name])]):
                errors = [(kind[name][text] - exact).abs().max() for kind in (ours, plain)]
                print(
                    f"  {name:5} {LENGTHS[text]} tokens   multihead {errors[0]:.2e}   "
                    f"sdpa {errors[1]:.2e}"
                )
    for name in batches:
        exact = expected[: len(ours[name])]
        assert_close(torch.cat(ours[name]), torch.cat(exact), torch.cat(plain[name]), what=name)
