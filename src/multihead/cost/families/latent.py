"""DeepSeek: latent attention, and experts from some layer on."""

from __future__ import annotations

from multihead.cost.families.fields import Fields
from multihead.cost.latent import LatentAttention
from multihead.cost.model import AnyFeedForward, Experts, FeedForward, Layer, Model

MODEL_TYPES = ("deepseek_v2", "deepseek_v3")

_DEFAULTS = {
    "deepseek_v2": {"first_k_dense_replace": 0, "q_lora_rank": 1536, "n_shared_experts": 2},
    "deepseek_v3": {"first_k_dense_replace": 3, "q_lora_rank": 1536, "n_shared_experts": 1},
}


def read(fields: Fields, model_type: str) -> Model:
    """The description of a DeepSeek model."""
    fields = fields.with_defaults(_DEFAULTS[model_type])
    fields.refuse(pretraining_tp=1, moe_layer_freq=1)
    width, bias = fields.size("hidden_size"), fields.flag("attention_bias")
    attention = LatentAttention(
        embed_dim=width,
        heads=fields.size("num_attention_heads"),
        latent_dim=fields.size("kv_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        value_dim=fields.size("v_head_dim"),
        query_latent_dim=fields.size_or_none("q_lora_rank"),
        latent_bias=bias,
        o_bias=bias,
    )
    ffn_bias = model_type == "deepseek_v2" and fields.flag("mlp_bias")
    layers = fields.size("num_hidden_layers")
    return Model(
        layers=tuple(Layer(attention, _feed_forward(fields, i, ffn_bias)) for i in range(layers)),
        vocab=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        trained_context=fields.size_or_none("max_position_embeddings"),
    )


def _feed_forward(fields: Fields, index: int, bias: bool) -> AnyFeedForward:
    width = fields.size("hidden_size")
    if index < fields.count_or("first_k_dense_replace", 0):
        return FeedForward(width, fields.size("intermediate_size"), bias=bias)
    expert = fields.size("moe_intermediate_size")
    shared = fields.count_or("n_shared_experts", 0)
    return Experts(
        FeedForward(width, expert),
        fields.size("n_routed_experts", "num_local_experts"),
        fields.size("num_experts_per_tok"),
        shared=FeedForward(width, expert * shared, bias=bias) if shared else None,
    )
