"""RoPE.from_config against what transformers makes of the same configs."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    GlmConfig,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PhiConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import multihead as mh

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 500}
PARAMETERS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": YARN,
    "yarn-attention-factor": YARN | {"attention_factor": 0.7},
    "yarn-betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-one-mscale": YARN | {"mscale_all_dim": 1.0},
    "yarn-not-truncated": YARN | {"truncate": False, "factor": 32.0},
    "yarn-short": YARN | {"original_max_position_embeddings": 8, "factor": 1.0},
    "longrope": LONG,
    "longrope-factor": LONG | {"factor": 6.0},
    "longrope-attention-factor": LONG | {"factor": 6.0, "attention_factor": 1.3},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def llama(**parameters: Any) -> LlamaConfig:
    if parameters.get("rope_type") == "longrope":
        pairs = range(int(16 * parameters.get("partial_rotary_factor", 1.0)))
        short, long = ([1 + pair * step for pair in pairs] for step in (0.1, 3.7))
        parameters |= {"short_factor": short, "long_factor": long}
    return LlamaConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=512,
        rope_parameters={"rope_theta": 500000.0} | parameters,
    )  # fmt: skip


@pytest.mark.parametrize("part", [1.0, 0.75])
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_are_those_of_transformers(name: str, part: float) -> None:
    """Bit for bit: a model's angles at position 100,000 hang on the last bit of a frequency."""
    config = llama(**PARAMETERS[name], partial_rotary_factor=part)
    want, amplitude = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    rope = mh.RoPE.from_config(config.to_dict())
    got = rope.frequencies(torch.arange(5), config.head_dim).flatten()
    assert torch.equal(got, want)
    assert rope.rotary_dim == (None if part == 1.0 else 24)
    assert rope.scaling is not None
    assert rope.scaling.amplitude == amplitude


@pytest.mark.parametrize("length", [1, 512, 513, 5000])
def test_dynamic_frequencies_at_each_length(length: int) -> None:
    config = llama(**PARAMETERS["dynamic"])
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=length)
    rope = mh.RoPE.from_config(config.to_dict())
    got = rope.frequencies(torch.tensor([0, length - 1]), config.head_dim).flatten()
    torch.testing.assert_close(got, want, rtol=2e-7 if length > 512 else 0, atol=0)


@pytest.mark.parametrize("length", [1, 500, 501, 5000])
def test_longrope_frequencies_at_each_length(length: int) -> None:
    config = llama(**LONG)
    want, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=length)
    rope = mh.RoPE.from_config(config.to_dict())
    got = rope.frequencies(torch.tensor([0, length - 1]), config.head_dim).flatten()
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["default", *PARAMETERS])
def test_rotation_is_that_of_a_llama(name: str) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = llama(**PARAMETERS.get(name, {}))
    query, key = torch.randn(2, 2, 3, 7, 32)
    positions = torch.stack((torch.arange(7), torch.arange(7) + 400))
    cos, sin = LlamaRotaryEmbedding(config)(query, positions)
    wants = apply_rotary_pos_emb(query, key, cos, sin)
    rotation = mh.RoPE.from_config(config.to_dict()).rotation(positions, 32)
    for x, want in zip((query, key), wants, strict=True):
        torch.testing.assert_close(rotation.apply(x), want, rtol=0, atol=2e-6)


