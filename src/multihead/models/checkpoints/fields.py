"""Reading the config.json of a checkpoint, and writing one: what several families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ArgumentError, ModelError
from ...nn.positions import RoPE
from ...nn.rope_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    YaRNScaling,
)
from ..config import Activation

Fields = Mapping[str, Any]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def need(fields: Fields, name: str) -> Any:
    """`fields[name]`; raises ModelError where it is absent."""
    value = fields.get(name)
    if value is None:
        raise ModelError(
            f"the config of this {fields.get('model_type', 'checkpoint')} has no {name}, without "
            "which no model can be built."
        )
    return value


def refuse(fields: Fields, what: Mapping[str, object]) -> None:
    """Raise ModelError for options that have another value than the one that is supported."""
    for name, supported in what.items():
        value = fields.get(name, supported)
        if value != supported and value is not None:
            raise ModelError(
                f"the config of this {fields.get('model_type')} sets {name}={value!r}, which is "
                "not supported; leaving it out would change what the model computes."
            )


def read_activation(name: str) -> Activation:
    """An activation by its name; raises ModelError for one that we do not have."""
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"the activation {name!r} is not supported; there are {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def write_activation(activation: Activation) -> str:
    """The name that transformers has for an activation."""
    return "gelu_pytorch_tanh" if activation == "gelu_tanh" else activation


def read_rope(fields: Fields, layer_type: str) -> RoPE:
    """How a config turns the layers of one type; raises ModelError for a way we do not have."""
    try:
        return RoPE.from_config(fields, layer_type=layer_type)
    except ArgumentError as error:
        raise ModelError(f"the config's rotary positions cannot be read: {error}") from error


def write_rope(rope: RoPE, head_dim: int) -> dict[str, Any]:
    """The rotary parameters that describe a rotation.

    Raises:
        ModelError: one for which transformers has no name.
    """
    if rope.interleaved:
        raise ModelError("a checkpoint of this family rotates half-split pairs, not neighbors.")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.base}
    if rope.rotary_dim is not None:
        found["partial_rotary_factor"] = rope.rotary_dim / head_dim
    match rope.scaling:
        case None:
            return found
        case LinearScaling(factor):
            return found | {"rope_type": "linear", "factor": factor}
        case DynamicNTKScaling(factor):
            # From which length on is the config's max_position_embeddings.
            return found | {"rope_type": "dynamic", "factor": factor}
        case Llama3Scaling(factor, length, low, high):
            return found | {
                "rope_type": "llama3",
                "factor": factor,
                "original_max_position_embeddings": length,
                "low_freq_factor": low,
                "high_freq_factor": high,
            }
        case LongRoPEScaling(short, long, length, factor, attention_factor):
            return found | {
                "rope_type": "longrope",
                "short_factor": list(short),
                "long_factor": list(long),
                "original_max_position_embeddings": length,
                "factor": factor,
                **({} if attention_factor is None else {"attention_factor": attention_factor}),
            }
        case YaRNScaling() as yarn:
            optional = {
                "attention_factor": yarn.attention_factor,
                "mscale": yarn.mscale,
                "mscale_all_dim": yarn.mscale_all_dim,
            }
            return found | {
                "rope_type": "yarn",
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original_length,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
                "truncate": yarn.truncate,
                **{name: value for name, value in optional.items() if value is not None},
            }
    raise ModelError(f"checkpoints have no name for {rope.scaling!r}.")
