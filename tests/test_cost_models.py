"""Descriptions of models for `multihead.cost`, and their parameters, to the digit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from multihead.cost import (
    MODEL_TYPES,
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Model,
    from_transformers,
    parameters_of,
)
from multihead.errors import ArgumentError

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}
GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
}

# The text_config of Gemma 3 4B: a config inside another leaves out all that its class says.
GEMMA_3_4B = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def llama(**changes: object) -> dict[str, object]:
    return {k: v for k, v in (LLAMA | changes).items() if v != "absent"}


# Their own cards round to 135M, 671B with 37B active, 20.9B with 3.6B active (without embeddings).
# Gemma's 4,300,079,472 are these and 419,816,304 of what sees.
@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (LLAMA, 134515008, 134515008),
        (DEEPSEEK_V3, 671026404352, 37552282624),
        (GPT_OSS_20B, 20914757184, 4187440704),
        (GEMMA_3_4B, 3880263168, 3880263168),
    ],
)
def test_published_models(config: dict[str, object], total: int, active: int) -> None:
    model = from_transformers(config)
    assert parameters_of(model).total == total
    assert parameters_of(model, active=True).total == active


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 512])
def test_plain_attention_has_4_d_squared_whatever_the_heads(heads: int) -> None:
    counted = parameters_of(Attention.of(512, heads))
    assert counted.attention == counted.total == 4 * 512**2
    assert counted.q == counted.k == counted.v == counted.o == 512**2


def test_parts_add_up() -> None:
    attention = Attention(22, 4, 2, 5, 7, q_bias=True, v_bias=True, qk_norm=10, sinks=True)
    counted = parameters_of(Layer(attention, FeedForward(22, 17, bias=True), norm="layer"))
    assert (counted.q, counted.k, counted.v, counted.o) == (22 * 20, 22 * 10, 22 * 14, 28 * 22)
    assert counted.biases == 20 + 14
    assert counted.feed_forward == 3 * 22 * 17 + 17 + 17 + 22
    assert counted.norms == 10 + 2 * 2 * 22
    assert counted.other == 4
    assert (counted + 2 * counted).total == 3 * counted.total


def test_latent_attention() -> None:
    latent = LatentAttention(42, 3, 13, 7, 6, 5, query_latent_dim=17)
    counted = parameters_of(latent)
    assert counted.q == 42 * 17 + 17 * 3 * 13
    assert counted.kv == 42 * 19 + 13 * 3 * 12
    assert counted.o == 15 * 42
    assert counted.norms == 13 + 17
    assert latent.cached_numbers == 19


def test_experts_that_a_token_visits() -> None:
    experts = Experts(FeedForward(10, 3), 7, 2, shared=FeedForward(10, 4), shared_gate=True)
    assert parameters_of(experts).feed_forward == 7 * 90 + 120
    assert parameters_of(experts, active=True).feed_forward == 2 * 90 + 120
    assert parameters_of(experts).router == 70 + 10


def test_objects_and_mappings_read_alike() -> None:
    assert from_transformers(SimpleNamespace(**LLAMA)) == from_transformers(LLAMA)
    first = from_transformers(llama(head_dim=None)).layers[0].attention
    assert first.head_dim == 64
    assert from_transformers(llama(head_dim=32)).layers[0].attention.head_dim == 32
    assert from_transformers(llama(num_key_value_heads="absent")).layers[0].attention.kv_heads == 9


def test_windows_by_layer() -> None:
    gemma = llama(model_type="gemma2", sliding_window=7, num_hidden_layers=4)
    assert [x.attention.window for x in from_transformers(gemma).layers] == [7, None, 7, None]
    assert from_transformers(gemma | {"tie_word_embeddings": None}).tied is False
    gemma3 = llama(model_type="gemma3_text", sliding_window=7, num_hidden_layers=7)
    windows = [x.attention.window for x in from_transformers(gemma3).layers]
    assert windows == [7] * 5 + [None, 7]
    listed = llama(
        model_type="qwen3",
        sliding_window=7,
        use_sliding_window=True,
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
    )
    assert [x.attention.window for x in from_transformers(listed).layers] == [None, 7]
    unused = listed | {"use_sliding_window": False}
    assert [x.attention.window for x in from_transformers(unused).layers] == [None, None]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "absent"}, "model_type"),
        ({"model_type": "gemma3", "text_config": {}}, "text_config"),
        ({"intermediate_size": "absent"}, "intermediate_size"),
        ({"num_attention_heads": 16}, "kv_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"hidden_size": 5.5}, "hidden_size"),
        ({"model_type": ["llama"]}, "known are bart"),
        ({"max_position_embeddings": "2k"}, "max_position_embeddings must be a positive integer"),
        ({"model_type": "mistral", "layer_types": 5}, "layer_types must be a list"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"model_type": "mistral", "layer_types": ["chunked_attention"] * 30}, "chunked"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "bart", "tie_word_embeddings": False}, "tie_word_embeddings"),
    ],
)
def test_a_config_that_would_be_counted_wrongly_is_refused(
    changes: dict[str, object], named: str
) -> None:
    with pytest.raises(ArgumentError, match=named):
        from_transformers(llama(**changes))


def test_descriptions_that_cannot_be_are_refused() -> None:
    layer = Layer(Attention.of(8, 2), FeedForward(8, 3))
    with pytest.raises(ArgumentError, match="divide"):
        Attention.of(8, 4, 3)
    with pytest.raises(ArgumentError, match="head_dim"):
        Attention.of(8, 3)
    with pytest.raises(ArgumentError, match="embed_dim"):
        Layer(Attention.of(8, 2), FeedForward(9, 3))
    with pytest.raises(ArgumentError, match="active"):
        Experts(FeedForward(8, 3), 2, 3)
    with pytest.raises(ArgumentError, match="at least one"):
        Model(())
    with pytest.raises(ArgumentError, match="source"):
        Model((layer,), 5, source=Model((layer,), 5))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_a_saved_config_leaves_out_is_known(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type)
    saved = json.loads(config.to_json_string(use_diff=True))
    if model_type == "deepseek_v2":  # how many experts a token visits has no default
        config.num_experts_per_tok = saved["num_experts_per_tok"] = 2
    assert from_transformers(saved) == from_transformers(config)


_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "attention_bias",
    "tie_word_embeddings",
    "q_lora_rank",
    "n_shared_experts",
    "shared_expert_intermediate_size",
)
_OF_TYPE = {
    "gemma2": ("final_logit_softcapping",),
    "gemma3_text": ("vocab_size", "num_attention_heads", "max_position_embeddings"),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_field_that_a_config_leaves_out_is_what_its_class_says(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoConfig.for_model(model_type).to_dict()
    if model_type == "deepseek_v2":
        whole["num_experts_per_tok"] = 2
    optional = (*_OPTIONAL, *_OF_TYPE.get(model_type, ()))
    for field in filter(whole.__contains__, optional):
        rest = {name: value for name, value in whole.items() if name != field}
        filled = type(transformers.AutoConfig.for_model(model_type)).from_dict(dict(rest))
        assert from_transformers(rest) == from_transformers(filled), field


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_type_names_what_its_config_lacks(model_type: str) -> None:
    with pytest.raises(ArgumentError, match="The config has no"):
        from_transformers({"model_type": model_type})