def test_models_with_interleaved_lanes() -> None:
    x, positions = torch.randn(1, 2, 7, 32), torch.arange(7)[None] + 90

    def module(name: str) -> Any:
        return import_module(f"transformers.models.{name}.modeling_{name}")

    sizes = {"hidden_size": 64, "num_attention_heads": 2}
    glm = GlmConfig(**sizes, head_dim=32, num_key_value_heads=2)
    cos, sin = module("glm").GlmRotaryEmbedding(glm)(x, positions)
    check(glm, x, positions, module("glm").apply_rotary_pos_emb(x, x, cos, sin)[0])

    cohere = CohereConfig(**sizes)
    cos, sin = module("cohere").CohereRotaryEmbedding(cohere)(x, positions)
    check(cohere, x, positions, module("cohere").apply_rotary_pos_emb(x, x, cos, sin)[0])

    deepseek = DeepseekV2Config(**sizes, qk_rope_head_dim=32)
    turn = module("deepseek_v2").DeepseekV2RotaryEmbedding(deepseek)(x, positions)
    check(deepseek, x, positions, module("deepseek_v2").apply_rotary_emb(x, x, turn)[0])

    gptj = GPTJConfig(n_embd=64, n_head=2, rotary_dim=16)
    table = module("gptj").create_sinusoidal_positions(128, 16)[positions]
    sin, cos = table.chunk(2, dim=-1)
    turned = module("gptj").apply_rotary_pos_emb(x[..., :16].transpose(1, 2), sin, cos)
    check(gptj, x, positions, torch.cat((turned.transpose(1, 2), x[..., 16:]), dim=-1))


# Where a model's text turns neighboring lanes: its module, and the function that does.
_PAIRED = "apply_rotary_pos_emb_interleave"
NEIGHBORS = {
    "axk1": ("axk1", _PAIRED),
    "axk2": ("axk2", _PAIRED),
    "bailing_hybrid": ("bailing_hybrid", _PAIRED),
    "blt_global_transformer": ("blt", "rotate_half"),
    "blt_local_decoder": ("blt", "rotate_half"),
    "blt_local_encoder": ("blt", "rotate_half"),
    "blt_patcher": ("blt", "rotate_half"),
    "codegen": ("codegen", "rotate_every_two"),
    "cohere": ("cohere", "rotate_half"),
    "cohere2": ("cohere2", "rotate_half"),
    "cohere2_moe": ("cohere2_moe", "rotate_half"),
    "deepseek_v3": ("deepseek_v3", _PAIRED),
    "deepseek_v32": ("deepseek_v32", _PAIRED),
    "dots3_note_text": ("dots3_note", _PAIRED),
    "ernie4_5": ("ernie4_5", "rotate_half"),
    "ernie4_5_moe": ("ernie4_5_moe", "rotate_half"),
    "ernie4_5_vl_moe_text": ("ernie4_5_vl_moe", "rotate_half_text"),
    "glm": ("glm", "rotate_half"),
    "glm4": ("glm4", "rotate_half"),
    "glm4_moe_lite": ("glm4_moe_lite", _PAIRED),
    "glm4v_text": ("glm4v", "rotate_half_llm"),
    "glm_moe_dsa": ("glm_moe_dsa", _PAIRED),
    "glm_ocr_text": ("glm_ocr", "rotate_half_llm"),
    "gptj": ("gptj", "rotate_every_two"),
    "helium": ("helium", "rotate_half"),
    "hy_v4_vl_text": ("hy_v4_vl", "rotate_half"),
    "longcat_flash": ("longcat_flash", _PAIRED),
    "mistral4": ("mistral4", _PAIRED),
    "mistral_large4_text": ("mistral_large4", _PAIRED),
    "moonshine": ("moonshine", "rotate_half"),
    "moonshine_streaming": ("moonshine_streaming", "rotate_half"),
    "openai_privacy_filter": ("openai_privacy_filter", "_apply_rotary_emb"),
    "sarvam_mla": ("deepseek_v3", _PAIRED),
    "youtu": ("youtu", _PAIRED),
}


@pytest.mark.parametrize("kind", NEIGHBORS)
def test_what_turns_neighbors_is_known_by_its_type(kind: str) -> None:
    """A config.json need not say so, where transformers has a default."""
    assert mh.RoPE.from_config({"model_type": kind}).interleaved
    module, name = NEIGHBORS[kind]
    place = f"transformers.models.{module}.modeling_{module}"
    if importlib.util.find_spec(f"transformers.models.{module}") is None:
        pytest.skip(f"this transformers has no {module}")
    turn = getattr(import_module(place), name)
    second = torch.eye(8)[1].view(1, 1, 1, 8)
    # A quarter of a turn takes a pair's second lane to its first, in whatever order lanes come out.
    still, quarter = torch.zeros(1, 1, 8), torch.ones(1, 1, 8)
    if name == _PAIRED:
        turned = turn(second, second, still, quarter)[0]
    elif name == "_apply_rotary_emb":
        turned = turn(second, still[..., :4], quarter[..., :4])
    else:
        turned = turn(second)
    assert turned.flatten().tolist() == [-1.0] + 7 * [0.0]


