"""Rotary positions as Hugging Face configs write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError
from .rope_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NTKScaling,
    RoPEScaling,
    YaRNScaling,
)

# Models that turn neighboring lanes together. Few configs have a key that says so, and those of
# some of these (deepseek_v3 and its like) need not write it.
_INTERLEAVED = (
    *("axk1", "axk2", "bailing_hybrid", "blt_global_transformer", "blt_local_decoder"),
    *("blt_local_encoder", "blt_patcher", "codegen", "cohere", "cohere2", "cohere2_moe"),
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text", "ernie4_5"),
    *("ernie4_5_moe", "ernie4_5_vl_moe_text", "glm", "glm4", "glm4_moe_lite", "glm4v_text"),
    *("glm_moe_dsa", "glm_ocr_text", "gptj", "helium", "hy_v4_vl_text", "llama4_text"),
    *("longcat_flash", "mistral4", "mistral_large4_text", "moonshine", "moonshine_streaming"),
    *("openai_privacy_filter", "sarvam_mla", "youtu"),
)


def read_config(config: Mapping[str, Any], layer_type: str | None) -> dict[str, Any]:
    """The arguments of `RoPE`."""
    rope = _entry(config, layer_type)
    base = _first(rope.get("rope_theta"), config.get("rope_theta"), config.get("rotary_emb_base"))
    return {
        "base": float(_first(base, 10000.0)),
        "rotary_dim": _rotary_dim(config, rope),
        "interleaved": bool(
            _first(config.get("rope_interleave"), config.get("model_type") in _INTERLEAVED)
        ),
        "scaling": _scaling(config, rope),
    }


def _entry(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """What the config says of one type of layer: the flat dictionary of its rotary positions."""
    rope = _first(config.get("rope_parameters"), config.get("rope_scaling"), {})
    nested = [name for name, entry in rope.items() if isinstance(entry, Mapping)]
    local_base = config.get("rope_local_base_freq")  # Gemma 3 before transformers 5
    if not nested and local_base is not None:
        nested = ["full_attention", "sliding_attention"]
        rope = {"full_attention": rope, "sliding_attention": {"rope_theta": local_base}}
    if not nested:
        return rope  # type: ignore[no-any-return]
    if layer_type not in nested:
        raise ArgumentError(
            f"The config turns its types of layers differently: pass layer_type=, one of "
            f"{', '.join(nested)}; got {layer_type!r}."
        )
    return rope[layer_type]  # type: ignore[no-any-return]


def _rotary_dim(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int | None:
    if config.get("rotary_dim") is not None:  # GPT-J
        return int(config["rotary_dim"])
    part = _first(
        rope.get("partial_rotary_factor"),
        config.get("partial_rotary_factor"),
        config.get("rotary_pct"),  # GPT-NeoX before transformers 5
        1.0,
    )
    if part == 1.0:
        return None
    head_dim = config.get("head_dim")
    if head_dim is None:
        head_dim = _needed(config, "hidden_size") // _needed(config, "num_attention_heads")
    return int(head_dim * part)


def _scaling(config: Mapping[str, Any], rope: Mapping[str, Any]) -> RoPEScaling | None:
    kind = _first(rope.get("rope_type"), rope.get("type"), "default")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_needed(rope, "factor"))
    if kind == "ntk":
        return NTKScaling(_needed(rope, "factor"))
    if kind == "dynamic":
        return DynamicNTKScaling(
            _needed(rope, "factor"), _needed(config, "max_position_embeddings")
        )
    if kind in ("yarn", "llama3", "longrope"):
        original = _first(
            config.get("original_max_position_embeddings"),
            rope.get("original_max_position_embeddings"),
            config.get("max_position_embeddings"),
        )
        if original is None:
            raise ArgumentError(f"{kind} scaling needs original_max_position_embeddings.")
        if kind == "llama3":
            return _llama3(rope, original)
        return (_yarn if kind == "yarn" else _longrope)(config, rope, original)
    raise ArgumentError(
        f"rope_type={kind!r} is not known here; known are default, linear, ntk, dynamic, yarn, "
        "longrope and llama3."
    )


def _factor(config: Mapping[str, Any], rope: Mapping[str, Any], original: int) -> float:
    factor = rope.get("factor")
    if factor is None:
        factor = _needed(config, "max_position_embeddings") / original
    return factor  # type: ignore[no-any-return]


def _longrope(config: Mapping[str, Any], rope: Mapping[str, Any], original: int) -> LongRoPEScaling:
    if rope.get("short_mscale") is not None or rope.get("long_mscale") is not None:
        raise ArgumentError(
            "longrope with short_mscale and long_mscale, an amplitude for each length (Phi-3.5-MoE)"
            ", is not known here."
        )
    return LongRoPEScaling(
        _needed(rope, "short_factor"),
        _needed(rope, "long_factor"),
        original,
        _factor(config, rope, original),
        rope.get("attention_factor"),
    )


def _yarn(config: Mapping[str, Any], rope: Mapping[str, Any], original: int) -> YaRNScaling:
    return YaRNScaling(
        _factor(config, rope, original),
        original,
        attention_factor=rope.get("attention_factor"),
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        mscale=rope.get("mscale"),
        mscale_all_dim=rope.get("mscale_all_dim"),
        truncate=rope.get("truncate", True),
    )


def _llama3(rope: Mapping[str, Any], original: int) -> Llama3Scaling:
    return Llama3Scaling(
        _needed(rope, "factor"),
        original,
        low_freq_factor=_needed(rope, "low_freq_factor"),
        high_freq_factor=_needed(rope, "high_freq_factor"),
    )


def _needed(mapping: Mapping[str, Any], key: str) -> Any:
    if mapping.get(key) is None:
        raise ArgumentError(f"The config's rotary positions need {key!r}, which is missing.")
    return mapping[key]


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
