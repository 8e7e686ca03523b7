"""Whole models without some of their heads: the same function, saved and loaded again."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

import families
import multihead as mh
import tiny
from ablated import outputs, zeroed
from close import assert_close
from corpora import TEXTS, Characters
from multihead.heads import (
    HeadWindows,
    ablate,
    load_pruned,
    mean_loss,
    prune,
    read_corpus,
    restrict,
    rollout,
    writing,
)
from multihead.integrations import load_checkpoint, save_checkpoint
from multihead.integrations.attention_layers import attention_layers
from multihead.models.checkpoints import build as build_ours
from multihead.models.checkpoints import read_config
from requires import require

GROUP = {(0, 0), (0, 1), (0, 2)}
EVERY_OTHER = {(0, 1), (0, 5), (1, 2), (1, 3)}
LAYER = {(0, head) for head in range(6)} | {(1, 3), (1, 4), (1, 5)}
THREE = (
    {(0, 1)},
    {(0, 0), (1, 1), (1, 2)},
    {(0, 0), (0, 1), (0, 2), (1, 0)},
)  # of 3 heads, ungrouped
GROUPED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss")
IDS = tiny.tokens(2, 7)


def pruned(model, heads):
    copied = copy.deepcopy(model)
    prune(copied, heads)
    return copied


@pytest.fixture
def _theirs():
    require("models")


@pytest.mark.parametrize("positions", tiny.POSITIONS)
@pytest.mark.parametrize("heads", [GROUP, EVERY_OTHER, LAYER])
def test_our_language_models(positions, heads):
    whole = tiny.language_model(positions, out_bias=True, sinks=True).double()
    got, expected = pruned(whole, heads), zeroed(whole, heads)
    torch.testing.assert_close(outputs(got, IDS), outputs(expected, IDS), rtol=0, atol=1e-12)
    assert_close(outputs(got.float(), IDS), outputs(expected, IDS), outputs(expected.float(), IDS))
    assert [layer.num_heads for layer in got.config.layers] == [
        6 - sum(index == layer for layer, _ in heads) for index in range(2)
    ]
    assert [layer.attention.num_heads for layer in got.blocks] == [
        layer.num_heads for layer in got.config.layers
    ]
    again = build_ours(got.config)
    again.load_state_dict(got.state_dict())
    assert torch.equal(outputs(again.eval(), IDS), outputs(got, IDS))


@pytest.mark.parametrize("kind", ["growing", "static", "window", "paged"])
@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_our_caches_count_tokens_for_a_layer_without_heads(kind, positions):
    model = pruned(tiny.language_model(positions).double(), LAYER)
    caches = model.make_caches(kind, batch=2, capacity=16)
    with torch.no_grad():
        steps = [
            model(IDS[:, :4], caches=caches),
            *(model(IDS[:, i : i + 1], caches=caches) for i in (4, 5, 6)),
        ]
    torch.testing.assert_close(torch.cat(steps, 1), outputs(model, IDS), rtol=0, atol=1e-12)
    assert caches[0].filled_nbytes <= 16 * 8  # no keys and no values


def test_generation_without_heads_follows_the_masked_model():
    model = tiny.language_model()
    for kind in ("growing", "static", "paged"):
        got = mh.generate(pruned(model, LAYER), [[3, 4, 5], [6]], max_new_tokens=6, cache=kind)
        assert got == mh.generate(
            zeroed(model, LAYER), [[3, 4, 5], [6]], max_new_tokens=6, cache=kind
        )


def test_an_encoder_and_the_parts_of_an_encoder_decoder():
    whole = tiny.encoder_decoder().double()
    heads = {(0, 1), (1, 0), (2, 0), (2, 1), (2, 2), (4, 1), (4, 4)}  # 3 and 5 are cross-attentions
    got = pruned(whole, heads)
    with torch.no_grad():
        torch.testing.assert_close(
            got(IDS, IDS), zeroed(whole, heads)(IDS, IDS), rtol=0, atol=1e-12
        )
    assert got.config.source.layers[0].pruned.heads == (1,)
    assert got.config.target.layers[1].pruned.heads == (1, 4)
    again = build_ours(got.config).double().eval()
    again.load_state_dict(got.state_dict())
    with torch.no_grad():
        assert torch.equal(again(IDS, IDS), got(IDS, IDS))
    with pytest.raises(mh.ModelError, match="a cross-attention of a whole model, cannot be pruned"):
        prune(whole, {(3, 0)})


@pytest.mark.usefixtures("_theirs")
@pytest.mark.parametrize("family", [*GROUPED, "gpt2", "bert"])
def test_transformers_models_pruned_saved_and_loaded(family, tmp_path):
    whole = families.build(family).double()
    for number, heads in enumerate((GROUP, EVERY_OTHER, LAYER) if family in GROUPED else THREE):
        got, expected = pruned(whole, heads), zeroed(whole, heads)
        torch.testing.assert_close(outputs(got, IDS), outputs(expected, IDS), rtol=0, atol=1e-12)
        smaller = pruned(families.build(family), heads)
        folder = tmp_path / str(number)
        smaller.save_pretrained(folder)
        again = load_pruned(folder)
        again.set_attn_implementation("eager")
        again.config._experts_implementation = "eager"
        assert type(again) is type(whole)
        assert not again.training
        assert torch.equal(outputs(again, IDS), outputs(smaller, IDS))
        assert {name: p.shape for name, p in again.named_parameters()} == {
            name: p.shape for name, p in got.named_parameters()
        }


@pytest.mark.usefixtures("_theirs")
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3", "gpt_oss"])
def test_transformers_caches_and_implementations(family):
    from multihead.integrations.hf_cache import PreallocatedCache
    from multihead.integrations.transformers import register

    register()
    heads = LAYER if family in GROUPED else THREE[2]
    whole = families.build(family)
    got, expected = pruned(whole, heads), zeroed(whole, heads)
    options = {"max_new_tokens": 6, "do_sample": False}
    tokens = expected.generate(IDS, **options)
    assert torch.equal(got.generate(IDS, **options), tokens)
    assert torch.equal(got.generate(IDS, **options, cache_implementation="static"), tokens)
    assert torch.equal(
        got.generate(IDS, **options, past_key_values=PreallocatedCache(got.config)), tokens
    )
    plain = () if family in families.WITHOUT_SDPA else ("sdpa",)
    for implementation in (*plain, "multihead"):
        got.set_attn_implementation(implementation)
        expected.set_attn_implementation(implementation)
        torch.testing.assert_close(outputs(got, IDS), outputs(expected, IDS))
        assert torch.equal(got.generate(IDS, **options), tokens)


@pytest.mark.usefixtures("_theirs")
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_layers_without_heads_copy_pickle_and_give_weights(family):
    heads = LAYER if family == "llama" else THREE[2]
    model = pruned(families.build(family), heads)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(outputs(again, IDS), outputs(model, IDS))
    with torch.no_grad():
        weights = model(IDS, output_attentions=True).attentions
    assert [it.shape[1] for it in weights] == [
        len(layer.heads) for layer in attention_layers(model)
    ]
    assert weights[0].shape == (2, 0, 7, 7)


@pytest.mark.usefixtures("_theirs")
def test_numbers_stay_those_of_the_whole_model(tmp_path):
    whole = families.build("llama")
    twice = pruned(pruned(whole, GROUP), {(1, 3), (1, 4), (1, 5)})
    twice.save_pretrained(tmp_path)
    again = load_pruned(tmp_path)
    prune(again, {(0, 3)} | {(0, 4)})
    everything = GROUP | {(1, 3), (1, 4), (1, 5), (0, 3), (0, 4)}
    torch.testing.assert_close(outputs(again, IDS), outputs(pruned(whole, everything), IDS))
    assert again.config.multihead_pruned_heads == {"0": [0, 1, 2, 3, 4], "1": [3, 4, 5]}
    with pytest.raises(
        mh.ArgumentError, match=r"layer 0 has no head 1; its heads are 5\. It was pruned\."
    ):
        prune(again, {(0, 1)})
    with ablate(again, {(0, 5)}):
        got = outputs(again, IDS)
    torch.testing.assert_close(got, outputs(zeroed(whole, everything | {(0, 5)}), IDS))


@pytest.mark.usefixtures("_theirs")
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "qwen3"])
def test_ours_and_theirs_read_each_other(family, tmp_path):
    heads = LAYER if family in GROUPED else THREE[2]
    theirs = pruned(families.build(family), heads)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_checkpoint(tmp_path / "theirs")
    assert [layer.heads for layer in attention_layers(ours)] == [
        layer.heads for layer in attention_layers(theirs)
    ]
    torch.testing.assert_close(outputs(ours, IDS), outputs(theirs, IDS), rtol=1e-4, atol=1e-4)
    save_checkpoint(ours, tmp_path / "ours", family)
    again, back = load_checkpoint(tmp_path / "ours"), load_pruned(tmp_path / "ours")
    assert again.config == ours.config
    assert torch.equal(outputs(again, IDS), outputs(ours, IDS))
    torch.testing.assert_close(outputs(back, IDS), outputs(theirs, IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_theirs")
def test_a_checkpoint_of_ours_without_their_library(tmp_path):
    whole = tiny.language_model()
    got = pruned(whole, LAYER)
    save_checkpoint(got, tmp_path, "llama")
    again = load_checkpoint(tmp_path)
    assert [layer.pruned for layer in again.config.layers] == [
        layer.pruned for layer in got.config.layers
    ]
    assert torch.equal(outputs(again, IDS), outputs(got, IDS))
    assert mean_loss(again, IDS) == pytest.approx(mean_loss(zeroed(whole, LAYER), IDS), abs=1e-5)


@pytest.mark.usefixtures("_theirs")
def test_transformers_refuses_a_pruned_folder_and_we_a_whole_one(tmp_path):
    model = families.build("llama")
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(
        mh.ModelError, match=r"is no pruned model: its config\.json has no multihead_pruned_heads"
    ):
        load_pruned(tmp_path / "whole")
    with pytest.raises(mh.ModelError, match="has no config"):
        load_pruned(tmp_path)
    prune(model, GROUP)
    model.save_pretrained(tmp_path / "pruned")
    with pytest.raises(RuntimeError, match="size"):
        type(model).from_pretrained(tmp_path / "pruned")


FIELDS = {
    "model_type": "llama",
    "vocab_size": 5,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
FIELDS |= {
    "intermediate_size": 3,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"2": [0]}, "names layer 2, but there are 2 layers"),
        ({"0": [7]}, "layer 0: the layer has no head 7; its heads are numbered 0 to 3"),
        ({"0": [1]}, "would keep KV groups of 1 and 2 query heads"),
        ([1], "must be of the form .*; got a list"),
        ({"0": 3}, "must be of the form"),
        ({"x": [3]}, "must be of the form"),
    ],
)
def test_a_config_that_cannot_be_is_refused(field, message):
    with pytest.raises(mh.ModelError, match=message):
        read_config(FIELDS | {"multihead_pruned_heads": field})


def test_nothing_is_pruned_where_something_cannot_be():
    model = tiny.language_model()
    before = outputs(model, IDS)
    for heads, error, message in (
        (
            {(0, 0), (0, 1), (0, 2), (1, 0)},
            mh.ArgumentError,
            r"layer 1 would keep KV groups of 2 and 3",
        ),
        ({(0, 0), (5, 1)}, mh.ArgumentError, "no layer 5"),
        ([0, 1], mh.DtypeError, "pairs"),
    ):
        with pytest.raises(error, match=message):
            prune(model, heads)
    assert torch.equal(outputs(model, IDS), before)
    config = model.config
    prune(model, set())
    assert model.config is config


def test_an_adapter_in_one_layer_of_ours_leaves_all_whole():
    model = tiny.language_model()
    last = model.blocks[-1].attention
    last.out_proj = torch.nn.Sequential(last.out_proj)
    before = outputs(model, IDS)
    with pytest.raises(mh.DtypeError, match="Merge adapters"):
        prune(model, GROUP | {(1, head) for _, head in GROUP})
    assert torch.equal(outputs(model, IDS), before)


@pytest.mark.usefixtures("_theirs")
def test_restricted_heads_of_transformers_keep_their_windows():
    model = families.build("llama")
    names = [f"model.layers.{place}.self_attn" for place in range(2)]
    restrict(model, HeadWindows(2, 1, dict.fromkeys(names, 6), {names[0]: (0, 1, 2, 4)}))
    expected = zeroed(model, GROUP)
    assert_close(
        outputs(pruned(model, GROUP), IDS),
        outputs(expected.double(), IDS),
        outputs(expected.float(), IDS),
    )


@pytest.mark.usefixtures("_theirs")
def test_what_has_other_parts_is_refused():
    from transformers import Olmo2Config, Olmo2ForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 5, "num_hidden_layers": 1}
    olmo = Olmo2ForCausalLM(Olmo2Config(**sizes, num_attention_heads=2, num_key_value_heads=2))
    with pytest.raises(
        mh.ModelError, match=r"its q_norm.weight, \[8\], belongs to all heads together"
    ):
        prune(olmo, {(0, 0)})
    with pytest.raises(mh.ModelError, match="BartAttention, cannot be pruned, only ablated"):
        prune(families.build("bart"), {(0, 0)})
    with pytest.raises(mh.ModelError, match="DeepseekV3Attention, cannot be pruned"):
        prune(families.build("deepseek_v3"), {(0, 0)})
    llama = families.build("llama")
    llama.model.layers[0].self_attn.o_proj = torch.nn.Sequential(
        llama.model.layers[0].self_attn.o_proj
    )
    with pytest.raises(mh.ModelError, match="cannot be told apart"):
        prune(llama, GROUP)
    latent = mh.LatentAttention(8, 2, latent_dim=4, nope_dim=4, rope_dim=2, value_dim=4)
    with pytest.raises(mh.ModelError, match="LatentAttention, cannot be pruned"):
        prune(latent, {(0, 0)})


def watched(model, **choice):
    with mh.watch(model, **choice) as heads:
        outputs(model, IDS)
    assert np.array_equal(heads.queries, heads.record().queries)
    return heads


@pytest.mark.usefixtures("_theirs")
@pytest.mark.parametrize("kind", ["ours", "llama"])
@pytest.mark.parametrize("gone", [EVERY_OTHER - {(1, 2), (1, 3)}, LAYER])
def test_watched_heads_keep_their_numbers(kind, gone):
    whole = tiny.language_model() if kind == "ours" else families.build(kind)
    there = np.array([[(layer, head) not in gone for head in range(6)] for layer in range(2)])
    whole_model, model = zeroed(whole, gone), pruned(whole, gone)
    expected, heads = watched(whole_model), watched(model)
    assert heads.layers == expected.layers
    assert (heads.queries == 14 * there).all()
    for name, table in heads.statistics.items():
        assert np.isnan(table[~there]).all()
        np.testing.assert_allclose(table[there], expected.statistics[name][there], rtol=1e-4)
    record = heads.record()
    assert record.heads == (tuple(range(6)),) * 2
    few = watched(model, heads=[1, 4])
    assert few.record().heads == ((1, 4),) * 2
    assert np.array_equal(few.queries, heads.queries[:, [1, 4]])
    compared = expected.record().compare(record)
    assert {(it.layer, it.head) for it in compared} == {*zip(*there.nonzero(), strict=True)}


@pytest.mark.parametrize("gone", [EVERY_OTHER, LAYER])
def test_what_heads_write_and_carry_on_is_of_first_numbers(gone):
    whole, every = tiny.language_model().double(), slice(None)
    whole_model, model = zeroed(whole, gone), pruned(whole, gone)
    expected, found = (writing(it, IDS[0]) for it in (whole_model, model))
    assert found.heads == expected.heads == (6, 6)
    for layer in range(2):
        for name in ("outputs", "contributions"):
            one, other = (getattr(it, name)(layer, every) for it in (found, expected))
            torch.testing.assert_close(one, other)
        one, other = (it.key_attribution(layer, 5, every) for it in (found, expected))
        torch.testing.assert_close(one, other)
        there = [head for head in range(6) if (layer, head) not in gone]
        weights = found.weights(layer, every)
        torch.testing.assert_close(weights[there], expected.weights(layer, every)[there])
        assert weights.sum() == pytest.approx(len(there) * IDS.shape[1])
    added = expected.attribution(5, -1)
    torch.testing.assert_close(found.attribution(5, -1), added)
    strongest = found.strongest(5, -1, k=20)
    assert sorted((layer, head) for layer, head, _ in strongest) == [
        (layer, head) for layer in range(2) for head in range(6) if (layer, head) not in gone
    ]
    for layer, head, value in strongest:
        assert value == pytest.approx(float(added[layer, head, 0, 0]))
    with pytest.raises(mh.ArgumentError, match="head 1 of layer 0 was pruned"):
        found.top_tokens(0, 1)


def test_rollout_takes_first_numbers():
    whole = tiny.language_model().double()
    whole_model, model = zeroed(whole, EVERY_OTHER), pruned(whole, EVERY_OTHER)
    chosen = {0: (0, 4), 1: (5,)}
    one, other = (rollout(it, IDS[0], [2, -1], heads=chosen) for it in (model, whole_model))
    assert one.heads == other.heads
    torch.testing.assert_close(one.shares, other.shares)
    assert rollout(model, IDS[0], -1).heads == ((0, 2, 3, 4), (0, 1, 4, 5))
    with pytest.raises(mh.ArgumentError, match=r"none of the pruned \[1, 5\]; got \[1\]"):
        rollout(model, IDS[0], -1, heads={0: [1]})
    empty = pruned(whole, LAYER)
    chosen = {1: (0, 1, 2)}
    expected = rollout(zeroed(whole, LAYER), IDS[0], [0, 2, -1], heads=chosen, residual=0.25)
    found = rollout(empty, IDS[0], [0, 2, -1], residual=0.25)
    assert found.heads == ((), (0, 1, 2))
    torch.testing.assert_close(found.shares.sum(-1), torch.ones(3, dtype=torch.float64))
    assert not torch.equal(found.shares, expected.shares)  # the empty layer moves nothing


@pytest.mark.parametrize("gone", [EVERY_OTHER, LAYER])
def test_links_of_a_corpus_are_of_first_numbers(gone):
    whole = tiny.language_model().double()
    whole_record, record = (
        read_corpus(model, Characters(), TEXTS, context=23)
        for model in (zeroed(whole, gone), pruned(whole, gone))
    )
    for layer, head in whole_record.heads.places():
        found, expected = (it.strongest_links(layer, head) for it in (record, whole_record))
        deciles, all_deciles = (it.deciles(layer, head) for it in (record, whole_record))
        if (layer, head) in gone:
            assert not found
            assert not any(deciles)
            assert np.isnan(record.first_key_first[layer, head])
        else:
            assert [replace(it, weight=0) for it in found] == [
                replace(it, weight=0) for it in expected
            ]
            assert [len(it) for it in deciles] == [len(it) for it in all_deciles]
            assert record.first_key_first[layer, head] == whole_record.first_key_first[layer, head]


@pytest.mark.usefixtures("_theirs")
def test_packed_layers_are_packed_anew():
    from multihead.nn.packed_linear import Rows, packed_class

    for family, heads in (("gpt2", THREE[2]), ("llama", GROUP)):
        whole = families.build(family)
        packed = copy.deepcopy(whole)
        for layer in attention_layers(packed):
            for part in layer.module.children():
                kind = packed_class(type(part))
                if kind is not None:
                    part.__class__ = kind  # as prepack does where it measures a gain
                    part.pack(Rows(1))
        prune(packed, heads)
        torch.testing.assert_close(outputs(packed, IDS), outputs(zeroed(whole, heads), IDS))


_SIZES = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 37, "num_hidden_layers": 2}
_SIZES |= {"num_attention_heads": 6, "pad_token_id": 0, "max_position_embeddings": 64}
_GROUPS = {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.usefixtures("_theirs")
@pytest.mark.parametrize("name", ["Cohere", "SmolLM3", "Glm4", "Exaone4", "StableLm", "Roberta"])
def test_families_that_are_known_by_what_they_are_made_of(name):
    import transformers

    kind, more = ("Model", {}) if name == "Roberta" else ("ForCausalLM", _GROUPS)
    config = getattr(transformers, f"{name}Config")(**_SIZES, **more)
    config._attn_implementation = "eager"
    whole = getattr(transformers, name + kind)(config).double().eval()
    ids, heads = IDS + 3, GROUP | {(1, head) for head in range(6)}
    expected = outputs(zeroed(whole, heads), ids % 101)
    with ablate(whole, heads):
        torch.testing.assert_close(outputs(whole, ids % 101), expected, rtol=0, atol=1e-12)
    prune(whole, heads)
    torch.testing.assert_close(outputs(whole, ids % 101), expected, rtol=0, atol=1e-9)


@pytest.mark.usefixtures("_theirs")
def test_what_only_looks_like_gpt2_is_refused():
    from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

    model = GPTBigCodeForCausalLM(GPTBigCodeConfig(vocab_size=11, n_embd=8, n_head=2, n_layer=1))
    with pytest.raises(mh.ModelError, match="GPTBigCodeAttention, cannot be told apart"):
        attention_layers(model)