def test_what_turns_halves_is_the_rule() -> None:
    """The check above tells the two apart."""
    from transformers.models.llama.modeling_llama import rotate_half

    assert not mh.RoPE.from_config({"model_type": "llama"}).interleaved
    assert rotate_half(torch.eye(8)[1]).tolist() == [0.0] * 5 + [1.0, 0.0, 0.0]


def check(config: Any, x: Tensor, positions: Tensor, want: Tensor) -> None:
    rope = mh.RoPE.from_config(config.to_dict())
    assert rope.interleaved
    got = rope.rotation(positions, x.shape[-1]).apply(x)
    # The last bit of a frequency, times a position of nearly 100.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_keys_of_other_configs() -> None:
    assert mh.RoPE.from_config(LlamaConfig().to_dict()) == mh.RoPE()
    assert mh.RoPE.from_config({}) == mh.RoPE()
    assert mh.RoPE.from_config(PhiConfig().to_dict()) == mh.RoPE(rotary_dim=32)
    assert mh.RoPE.from_config(GPTNeoXConfig().to_dict()) == mh.RoPE(rotary_dim=24)
    v3 = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = DeepseekV3Config(rope_scaling=v3 | {"original_max_position_embeddings": 4096})
    rope = mh.RoPE.from_config(config.to_dict())
    assert rope.interleaved
    assert rope.scaling == mh.YaRNScaling(40, 4096, mscale=1.0, mscale_all_dim=1.0)
    assert rope.scaling.amplitude == 1.0
    assert rope.scaling.logit_factor == pytest.approx(1.3688879454113937**2)


def test_files_from_before_transformers_5() -> None:
    config = {
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "linear", "factor": 8.0},
        "hidden_size": 64,
        "num_attention_heads": 4,
        "rotary_pct": 0.25,
    }
    want = mh.RoPE(1000000.0, rotary_dim=4, scaling=mh.LinearScaling(8.0))
    assert mh.RoPE.from_config(config) == want
    assert mh.RoPE.from_config({"rope_scaling": None, "rotary_emb_base": 5000}) == mh.RoPE(5000.0)
    phi3 = {"rope_scaling": YARN, "original_max_position_embeddings": 32, "rope_theta": 1e6}
    assert mh.RoPE.from_config(phi3).scaling == mh.YaRNScaling(8.0, 32)


def test_a_rope_for_each_type_of_layer() -> None:
    new = Gemma3TextConfig(num_hidden_layers=6).to_dict()
    old = {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": None}
    for config in (new, old):
        assert mh.RoPE.from_config(config, layer_type="sliding_attention") == mh.RoPE(10000.0)
        assert mh.RoPE.from_config(config, layer_type="full_attention") == mh.RoPE(1000000.0)
        with pytest.raises(mh.ArgumentError, match="sliding_attention"):
            mh.RoPE.from_config(config)


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "proportional"}, "rope_type='proportional' is not known here"),
        (LONG | {"short_mscale": 1.1, "long_mscale": 1.3}, "an amplitude for each length"),
        (LONG | {"short_factor": [1.0]}, "'long_factor', which is missing"),
        ({"rope_type": "linear"}, "'factor', which is missing"),
        ({"rope_type": "dynamic", "factor": 2.0}, "'max_position_embeddings', which is missing"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
        ({"rope_type": "linear", "factor": 0.5}, "factor must be at least 1"),
        ({"partial_rotary_factor": 0.5}, "'hidden_size', which is missing"),
    ],
)
def test_refused(rope: dict[str, Any], words: str) -> None:
    with pytest.raises(mh.ArgumentError, match=words):
        mh.RoPE.from_config({"rope_parameters": rope})
