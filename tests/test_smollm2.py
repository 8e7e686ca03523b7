"""A real model: SmolLM2's logits against float64, alone and padded."""

import pydoc_data.topics

import pytest
import torch

from close import assert_close
from families import output
from requires import require

LENGTH, SHORTER = 512, 389


@pytest.fixture(scope="module")
def loaded():
    require("models")
    from multihead.integrations import load

    return load("smollm2")


def _batches(tokenizer):
    """{name: (input_ids, attention_mask or None)}: a text alone, and with a shorter one."""
    text = "\n".join(pydoc_data.topics.topics.values())
    ids = torch.tensor(tokenizer(text[:8000]).input_ids[: LENGTH + SHORTER])
    first, second = ids[None, :LENGTH], ids[None, LENGTH:]
    gap = LENGTH - SHORTER
    batches = {"alone": (first, None)}
    for side, widths in {"left": (gap, 0), "right": (0, gap)}.items():
        pad = torch.nn.functional.pad
        rows = torch.cat((first, pad(second, widths, value=tokenizer.pad_token_id)))
        ones = torch.ones_like(second)
        batches[side] = (rows, torch.cat((torch.ones_like(first), pad(ones, widths))))
    return batches


def _logits(model, ids, mask):
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
    logits = output(
        model, input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
    ).logits
    return logits[0] if mask is None else logits[mask.bool()]


@pytest.mark.slow
def test_logits_are_as_exact_as_sdpa(loaded, capsys):
    from multihead.integrations.transformers import use

    model = loaded.model
    batches = _batches(loaded.tokenizer)
    ours, baseline, expected = {}, {}, {}
    model.set_attn_implementation("sdpa")
    for name, batch in batches.items():
        baseline[name] = _logits(model, *batch)
    use(model)
    for name, batch in batches.items():
        ours[name] = _logits(model, *batch)
    model.double().set_attn_implementation("eager")
    for name, batch in batches.items():
        expected[name] = _logits(model, *batch)
    with capsys.disabled():
        print("\nSmolLM2, 512 tokens: max |logits - float64|")
        for name in batches:
            of_ours = (ours[name] - expected[name]).abs().max()
            of_sdpa = (baseline[name] - expected[name]).abs().max()
            print(f"  {name:5}  multihead {of_ours:.2e}   sdpa {of_sdpa:.2e}")
    for name in batches:
        assert_close(ours[name], expected[name], baseline[name], what=name)
