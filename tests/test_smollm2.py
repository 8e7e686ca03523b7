"""A real model: SmolLM2's logits against float64, alone and in padded batches."""

import copy
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


@pytest.fixture(scope="module")
def ours():
    require("models")
    from multihead.integrations import load_language_model

    return load_language_model("smollm2")


@pytest.mark.slow
def test_our_own_modules_hold_the_same_model(loaded, ours):
    """The same bits under transformers' names, the same tokens, the same chat."""
    from multihead.models import checkpoints

    fields, state = checkpoints.to_checkpoint(ours.model, "llama")
    theirs = loaded.model.state_dict()
    assert state.keys() == theirs.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in state.items())
    assert checkpoints.read_config(loaded.model.config.to_dict()) == ours.model.config
    assert fields["tie_word_embeddings"]
    assert ours.facts == loaded.facts
    assert ours.stop_tokens == (loaded.tokenizer.eos_token_id,)
    text = "\n".join(pydoc_data.topics.topics.values())[:3000] + " 中文 🙂  12<|im_end|>"
    tokens = ours.tokenizer.encode(text)
    assert tokens == loaded.tokenizer(text).input_ids
    chat = [{"role": "user", "content": "Hi"}]
    options = {"tokenize": False, "add_generation_prompt": True}
    assert ours.tokenizer.render_chat(chat) == loaded.tokenizer.apply_chat_template(chat, **options)


@pytest.mark.slow
def test_our_own_modules_give_its_logits(loaded, ours):
    """Alone and padded on either side: at most twice the error of eager against float64.

    Then the tokens that greedy decoding gives, wherever the two largest logits are not as close as
    that bound.
    """
    from multihead import KeyPadding, generate

    lengths, new = (41, 23), 12
    texts = _texts(loaded.tokenizer)[0].split((*lengths, max(LENGTHS) - sum(lengths)))[:2]
    model = loaded.model
    model.set_attn_implementation("eager")
    plain = [_logits(model, text[None])[0] for text in texts]
    exact_model = copy.deepcopy(model).double()
    exact = [_logits(exact_model, text[None])[0] for text in texts]
    whole = torch.zeros(2, max(lengths), dtype=torch.int64)
    for side in ("left", "right"):
        visible = torch.zeros_like(whole, dtype=torch.bool)
        for row, text in enumerate(texts):
            place = slice(-len(text), None) if side == "left" else slice(len(text))
            whole[row, place], visible[row, place] = text, True
        with torch.no_grad():
            batch = ours.model(whole, mask=KeyPadding(visible))
        got = [row[real] for row, real in zip(batch, visible, strict=True)]
        assert_close(torch.cat(got), torch.cat(exact), torch.cat(plain), what=side)
    with torch.no_grad():
        alone = torch.cat([ours.model(text[None])[0] for text in texts])
    assert_close(alone, torch.cat(exact), torch.cat(plain), what="alone")

    bound = 2 * float((torch.cat(plain) - torch.cat(exact)).abs().max())
    (text,) = generate(ours.model, texts[1], max_new_tokens=new)
    (logits,) = _logits(exact_model, torch.cat((texts[1], torch.tensor(text)))[None])
    for token, row in zip(text, logits[len(texts[1]) - 1 : -1], strict=True):
        first, second = row.topk(2).values
        assert token == int(row.argmax()) or first - second <= bound


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
