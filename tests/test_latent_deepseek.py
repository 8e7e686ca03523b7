"""LatentAttention with the weights of transformers' DeepSeek-V2 and V3, against eager."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2RotaryEmbedding,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

import multihead as mh
from close import assert_close

KINDS = {
    "v2": (DeepseekV2Config, DeepseekV2Attention, DeepseekV2RotaryEmbedding),
    "v3": (DeepseekV3Config, DeepseekV3Attention, DeepseekV3RotaryEmbedding),
}
YARN = {
    "rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("v3", {}),
    "queries-from-x": ("v3", {"q_lora_rank": None}),
    "biases": ("v3", {"attention_bias": True}),
    "half-split": ("v3", {"rope_interleave": False}),
    "yarn": ("v3", {"rope_parameters": YARN}),
    "v2-yarn": ("v2", {"rope_parameters": YARN}),
    "v2": ("v2", {"q_lora_rank": None}),
}


def theirs(name: str) -> tuple[Any, nn.Module, Any]:
    kind, options = OPTIONS[name]
    config_kind, attention, rotary = KINDS[kind]
    config = config_kind(
        **{
            "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3,
            "q_lora_rank": 20, "kv_lora_rank": 26, "qk_nope_head_dim": 10, "qk_rope_head_dim": 16,
            "v_head_dim": 14, "attn_implementation": "eager", "max_position_embeddings": 2560,
        } | options
    )  # fmt: skip
    module = attention(config, layer_idx=0).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.2)
    return config, module, rotary(config)


def eager(module: nn.Module, rotary: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    hidden = torch.full((length, length), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
    embeddings = rotary(x, torch.arange(length)[None])
    return module(x, position_embeddings=embeddings, attention_mask=hidden[None, None])[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_loaded_weights_compute_the_same(name: str) -> None:
    config, module, rotary = theirs(name)
    x = torch.randn(2, 23, 48)
    want = eager(deepcopy(module).double(), rotary, x.double())
    plain = eager(module, rotary, x)
    state = {f"layers.0.{key}": tensor for key, tensor in module.state_dict().items()}
    layer = mh.LatentAttention.from_deepseek(config.to_dict(), state, prefix="layers.0.")
    assert layer.scale == pytest.approx(module.scaling)
    for form in (None, "absorbed", "materialized"):
        assert_close(layer(x, mask=mh.Causal(), form=form), want, plain, what=str(form))
        cache = mh.LatentKVCache(26)
        parts = x.split((19, 1, 1, 1, 1), 1)
        steps = [layer(part, mask=mh.Causal(), cache=cache, form=form) for part in parts]
        assert_close(torch.cat(steps, 1), want, plain, what=f"{form}, decoded")


def test_what_does_not_fit_is_named() -> None:
    config, module, _ = theirs("plain")
    state = module.state_dict()
    config = config.to_dict()
    with pytest.raises(mh.ArgumentError, match=r"no 'layers\.0\."):
        mh.LatentAttention.from_deepseek(config, state, prefix="layers.0.")
    with pytest.raises(mh.ArgumentError, match="must be"):
        mh.LatentAttention.from_deepseek(config | {"kv_lora_rank": 24}, state)
    without = {key: size for key, size in config.items() if key != "v_head_dim"}
    with pytest.raises(mh.ArgumentError, match="'v_head_dim', which is missing"):
        mh.LatentAttention.from_deepseek(without, state)
