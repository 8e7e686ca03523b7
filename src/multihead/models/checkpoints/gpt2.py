"""GPT-2: matrices stored as [in, out], queries, keys and values packed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ...errors import ModelError
from ..config import BlockConfig, LanguageModelConfig
from .fields import Fields, need, read_activation, refuse, write_activation
from .rules import Rule, under

MODEL_TYPES = ("gpt2",)
PREFIX = "transformer."
OUTER_PREFIX = ""
DERIVED = re.compile(r".*\.attn\.(masked_)?bias")
"""Triangles that older checkpoints keep."""


def read_config(fields: Fields) -> LanguageModelConfig:
    """Our description of a model from its config.json.

    Raises:
        ModelError: an option that is not supported, or one that is missing.
    """
    refuse(fields, {"add_cross_attention": False})
    width, heads = need(fields, "n_embd"), need(fields, "n_head")
    plain = 1.0 if fields.get("scale_attn_weights") is False else (width // heads) ** -0.5
    layer = BlockConfig(
        embed_dim=width,
        num_heads=heads,
        ffn_dim=fields.get("n_inner") or 4 * width,
        scale=None if fields.get("scale_attn_weights", True) else 1.0,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        activation=read_activation(fields.get("activation_function", "gelu_new")),
        gated=False,
        norm="layer",
        norm_eps=fields.get("layer_norm_epsilon", 1e-5),
    )
    layers = [layer] * need(fields, "n_layer")
    if fields.get("scale_attn_by_inverse_layer_idx"):
        layers = [replace(layer, scale=plain / (index + 1)) for index, layer in enumerate(layers)]
    return LanguageModelConfig(
        vocab_size=need(fields, "vocab_size"),
        layers=tuple(layers),
        positions="learned",
        max_positions=need(fields, "n_positions"),
        tied=bool(fields.get("tie_word_embeddings", True)),
    )


def write_config(config: LanguageModelConfig, model_type: str) -> dict[str, Any]:
    """The config.json of a model of ours.

    Raises:
        ModelError: a model that is not built like GPT-2.
    """
    first = config.layers[0]
    activation = write_activation(first.activation)
    fields: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "n_embd": first.embed_dim,
        "n_head": first.num_heads,
        "n_layer": len(config.layers),
        "n_inner": first.ffn_dim,
        "n_positions": config.max_positions,
        "activation_function": "gelu_new" if first.activation == "gelu_tanh" else activation,
        "layer_norm_epsilon": first.norm_eps,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": config.tied,
    }
    for scaled in (True, False):
        for by_layer in (True, False):
            fields |= {
                "scale_attn_weights": scaled,
                "scale_attn_by_inverse_layer_idx": by_layer,
            }
            if read_config(fields) == config:
                return fields
    raise ModelError("this model is not built as GPT-2 is.")


def rules(config: LanguageModelConfig) -> list[Rule]:
    """Where each parameter is in a checkpoint of this family."""
    found = [
        Rule("embedding.weight", ("transformer.wte.weight",)),
        Rule("positions.weight", ("transformer.wpe.weight",)),
    ]
    for index in range(len(config.layers)):
        ours, theirs = f"blocks.{index}.", f"transformer.h.{index}."
        found += under(
            ours, theirs, [("attention_norm", "ln_1"), ("feed_forward_norm", "ln_2")], bias=True
        )
        found += under(
            ours,
            theirs,
            [
                ("attention.qkv_proj", "attn.c_attn"),
                ("attention.out_proj", "attn.c_proj"),
                ("feed_forward.up_proj", "mlp.c_fc"),
                ("feed_forward.down_proj", "mlp.c_proj"),
            ],
            bias=True,
            transposed=True,
        )
    found += under("norm", "transformer.ln_f", [("", "")], bias=True)
    return found if config.tied else [*found, Rule("head.weight", ("lm_head.weight",))]
