"""Decoders with rotary positions, from Llama to the mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from multihead.cost.families.fields import FULL, SLIDING, Fields
from multihead.cost.model import AnyFeedForward, Experts, FeedForward, Layer, Model
from multihead.cost.parts import Attention, Norm, norm_parameters
from multihead.errors import ArgumentError

QKNorm = Literal["none", "head", "width"]


@dataclass(frozen=True)
class Family:
    """How a family differs from Llama.

    Attributes:
        defaults: fields that a config.json leaves out where they are these.
        qkv_bias, o_bias, ffn_bias: a field that says whether there are biases, or the answer.
        gated: whether the feed-forward has a gate.
        norm, norms: kind of the norms, and how many a layer has.
        qk_norm: norms of queries and keys: none, one for all heads of head_dim lanes, or one over
            the lanes of all heads.
        windows: the layer types of a config that does not list them, by number of layers.
        head_bias: a bias of the logits.
        sinks: a trained logit for each head.
        feed_forward: what layer i has, where that is not one feed-forward.
    """

    defaults: dict[str, Any]
    qkv_bias: str | bool = "attention_bias"
    o_bias: str | bool = "attention_bias"
    ffn_bias: str | bool = "mlp_bias"
    gated: bool = True
    norm: Norm = "rms"
    norms: int = 2
    qk_norm: QKNorm = "none"
    windows: Callable[[Fields, int], list[str]] = lambda _, layers: [FULL] * layers
    head_bias: bool = False
    sinks: bool = False
    feed_forward: Callable[[Fields, int], AnyFeedForward] | None = None


def _all_sliding(_: Fields, layers: int) -> list[str]:
    return [SLIDING] * layers


def _every(period: int, *, first: str) -> Callable[[Fields, int], list[str]]:
    """Full attention in every `period`-th layer, or the first of each period."""
    offset = 0 if first == FULL else 1

    def types(fields: Fields, layers: int) -> list[str]:
        step = fields.size_or("sliding_window_pattern", period)
        return [FULL if (index + offset) % step == 0 else SLIDING for index in range(layers)]

    return types


def _upper_layers(fields: Fields, layers: int) -> list[str]:
    first = fields.count_or("max_window_layers", 28)
    return [SLIDING if index >= first else FULL for index in range(layers)]


def _lower_even_layers(fields: Fields, layers: int) -> list[str]:
    last = fields.count_or("max_window_layers", 28)
    return [SLIDING if index % 2 == 0 and index < last else FULL for index in range(layers)]


def _all_experts(ffn_field: str, count_field: str, **options: bool) -> Any:
    def feed_forward(fields: Fields, _: int) -> Experts:
        bias = options.get("bias", False)
        return Experts(
            FeedForward(fields.size("hidden_size"), fields.size(ffn_field), True, bias),
            fields.size(count_field, "num_experts"),
            fields.size("num_experts_per_tok"),
            router_bias=bias,
        )

    return feed_forward


def _qwen_experts(fields: Fields, index: int) -> AnyFeedForward:
    width = fields.size("hidden_size")
    plain = index in (fields.listed("mlp_only_layers") or ())
    if plain or (index + 1) % fields.size_or("decoder_sparse_step", 1):
        return FeedForward(width, fields.size("intermediate_size"))
    shared = fields.size_or_none("shared_expert_intermediate_size")
    return Experts(
        FeedForward(width, fields.size("moe_intermediate_size")),
        fields.size("num_experts", "num_local_experts"),
        fields.size("num_experts_per_tok"),
        shared=None if shared is None else FeedForward(width, shared),
        shared_gate=shared is not None,
    )


_TIED = {"tie_word_embeddings": True}
_WINDOW_4096 = {"sliding_window": 4096}
_KV_HEADS_8 = {"num_key_value_heads": 8}
_GEMMA = {**_TIED, "head_dim": 256}
# As the text_config of a model that also sees, which leaves out all that its class says.
_GEMMA_3 = {
    **_GEMMA,
    **_WINDOW_4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
}
# Windows that these configs name are in force only where another field says so.
_SWITCHED = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")

FAMILIES: dict[str, Family] = {
    "llama": Family({}),
    "granite": Family({}),
    "smollm3": Family({**_TIED, "num_key_value_heads": 4}),
    "mistral": Family(
        {**_WINDOW_4096, **_KV_HEADS_8},
        qkv_bias=False,
        o_bias=False,
        ffn_bias=False,
        windows=_all_sliding,
    ),
    "mixtral": Family(
        _KV_HEADS_8,
        qkv_bias=False,
        o_bias=False,
        windows=_all_sliding,
        feed_forward=_all_experts("intermediate_size", "num_local_experts"),
    ),
    "qwen2": Family(
        {"num_key_value_heads": 32},
        qkv_bias=True,
        o_bias=False,
        ffn_bias=False,
        windows=_upper_layers,
    ),
    "qwen3": Family(
        {"head_dim": 128, "num_key_value_heads": 32},
        ffn_bias=False,
        qk_norm="head",
        windows=_upper_layers,
    ),
    "qwen2_moe": Family(
        {"qkv_bias": True, "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632},
        qkv_bias="qkv_bias",
        o_bias=False,
        windows=_lower_even_layers,
        feed_forward=_qwen_experts,
    ),
    "qwen3_moe": Family(
        {"num_key_value_heads": 4},
        qk_norm="head",
        windows=_all_sliding,
        feed_forward=_qwen_experts,
    ),
    "gemma": Family({**_GEMMA, "num_key_value_heads": 16}, ffn_bias=False, norm="rms_offset"),
    "gemma2": Family(
        {
            **_GEMMA,
            **_WINDOW_4096,
            "num_key_value_heads": 4,
            "final_logit_softcapping": 30.0,
        },
        ffn_bias=False,
        norm="rms_offset",
        norms=4,
        windows=_every(2, first=SLIDING),
    ),
    "gemma3_text": Family(
        _GEMMA_3,
        ffn_bias=False,
        norm="rms_offset",
        norms=4,
        qk_norm="head",
        windows=_every(6, first=SLIDING),
    ),
    "phi3": Family({}, qkv_bias=False, o_bias=False, ffn_bias=False, windows=_all_sliding),
    "phi": Family(
        {},
        qkv_bias=True,
        o_bias=True,
        ffn_bias=True,
        gated=False,
        norm="layer",
        norms=1,
        head_bias=True,
    ),
    "olmo": Family({}, ffn_bias=False, norm="none"),
    "olmo2": Family({}, ffn_bias=False, qk_norm="width"),
    "olmo3": Family(
        _WINDOW_4096, ffn_bias=False, qk_norm="width", windows=_every(4, first=SLIDING)
    ),
    "starcoder2": Family(
        {**_TIED, "use_bias": True, "num_key_value_heads": 2},
        qkv_bias="use_bias",
        o_bias="use_bias",
        ffn_bias="use_bias",
        gated=False,
        norm="layer",
        windows=_all_sliding,
    ),
    "gpt_neox": Family({"attention_bias": True}, ffn_bias=True, gated=False, norm="layer"),
    "gpt_oss": Family(
        {**_KV_HEADS_8, "head_dim": 64, "sliding_window": 128, "attention_bias": True},
        sinks=True,
        windows=_every(2, first=SLIDING),
        feed_forward=_all_experts("intermediate_size", "num_local_experts", bias=True),
    ),
}


def read(fields: Fields, model_type: str) -> Model:
    """The description of a model of one of `FAMILIES`."""
    family = FAMILIES[model_type]
    fields = fields.with_defaults(family.defaults)
    fields.refuse(pretraining_tp=1, use_bidirectional_attention=False, qk_layernorm=False)
    layers = fields.size("num_hidden_layers")
    types = _layer_types(fields, model_type, family, layers)
    return Model(
        layers=tuple(_layer(fields, family, index, kind) for index, kind in enumerate(types)),
        vocab=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        head_bias=family.head_bias,
        capped_logits=fields.flag("final_logit_softcapping"),
        norm=family.norm,
        trained_context=fields.size_or_none("max_position_embeddings"),
    )


def _layer(fields: Fields, family: Family, index: int, kind: str) -> Layer:
    def says(answer: str | bool) -> bool:
        return fields.flag(answer) if isinstance(answer, str) else answer

    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.size_or("num_key_value_heads", heads)
    if fields.get("head_dim") is None and width % heads:
        raise ArgumentError(
            f"The config has no head_dim, and its {heads} heads do not divide its width of {width}."
        )
    head_dim = fields.size_or("head_dim", width // heads)
    qkv_bias = says(family.qkv_bias)
    attention = Attention(
        embed_dim=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        q_bias=qkv_bias,
        k_bias=qkv_bias,
        v_bias=qkv_bias,
        o_bias=says(family.o_bias),
        qk_norm=_qk_norm(family, heads, kv_heads, head_dim),
        sinks=family.sinks,
        window=fields.size("sliding_window") if kind == SLIDING else None,
        rotary_dim=head_dim,
    )
    if family.feed_forward is not None:
        feed_forward = family.feed_forward(fields, index)
    else:
        feed_forward = FeedForward(
            width, fields.size("intermediate_size"), family.gated, says(family.ffn_bias)
        )
    return Layer(attention, feed_forward, norms=family.norms, norm=family.norm)


def _qk_norm(family: Family, heads: int, kv_heads: int, head_dim: int) -> int:
    lanes = {"none": 0, "head": 2 * head_dim, "width": (heads + kv_heads) * head_dim}
    return norm_parameters(family.norm, lanes[family.qk_norm])


def _layer_types(fields: Fields, model_type: str, family: Family, layers: int) -> list[str]:
    window = fields.get("sliding_window")
    if model_type in _SWITCHED and not fields.flag("use_sliding_window"):
        window = None
    if not window or model_type in ("llama", "granite"):
        return [FULL] * layers
    return fields.layer_types(layers) or family.windows(fields, layers)
