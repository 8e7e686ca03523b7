"""BERT: an encoder that normalizes after each sum."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ...errors import ModelError
from ..config import BlockConfig, EncoderConfig
from .fields import Fields, need, read_activation, refuse, write_activation
from .rules import Rule, joined, under

MODEL_TYPES = ("bert",)
PREFIX = ""
OUTER_PREFIX = "bert."
DERIVED = re.compile(r"embeddings\.position_ids|cls\..*")
"""Counted positions, and heads of pre-training, which hidden states do not depend on."""


def read_config(fields: Fields) -> EncoderConfig:
    """Our description of a model from its config.json.

    Raises:
        ModelError: an option that is not supported, or one that is missing.
    """
    refuse(
        fields,
        {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"},
    )
    layer = BlockConfig(
        embed_dim=need(fields, "hidden_size"),
        num_heads=need(fields, "num_attention_heads"),
        ffn_dim=need(fields, "intermediate_size"),
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        activation=read_activation(need(fields, "hidden_act")),
        gated=False,
        norm="layer",
        norm_eps=need(fields, "layer_norm_eps"),
        norm_placement="post",
    )
    return EncoderConfig(
        vocab_size=need(fields, "vocab_size"),
        layers=(layer,) * need(fields, "num_hidden_layers"),
        positions="learned",
        max_positions=need(fields, "max_position_embeddings"),
        embedding_norm=True,
        num_types=need(fields, "type_vocab_size"),
        pooler=True,
    )


def write_config(config: EncoderConfig, model_type: str) -> dict[str, Any]:
    """The config.json of an encoder of ours.

    Raises:
        ModelError: an encoder that is not built like BERT.
    """
    first = config.layers[0]
    fields = {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": first.embed_dim,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": first.num_heads,
        "intermediate_size": first.ffn_dim,
        "hidden_act": write_activation(first.activation),
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.num_types,
        "layer_norm_eps": first.norm_eps,
    }
    if replace(read_config(fields), pooler=config.pooler) != config:
        raise ModelError("this encoder is not built as BERT is.")
    return fields


def rules(config: EncoderConfig) -> list[Rule]:
    """Where each parameter is in a checkpoint of this family."""
    found = under(
        "",
        "embeddings.",
        [
            ("embedding", "word_embeddings"),
            ("positions", "position_embeddings"),
            ("types", "token_type_embeddings"),
        ],
    )
    found += under("embedding_norm", "embeddings.LayerNorm", [("", "")], bias=True)
    for index, layer in enumerate(config.layers):
        ours, theirs = f"blocks.{index}.", f"encoder.layer.{index}."
        found += joined(
            f"{ours}attention.qkv_proj",
            f"{theirs}attention.self.",
            ("query", "key", "value"),
            (layer.num_heads * layer.width,) * 3,
            bias=True,
        )
        found += under(
            ours,
            theirs,
            [
                ("attention.out_proj", "attention.output.dense"),
                ("attention_norm", "attention.output.LayerNorm"),
                ("feed_forward.up_proj", "intermediate.dense"),
                ("feed_forward.down_proj", "output.dense"),
                ("feed_forward_norm", "output.LayerNorm"),
            ],
            bias=True,
        )
    pooler = under("pooler", "pooler.dense", [("", "")], bias=True)
    return found + pooler if config.pooler else found
