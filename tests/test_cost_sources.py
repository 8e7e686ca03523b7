"""Descriptions of modules and files, held against what they describe."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import families
import multihead as mh
from multihead import cost
from multihead.errors import ArgumentError, DtypeError, ModelError
from multihead.heads import prune
from multihead.integrations.attention_layers import attention_layers
from multihead.integrations.cost_gguf import describe_gguf
from multihead.integrations.cost_sources import describe
from multihead.models import (
    BlockConfig,
    Encoder,
    EncoderConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    LanguageModel,
    LanguageModelConfig,
)
from multihead.models.blocks import build_block
from multihead.models.checkpoints import from_checkpoint
from multihead.nn import FeedForward, LatentAttention, MultiHeadAttention, RoPE, TransformerBlock
from requires import require

FAMILIES = (*families.DECODERS, *families.ENCODERS, "bart", "t5")
OWN = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "bert", "bart")


def numel(module):
    return sum(parameter.numel() for parameter in module.parameters())


def total(described):
    return cost.parameters_of(described).total


def without_activations(model):
    """Which a config's description leaves out where they change nothing that is counted."""
    source = None if model.source is None else without_activations(model.source)
    layers = tuple(
        dataclasses.replace(
            layer, feed_forward=dataclasses.replace(layer.feed_forward, activation="silu")
        )
        for layer in model.layers
    )
    return dataclasses.replace(model, layers=layers, source=source)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_of_every_family_of_transformers(family):
    model = families.build(family)
    assert total(describe(model)) == numel(model)


@pytest.mark.parametrize("family", OWN)
def test_our_model_of_the_same_checkpoint_is_described_alike(family):
    theirs = families.build(family)
    ours = from_checkpoint(theirs.config.to_dict(), theirs.state_dict())
    described, expected = describe(ours), describe(theirs)
    if family == "bart":  # the bias of whose logits is a constant in transformers
        expected = dataclasses.replace(expected, head_bias=True)
    assert total(described) == numel(ours) == total(expected)
    assert without_activations(described) == without_activations(expected)


def test_a_model_without_its_head_has_no_logits():
    model = families.build("gpt2")  # whose head is tied: the parameters are the same
    assert describe(model).head
    assert not describe(model.transformer).head
    assert not describe(families.build("llama").model).head


