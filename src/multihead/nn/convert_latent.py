"""Weights of latent attention from DeepSeek's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from .rope import RoPE

if TYPE_CHECKING:
    from .latent import LatentAttention

_NAMES = {
    "q_proj": "q_proj",
    "q_down_proj": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up_proj": "q_b_proj",
    "kv_down_proj": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up_proj": "kv_b_proj",
    "out_proj": "o_proj",
}


def latent_from_deepseek(
    kind: type[LatentAttention],
    config: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    prefix: str,
) -> LatentAttention:
    """What `LatentAttention.from_deepseek` documents."""
    bias = bool(config.get("attention_bias", False))
    layer = kind(
        _size(config, "hidden_size"),
        _size(config, "num_attention_heads"),
        latent_dim=_size(config, "kv_lora_rank"),
        nope_dim=_size(config, "qk_nope_head_dim"),
        rope_dim=_size(config, "qk_rope_head_dim"),
        value_dim=_size(config, "v_head_dim"),
        query_latent_dim=config.get("q_lora_rank"),
        latent_bias=bias,
        out_bias=bias,
        rope=RoPE.from_config(config),
    )
    target = layer.state_dict()
    found = {}
    for name, tensor in target.items():
        module, _, parameter = name.rpartition(".")
        theirs = f"{prefix}{_NAMES[module]}.{parameter}"
        if theirs not in state_dict:
            raise ArgumentError(f"the state dict has no {theirs!r}.")
        if state_dict[theirs].shape != tensor.shape:
            raise ArgumentError(
                f"{theirs} must be {list(tensor.shape)} after the config; got "
                f"{list(state_dict[theirs].shape)}."
            )
        found[name] = state_dict[theirs]
    with torch.no_grad():
        layer.to(next(iter(found.values())))
        layer.load_state_dict(found)
    return layer


def _size(config: Mapping[str, Any], key: str) -> int:
    if config.get(key) is None:
        raise ArgumentError(f"The config of latent attention needs {key!r}, which is missing.")
    return int(config[key])
