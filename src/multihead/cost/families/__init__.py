"""Descriptions from the configs of models in transformers, which is not imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from multihead.cost.families import decoders, encoders, gpt2, latent, seq2seq
from multihead.cost.families.fields import Fields
from multihead.cost.families.pruned import without_pruned_heads
from multihead.cost.model import Model
from multihead.errors import ArgumentError

__all__ = ["MODEL_TYPES", "Fields", "from_transformers"]

_READERS: dict[str, Callable[[Fields, str], Model]] = {
    **dict.fromkeys(decoders.FAMILIES, decoders.read),
    **dict.fromkeys(latent.MODEL_TYPES, latent.read),
    **dict.fromkeys(gpt2.MODEL_TYPES, gpt2.read),
    **dict.fromkeys(encoders.MODEL_TYPES, encoders.read),
    **dict.fromkeys(seq2seq.MODEL_TYPES, seq2seq.read),
}

MODEL_TYPES = tuple(sorted(_READERS))
"""The values of `model_type` that are counted."""


def from_transformers(config: object, *, name: str = "") -> Model:
    """The description of the model that a config of transformers describes.

    Args:
        config: a `PretrainedConfig`, anything with the same attributes, or the mapping that a
            config.json holds. Heads that `multihead.heads.prune` took out are not counted.
        name: what tables call it; by default its type.

    Raises:
        ArgumentError: a type that is not covered, an option that would be counted wrongly, or a
            size that is missing.
    """
    fields = Fields(config)
    model_type = fields.get("model_type")
    if not model_type:
        raise ArgumentError(
            "The config has no model_type, so which parts its model has is not known; describe it "
            "with multihead.cost.Model(...)."
        )
    if not isinstance(model_type, str) or model_type not in _READERS:
        parts = (
            ""
            if fields.get("text_config") is None
            else (" It describes several models in one; its text_config alone may be counted.")
        )
        raise ArgumentError(
            f"What a model of type {model_type!r} costs is not known here; known are "
            f"{', '.join(MODEL_TYPES)}.{parts}"
        )
    described = without_pruned_heads(_READERS[model_type](fields, model_type), fields)
    return replace(described, name=name or model_type)
