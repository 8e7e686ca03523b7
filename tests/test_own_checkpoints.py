"""Checkpoints of our own type: every model of ours, whatever it is made of."""

import json
from dataclasses import replace

import pytest
import torch

import multihead as mh
import tiny
from multihead.heads import prune
from multihead.integrations import load_checkpoint, save_checkpoint
from multihead.models.checkpoints import build, read_config, write_config

MODELS = {
    **{name: lambda name=name: tiny.language_model(name, sinks=True) for name in tiny.POSITIONS},
    "mixed": lambda: build(
        mh.LanguageModelConfig(
            19,
            (
                mh.BlockConfig(8, 2, 5, rope=mh.RoPE(scaling=mh.YaRNScaling(2.0, 16)), window=3),
                mh.BlockConfig(8, 4, 5, head_dim=6, rope=mh.RoPE(rotary_dim=4), norm="layer"),
            ),
            tied=False,
            head_bias=True,
            logit_softcap=7.0,
        )
    ),
    "encoder": lambda: build(
        mh.EncoderConfig(19, (mh.BlockConfig(8, 2, 5),) * 2, positions="sinusoidal", pooler=True)
    ),
    "encoder-decoder": tiny.encoder_decoder,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pruned", [False, True])
def test_a_model_is_what_it_was(name, pruned, tmp_path):
    pytest.importorskip("safetensors")
    model = MODELS[name]().eval()
    if pruned:
        attention = next(it for it in model.modules() if isinstance(it, mh.MultiHeadAttention))
        prune(model, {(0, head) for head in range(attention.num_heads)})
    save_checkpoint(model, tmp_path, "multihead")
    again = load_checkpoint(tmp_path)
    assert again.config == model.config
    state, found = model.state_dict(), again.state_dict()
    assert state.keys() == found.keys()
    assert all(torch.equal(value, found[key]) for key, value in state.items())
    ids = torch.tensor([[1, 2, 3, 4]])
    given = (ids, ids) if isinstance(model, mh.EncoderDecoder) else (ids,)
    assert torch.equal(again(*given), model(*given))


def test_tied_matrices_stay_one(tmp_path):
    pytest.importorskip("safetensors")
    save_checkpoint(tiny.language_model(), tmp_path, "multihead")
    again = load_checkpoint(tmp_path)
    assert again.head.weight is again.embedding.weight


CONFIG = tiny.language_model().config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("config"), "has no config"),
        (lambda c: c["config"].pop("vocab_size"), "LanguageModelConfig cannot be: .*vocab_size"),
        (lambda c: c["config"].update(kind="Trainer"), "holds a 'Trainer', which this version"),
        (lambda c: c["config"].update(later=1), "LanguageModelConfig cannot be: .*later"),
        (
            lambda c: c["config"]["layers"][0].update(norm="none"),
            "BlockConfig cannot be: norm must",
        ),
        (
            lambda c: c.update(config=c["config"]["layers"][0]),
            "describes no model, but BlockConfig",
        ),
        (lambda c: c.update(config=3), "describes no model, but int"),
    ],
)
def test_what_describes_no_model_is_refused(change, message):
    fields = json.loads(json.dumps(write_config(CONFIG, "multihead")))
    assert read_config(fields) == CONFIG
    change(fields)
    with pytest.raises(mh.ModelError, match=message):
        read_config(fields)


def test_what_json_has_no_word_for_is_refused():
    odd = replace(CONFIG, layers=(replace(CONFIG.layers[0], window=torch.tensor(3)),))
    with pytest.raises(mh.ModelError, match=r"a config\.json cannot hold tensor\(3\)"):
        write_config(odd, "multihead")
