"""Llama and what is built like it: Mistral, Qwen2, Qwen3, Gemma 2 and 3."""

from __future__ import annotations

import re
from typing import Any

from ...errors import ModelError
from ...nn.positions import RoPE
from ..config import BlockConfig, LanguageModelConfig
from .fields import (
    Fields,
    need,
    read_activation,
    read_rope,
    refuse,
    write_activation,
    write_rope,
)
from .rules import Rule, joined, under

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
PREFIX = "model."
OUTER_PREFIX = ""
DERIVED = re.compile(r".*rotary_emb\.(\w+_)?inv_freq")
"""Tensors of older checkpoints that follow from the config."""

_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA = ("gemma2", "gemma3_text")


def read_config(fields: Fields) -> LanguageModelConfig:
    """Our description of a model from its config.json.

    Raises:
        ModelError: an option that is not supported, or one that is missing.
    """
    kind = need(fields, "model_type")
    refuse(fields, {"use_bidirectional_attention": False, "pretraining_tp": 1})
    gemma = kind in _GEMMA
    heads = need(fields, "num_attention_heads")
    width = need(fields, "hidden_size")
    head_dim = fields.get("head_dim") or width // heads
    layer_types = _layer_types(fields)
    all_biases = bool(fields.get("attention_bias"))
    scale = need(fields, "query_pre_attn_scalar") ** -0.5 if gemma else None

    def layer(layer_type: str) -> BlockConfig:
        return BlockConfig(
            embed_dim=width,
            num_heads=heads,
            num_kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            ffn_dim=need(fields, "intermediate_size"),
            scale=scale,
            window=need(fields, "sliding_window") if layer_type == _SLIDING else None,
            softcap=fields.get("attn_logit_softcapping") if kind == "gemma2" else None,
            rope=read_rope(fields, layer_type),
            qk_norm=kind in ("qwen3", "gemma3_text"),
            qkv_bias=all_biases or kind == "qwen2",
            out_bias=all_biases,
            ffn_bias=bool(fields.get("mlp_bias")),
            activation=read_activation(
                need(fields, "hidden_activation" if gemma else "hidden_act")
            ),
            norm="rms_offset" if gemma else "rms",
            norm_eps=need(fields, "rms_norm_eps"),
            norm_placement="sandwich" if gemma else "pre",
        )

    return LanguageModelConfig(
        vocab_size=need(fields, "vocab_size"),
        layers=tuple(layer(layer_type) for layer_type in layer_types),
        max_positions=fields.get("max_position_embeddings"),
        embedding_scale=width**0.5 if gemma else None,
        tied=bool(fields.get("tie_word_embeddings", gemma)),
        logit_softcap=fields.get("final_logit_softcapping") if gemma else None,
    )


def write_config(config: LanguageModelConfig, model_type: str) -> dict[str, Any]:
    """The config.json of a model of ours as one of `model_type`.

    Raises:
        ModelError: a model that is not built like that.
    """
    first = config.layers[0]
    fields = _common_fields(config) | {"model_type": model_type}
    windows = {layer.window for layer in config.layers if layer.window is not None}
    if windows:
        fields["sliding_window"] = max(windows)
    if model_type != "mistral":
        fields["layer_types"] = [_SLIDING if layer.window else _FULL for layer in config.layers]
    if model_type == "qwen2":
        fields |= {"use_sliding_window": bool(windows)}
    elif model_type == "qwen3":
        fields |= {"use_sliding_window": bool(windows), "attention_bias": first.out_bias}
    elif model_type == "llama":
        fields |= {"attention_bias": first.out_bias, "mlp_bias": first.ffn_bias}
        del fields["layer_types"]
    elif model_type in _GEMMA:
        fields["hidden_activation"] = fields.pop("hidden_act")
        fields |= {
            "attention_bias": first.out_bias,
            "query_pre_attn_scalar": round((first.scale or first.width**-0.5) ** -2),
            "final_logit_softcapping": config.logit_softcap,
            "attn_logit_softcapping": first.softcap,
        }
    if model_type == "gemma3_text":
        fields["rope_parameters"] = {
            name: write_rope(layer.rope, layer.width)
            for name, layer in zip(fields["layer_types"], config.layers, strict=True)
            if layer.rope is not None
        }
    if read_config(fields) != config:
        raise ModelError(f"this model is not built as one of type {model_type!r} is.")
    return fields


def _common_fields(config: LanguageModelConfig) -> dict[str, Any]:
    first = config.layers[0]
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": first.embed_dim,
        "intermediate_size": first.ffn_dim,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.width,
        "hidden_act": write_activation(first.activation),
        "rms_norm_eps": first.norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": write_rope(first.rope or RoPE(), first.width),
        "tie_word_embeddings": config.tied,
    }


def rules(config: LanguageModelConfig) -> list[Rule]:
    """Where each parameter is in a checkpoint of this family."""
    found = under("embedding", "model.embed_tokens", [("", "")])
    for index, layer in enumerate(config.layers):
        ours, theirs = f"blocks.{index}.", f"model.layers.{index}."
        rows = (layer.num_heads * layer.width, *[layer.kv_heads * layer.width] * 2)
        found += joined(
            f"{ours}attention.qkv_proj",
            f"{theirs}self_attn.",
            ("q_proj", "k_proj", "v_proj"),
            rows,
            bias=layer.qkv_bias,
        )
        out = [("attention.out_proj", "self_attn.o_proj")]
        found += under(ours, theirs, out, bias=layer.out_bias)
        found += joined(
            f"{ours}feed_forward.gate_up_proj",
            f"{theirs}mlp.",
            ("gate_proj", "up_proj"),
            (layer.ffn_dim, layer.ffn_dim),
            bias=layer.ffn_bias,
        )
        down = [("feed_forward.down_proj", "mlp.down_proj")]
        found += under(ours, theirs, down, bias=layer.ffn_bias)
        found += under(ours, theirs, _norms(layer))
    found += under("norm", "model.norm", [("", "")])
    return found if config.tied else found + under("head", "lm_head", [("", "")])


def _norms(layer: BlockConfig) -> list[tuple[str, str]]:
    found = [("attention_norm", "input_layernorm")]
    if layer.norm_placement == "sandwich":
        found += [
            ("attention_out_norm", "post_attention_layernorm"),
            ("feed_forward_norm", "pre_feedforward_layernorm"),
            ("feed_forward_out_norm", "post_feedforward_layernorm"),
        ]
    else:
        found.append(("feed_forward_norm", "post_attention_layernorm"))
    if layer.qk_norm:
        found += [
            ("attention.q_norm", "self_attn.q_norm"),
            ("attention.k_norm", "self_attn.k_norm"),
        ]
    return found


def _layer_types(fields: Fields) -> list[str]:
    layers = need(fields, "num_hidden_layers")
    kind = fields["model_type"]
    window = fields.get("sliding_window")
    if kind in ("qwen2", "qwen3") and not fields.get("use_sliding_window"):
        window = None
    if window is None or kind == "llama":
        return [_FULL] * layers
    given = fields.get("layer_types")
    if given is not None:
        return list(given)
    if kind in ("qwen2", "qwen3"):
        first = fields.get("max_window_layers", 28)
        return [_SLIDING if index >= first else _FULL for index in range(layers)]
    if kind in _GEMMA:
        period = 2 if kind == "gemma2" else fields.get("sliding_window_pattern", 6)
        return [_FULL if (index + 1) % period == 0 else _SLIDING for index in range(layers)]
    return [_SLIDING] * layers
