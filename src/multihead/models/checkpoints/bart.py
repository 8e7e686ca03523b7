"""BART: an encoder and a decoder that share one table of embeddings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...errors import ModelError
from ..config import BlockConfig, EncoderConfig, EncoderDecoderConfig, LanguageModelConfig
from .fields import Fields, need, read_activation, write_activation
from .rules import Rule, joined, under

MODEL_TYPES = ("bart",)
PREFIX = "model."
OUTER_PREFIX = ""
DERIVED = re.compile(r"model\.(encoder|decoder)\.embed_tokens\.weight")
"""Second names of the shared table."""

HEAD_BIAS = "final_logits_bias"
"""Of the logits; a model that was saved without its head has none."""

_OFFSET = 2  # the rows of the table of positions that no position reads


def read_config(fields: Fields) -> EncoderDecoderConfig:
    """Our description of a model from its config.json.

    Raises:
        ModelError: an option that is missing, or an activation that is not supported.
    """
    width, vocabulary = need(fields, "d_model"), need(fields, "vocab_size")
    longest = need(fields, "max_position_embeddings")
    scale = width**0.5 if fields.get("scale_embedding") else None

    def layers(part: str, context_dim: int | None) -> tuple[BlockConfig, ...]:
        layer = BlockConfig(
            embed_dim=width,
            num_heads=need(fields, f"{part}_attention_heads"),
            ffn_dim=need(fields, f"{part}_ffn_dim"),
            qkv_bias=True,
            out_bias=True,
            ffn_bias=True,
            activation=read_activation(need(fields, "activation_function")),
            gated=False,
            norm="layer",
            norm_placement="post",
            context_dim=context_dim,
        )
        return (layer,) * int(need(fields, f"{part}_layers"))

    source = EncoderConfig(
        vocab_size=vocabulary,
        layers=layers("encoder", None),
        positions="learned",
        max_positions=longest,
        position_offset=_OFFSET,
        embedding_scale=scale,
        embedding_norm=True,
    )
    target = LanguageModelConfig(
        vocab_size=vocabulary,
        layers=layers("decoder", width),
        positions="learned",
        max_positions=longest,
        position_offset=_OFFSET,
        embedding_scale=scale,
        embedding_norm=True,
        final_norm=False,
        tied=True,
        head_bias=True,
    )
    return EncoderDecoderConfig(
        source, target, shared=True, start_token=fields.get("decoder_start_token_id")
    )


def write_config(config: EncoderDecoderConfig, model_type: str) -> dict[str, Any]:
    """The config.json of a model of ours.

    Raises:
        ModelError: a model that is not built like BART.
    """
    parts = {"encoder": config.source.layers, "decoder": config.target.layers}
    first = config.target.layers[0]
    fields: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": config.target.vocab_size,
        "d_model": first.embed_dim,
        "activation_function": write_activation(first.activation),
        "max_position_embeddings": config.target.max_positions,
        "scale_embedding": config.target.embedding_scale is not None,
        "decoder_start_token_id": config.start_token,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
    }
    for name, layers in parts.items():
        fields[f"{name}_layers"] = len(layers)
        fields[f"{name}_attention_heads"] = layers[0].num_heads
        fields[f"{name}_ffn_dim"] = layers[0].ffn_dim
    if with_head_bias(read_config(fields), config.target.head_bias) != config:
        raise ModelError("this model is not built as BART is.")
    return fields


def with_head_bias(config: EncoderDecoderConfig, has: bool) -> EncoderDecoderConfig:
    """The description of a model whose logits have a bias or none."""
    return replace(config, target=replace(config.target, head_bias=has))


def rules(config: EncoderDecoderConfig) -> list[Rule]:
    """Where each parameter is in a checkpoint of this family."""
    found = [Rule("decoder.embedding.weight", ("model.shared.weight",))]
    if config.target.head_bias:
        found.append(Rule("decoder.head.bias", (HEAD_BIAS,), flattened=True))
    found += _part("encoder", config.source.layers)
    return found + _part("decoder", config.target.layers)


def _part(name: str, layers: Sequence[BlockConfig]) -> list[Rule]:
    found = under(f"{name}.positions", f"model.{name}.embed_positions", [("", "")])
    found += under(
        f"{name}.embedding_norm", f"model.{name}.layernorm_embedding", [("", "")], bias=True
    )
    for index, layer in enumerate(layers):
        ours, theirs = f"{name}.blocks.{index}.", f"model.{name}.layers.{index}."
        rows = (layer.embed_dim,) * 3
        names = ("q_proj", "k_proj", "v_proj")
        packed = f"{ours}attention.qkv_proj"
        found += joined(packed, f"{theirs}self_attn.", names, rows, bias=True)
        pairs = [
            ("attention.out_proj", "self_attn.out_proj"),
            ("attention_norm", "self_attn_layer_norm"),
            ("feed_forward.up_proj", "fc1"),
            ("feed_forward.down_proj", "fc2"),
            ("feed_forward_norm", "final_layer_norm"),
        ]
        if layer.context_dim is not None:
            packed = f"{ours}cross_attention.kv_proj"
            found += joined(packed, f"{theirs}encoder_attn.", names[1:], rows[1:], bias=True)
            pairs += [
                ("cross_attention.q_proj", "encoder_attn.q_proj"),
                ("cross_attention.out_proj", "encoder_attn.out_proj"),
                ("cross_attention_norm", "encoder_attn_layer_norm"),
            ]
        found += under(ours, theirs, pairs, bias=True)
    return found