ATTENTIONS = {
    "plain": MultiHeadAttention(24, 4),
    "biases": MultiHeadAttention(24, 4, num_kv_heads=2, qkv_bias=True, out_bias=True),
    "input bias": MultiHeadAttention(24, 4, head_dim=10, value_dim=7, qkv_bias=True),
    "norms and sinks": MultiHeadAttention(24, 4, qk_norm=torch.nn.LayerNorm, sinks=True, window=5),
    "cross": MultiHeadAttention(24, 4, context_dim=18, qkv_bias=True, qk_norm=torch.nn.RMSNorm),
    "latent": LatentAttention(24, 3, latent_dim=10, nope_dim=6, rope_dim=4, value_dim=5),
    "latent queries": LatentAttention(
        24,
        3,
        latent_dim=10,
        nope_dim=6,
        rope_dim=4,
        value_dim=5,
        query_latent_dim=13,
        latent_bias=True,
        out_bias=True,
    ),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_layers(name):
    layer = ATTENTIONS[name]
    assert total(describe(layer)) == numel(layer)


def test_what_a_description_says_of_attention():
    layer = MultiHeadAttention(24, 4, num_kv_heads=2, value_dim=7, window=mh.Window(5, 2))
    assert describe(layer) == cost.Attention(24, 4, 2, 6, 7, window=6, window_ahead=2)
    restricted = MultiHeadAttention(24, 2, window=mh.Window(torch.tensor([3, 8]), keep_first=4))
    described = describe(restricted)
    assert (described.head_windows, described.keep_first) == ((4, 9), 4)
    model = cost.Model((cost.Layer(described, cost.FeedForward(24, 8)),), head=False)
    pairs = cost.forward(model, cost.Pass(13)).exponentials
    visible = restricted.window & mh.Causal()
    assert pairs == int(visible.to_dense(13, 13).expand(1, 2, 13, 13).sum())
    turned = MultiHeadAttention(24, 4, rope=RoPE(rotary_dim=4))
    assert describe(turned) == cost.Attention(24, 4, 4, 6, 6, rotary_dim=4)


@pytest.mark.parametrize("norm", ["rms", "rms_offset", "layer"])
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("crosses", [False, True])
def test_blocks(crosses, placement, norm):
    config = BlockConfig(
        24, 4, 37, norm=norm, norm_placement=placement, context_dim=18 if crosses else None
    )
    block = build_block(dataclasses.replace(config, gated=crosses, ffn_bias=not crosses))
    described = describe(block)
    assert total(described) == numel(block)
    assert described.norms == (3 if crosses else 2) * (2 if placement == "sandwich" else 1)


def build(options, kind=LanguageModel, config=LanguageModelConfig, **block):
    layers = (BlockConfig(24, 4, 37, 2, **block), BlockConfig(24, 2, 11, **block))
    with torch.device("meta"):
        return kind(config(31, layers, **options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": False, "head_bias": True, "final_norm": False},
        {"positions": "learned", "max_positions": 50, "position_offset": 2, "embedding_norm": True},
        {"positions": "sinusoidal"},
    ],
)
def test_language_models_on_the_meta_device(options):
    model = build(options, norm="layer")
    assert total(describe(model)) == numel(model)


@pytest.mark.parametrize("options", [{}, {"num_types": 2, "pooler": True, "final_norm": True}])
def test_encoders(options):
    model = build(options, Encoder, EncoderConfig)
    described = describe(model)
    assert total(described) == numel(model)
    assert not described.causal
    assert not described.head


@pytest.mark.parametrize("shared", [False, True])
def test_encoder_decoders(shared):
    source = EncoderConfig(31, (BlockConfig(24, 4, 37),))
    target = LanguageModelConfig(31, (BlockConfig(24, 4, 37, context_dim=24),) * 2)
    model = EncoderDecoder(EncoderDecoderConfig(source, target, shared=shared))
    assert total(describe(model)) == numel(model)
    with pytest.raises(ArgumentError, match="describe the EncoderDecoder"):
        describe(model.decoder)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gpt2", "bert"])
def test_pruned_models_of_transformers(family):
    require("models")
    model = families.build(family)
    group = attention_layers(model)[1].pruned.group
    prune(model, {(1, head) for head in range(group)})
    described = describe(model)
    assert cost.parameters_of(described).total == numel(model)
    whole, less = (layer.attention for layer in described.layers)
    assert (less.heads, less.kv_heads) == (whole.heads - group, whole.kv_heads - 1)
    again = cost.from_transformers(json.loads(model.config.to_json_string()))
    assert again.layers == described.layers


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ({"0": [0, 1, 2, 3]}, "leaves layer 0 no head"),
        ({"0": [4]}, r"names heads that layer 0 does not have: \[4\]"),
        ({"0": [0]}, "KV groups of different size"),
        ({"2": [0]}, "names layer 2, but there are 1 layers"),
        ([1], "must be of the form"),
    ],
)
def test_pruned_heads_that_cannot_be_are_refused(gone, message):
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 11,
        "multihead_pruned_heads": gone,
    }
    with pytest.raises(ArgumentError, match=message):
        cost.from_transformers(config)


def test_one_name_of_the_field_of_pruned_heads():
    from multihead.cost.families.pruned import FIELD
    from multihead.models.checkpoints import pruned

    assert FIELD == pruned.FIELD


def test_what_was_changed_is_refused():
    model = families.build("llama")
    model.model.layers[0].mlp.adapter = torch.nn.Linear(3, 5)
    with pytest.raises(ArgumentError, match=r"31,478 parameters, but a whole model.*31,458"):
        describe(model)
    with pytest.raises(ArgumentError, match=r"T5Stack has .* part of one"):
        describe(families.build("t5").encoder)


