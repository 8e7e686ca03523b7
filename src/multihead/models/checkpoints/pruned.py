"""Heads that are gone, in a config.json: the sizes before, and the numbers of the heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import ArgumentError, ModelError
from ..config import BlockConfig, EncoderConfig, EncoderDecoderConfig, LanguageModelConfig
from .fields import Fields

FIELD = "multihead_pruned_heads"
"""By layer (a string, as keys of JSON are), the heads that are gone, by their first numbers."""

Config = LanguageModelConfig | EncoderConfig | EncoderDecoderConfig


def read_pruned(config: Config, fields: Fields) -> Config:
    """A whole model's description without the heads that its config.json says are gone.

    Raises:
        ModelError: a layer or a head that there is not, or a model with two stacks of layers.
    """
    found = fields.get(FIELD) or {}
    if not found:
        return config
    if isinstance(config, EncoderDecoderConfig):
        raise ModelError(f"{FIELD} describes one stack of layers; this model has two.")
    layers = list(config.layers)
    for index, heads in numbers(found).items():
        if index >= len(layers):
            raise ModelError(f"{FIELD} names layer {index}, but there are {len(layers)} layers.")
        try:
            layers[index] = layers[index].without_heads(heads)
        except ArgumentError as error:
            raise ModelError(f"{FIELD}, layer {index}: {error}") from error
    return replace(config, layers=tuple(layers))


def write_pruned(config: Config) -> tuple[Config, dict[str, Any]]:
    """The description before heads were taken out, and the field that says which."""
    if isinstance(config, EncoderDecoderConfig):
        return config, {}
    gone = {
        str(index): list(layer.pruned.heads)
        for index, layer in enumerate(config.layers)
        if layer.pruned is not None and layer.pruned.heads
    }
    whole: tuple[BlockConfig, ...] = tuple(layer.whole() for layer in config.layers)
    return replace(config, layers=whole), {FIELD: gone} if gone else {}


def numbers(found: object) -> dict[int, list[int]]:
    """The field with layers as numbers; raises ModelError where it is of another form."""
    try:
        if not isinstance(found, Mapping):
            raise TypeError(f"a {type(found).__name__}")
        return {int(layer): [int(head) for head in heads] for layer, heads in found.items()}
    except (TypeError, ValueError) as error:
        raise ModelError(
            f'{FIELD} must be of the form {{"3": [1, 5]}}, heads by layer; got {error}.'
        ) from error
