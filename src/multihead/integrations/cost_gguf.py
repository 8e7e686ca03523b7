"""Descriptions for `multihead.cost` from GGUF files: their metadata alone, no weights.

A file lists its tensors' shapes, so what the metadata describe is held against what the file has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import cost
from ..errors import ArgumentError, ModelError
from .gguf_file import open_reader

# Of each architecture the type that transformers gives the same model.
_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v3",
}
_WITH_EXPERTS = {"llama": "mixtral"}

# What a config calls the values of `architecture.KEY`.
_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LATENT_SIZES = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}

_ABSENT = ("num_key_value_heads", "q_lora_rank", "n_shared_experts")

# Tables of angles and a router's balance are stored, but not trained by gradients.
_NO_PARAMETERS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
    "exp_probs_b.bias",
)


def describe_gguf(path: str | Path) -> cost.Model:
    """What the model in a GGUF file is made of, for `multihead.cost`; no weights are read.

    Covers the architectures llama (with experts too), qwen2, qwen3, qwen3moe, gemma, gemma2,
    gemma3, phi3, olmo2, granite, gpt-oss and deepseek2.

    Raises:
        ModelError: the file is missing, damaged, of another architecture, or holds another number
            of parameters than its metadata describe.
        MissingExtraError: gguf is not installed.
    """
    path = Path(path).expanduser()
    reader = open_reader(path)
    shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in reader.tensors}
    fields = _fields(path, reader, shapes)
    try:
        described = cost.from_transformers(fields, name=path.stem)
    except ArgumentError as error:
        raise ModelError(f"{path.name} cannot be counted: {error}") from error
    counted = cost.parameters_of(described).total
    found = sum(
        math.prod(shape) for name, shape in shapes.items() if not name.endswith(_NO_PARAMETERS)
    )
    if counted != found:
        raise ModelError(
            f"{path.name} holds {found:,} parameters, but its metadata describe {counted:,}: a "
            "variant of its architecture that is not known here. Count the original model's "
            "config.json."
        )
    return described


def _fields(path: Path, reader: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What a config of transformers would say."""

    def get(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    architecture = get("general.architecture")
    if architecture not in _MODEL_TYPES:
        raise ModelError(
            f"{path.name} holds a model of architecture {architecture!r}; those that are counted "
            f"are {', '.join(_MODEL_TYPES)}. Count the original model's config.json."
        )
    fields = _read(lambda key: get(f"{architecture}.{key}"), path, architecture)
    experts = bool(fields.get("num_local_experts"))
    return {
        **fields,
        "model_type": (_WITH_EXPERTS if experts else {}).get(
            architecture, _MODEL_TYPES[architecture]
        ),
        # The first axis of a matrix is its inputs.
        "vocab_size": shapes.get("token_embd.weight", (0, 0))[-1],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
    }


def _read(get: Callable[[str], Any], path: Path, architecture: str) -> dict[str, Any]:
    names = _SIZES | (_LATENT_SIZES if architecture == "deepseek2" else {})
    # What a file leaves out its model does not have, whatever a config would mean by that.
    fields: dict[str, Any] = dict.fromkeys(_ABSENT)
    for key, name in names.items():
        value = get(key)
        if isinstance(value, list):
            raise ModelError(
                f"{path.name} gives {architecture}.{key} a layer at a time; only models whose "
                "layers are alike in it are counted."
            )
        if value:
            fields[name] = value
    if architecture == "deepseek2":
        # A file made for the absorbed form says what a head has under names of its own.
        key_width = get("attention.key_length_mla") or fields.pop("head_dim", 0)
        fields["v_head_dim"] = get("attention.value_length_mla") or get("attention.value_length")
        fields["qk_nope_head_dim"] = key_width - fields.get("qk_rope_head_dim", 0)
        fields["n_routed_experts"] = fields.get("num_local_experts")
        fields.setdefault("first_k_dense_replace", 0)
    return fields