def test_what_has_no_description_is_refused():
    with pytest.raises(DtypeError, match=r"module must be a layer or a model.*got Linear"):
        describe(torch.nn.Linear(3, 5))
    with pytest.raises(DtypeError, match="got int"):
        describe(3)
    for window in (mh.Window(None), mh.Window(3, torch.tensor([0, 1]))):
        with pytest.raises(ArgumentError, match="an end behind, and one ahead for all heads"):
            describe(MultiHeadAttention(24, 2, window=window))
    attention = MultiHeadAttention(24, 2)
    with pytest.raises(ArgumentError, match=r"feed_forward must be a FeedForward.*Sequential"):
        describe(TransformerBlock(attention, torch.nn.Sequential()))

    class Scale(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(()))

    with pytest.raises(ArgumentError, match="Scale has 1 parameters"):
        describe(TransformerBlock(attention, FeedForward(24, 8), norm=Scale))


# GGUF: the architecture, and what transformers calls it.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v3",
}
KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.value_length": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}
NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "layers.0.self_attn.o_proj.bias": "blk.0.attn_output.bias",
}


def write(path, architecture, model, *, more=(), **changes):
    from gguf import GGUFWriter

    config, writer = model.config, GGUFWriter(path, architecture)
    values = {key: getattr(config, name, None) for key, name in KEYS.items()}
    values["attention.key_length"] = getattr(config, "qk_head_dim", None) or config.head_dim
    for key, value in (values | changes).items():
        if isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_array(f"{architecture}.{key}", value)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        theirs = next((it for end, it in NAMES.items() if name.endswith(end)), f"tensor.{index}")
        writer.add_tensor(theirs, parameter.detach().numpy())
    for name in ("rope_freqs.weight", *more):
        writer.add_tensor(name, np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def family(name):
    model = families.build(name)
    if name == "qwen2":
        model.config.head_dim = 10
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gguf_files(architecture, tmp_path):
    model = family(ARCHITECTURES[architecture])
    described = describe_gguf(write(tmp_path / "it.gguf", architecture, model))
    assert total(described) == numel(model)
    assert described.name == "it"
    theirs = describe(model)
    assert [layer.feed_forward for layer in described.layers] == [
        layer.feed_forward for layer in theirs.layers
    ]
    assert described.layers[0].attention == theirs.layers[0].attention


def test_experts_of_a_gguf_llama(tmp_path):
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=31,
        hidden_size=42,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    model = transformers.MixtralForCausalLM(config)
    described = describe_gguf(write(tmp_path / "it.gguf", "llama", model))
    assert total(described) == numel(model)
    assert cost.parameters_of(described, active=True).total < numel(model)


def test_smollm2_without_its_weights():
    require("models")
    from multihead.integrations import smollm2_file

    described = describe_gguf(smollm2_file())
    assert total(described) == 134515008
    assert described.tied
    assert len(described.layers) == 30
    assert described.layers[0].attention == cost.Attention.of(576, 9, 3, rotary=True)


def test_gguf_files_that_cannot_be_counted(tmp_path):
    model = family("llama")
    with pytest.raises(ModelError, match="There is no file"):
        describe_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="architecture 'rwkv6'; those that are counted are llama"):
        describe_gguf(write(tmp_path / "rwkv.gguf", "rwkv6", model))
    with pytest.raises(ModelError, match=r"holds 31,461 parameters.* describe 31,458"):
        describe_gguf(write(tmp_path / "more.gguf", "llama", model, more=["extra.weight"]))
    changed = write(tmp_path / "varied.gguf", "llama", model, **{"attention.head_count_kv": [2, 1]})
    with pytest.raises(ModelError, match="head_count_kv a layer at a time"):
        describe_gguf(changed)
    lacking = write(tmp_path / "less.gguf", "llama", model, embedding_length=None)
    with pytest.raises(ModelError, match=r"less.gguf cannot be counted: .*hidden_size"):
        describe_gguf(lacking)
