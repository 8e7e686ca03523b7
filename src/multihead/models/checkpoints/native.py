"""Checkpoints of our own type: any model of ours, by its description as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any

import torch

from ...errors import ArgumentError, DtypeError, ModelError
from ...nn.positions import RoPE
from ...nn.prune import Pruned
from ...nn.rope_scaling import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NTKScaling,
    YaRNScaling,
)
from ..config import BlockConfig, EncoderConfig, EncoderDecoderConfig, LanguageModelConfig
from .fields import Fields, need
from .rules import Rule

MODEL_TYPES = ("multihead",)
PREFIX = OUTER_PREFIX = ""
DERIVED = re.compile(r"(?!)")
"""No tensor follows from the config."""

Config = LanguageModelConfig | EncoderConfig | EncoderDecoderConfig

_KIND = "kind"
_MODELS = (LanguageModelConfig, EncoderConfig, EncoderDecoderConfig)
_SCALINGS = (
    *(LinearScaling, NTKScaling, DynamicNTKScaling),
    *(YaRNScaling, LongRoPEScaling, Llama3Scaling),
)
_KINDS: dict[str, type[Any]] = {
    it.__name__: it for it in (*_MODELS, BlockConfig, RoPE, *_SCALINGS, Pruned)
}


def read_config(fields: Fields) -> Config:
    """The description that `write_config` wrote.

    Raises:
        ModelError: another thing, or one that describes no possible model.
    """
    found = _read(need(fields, "config"))
    if not isinstance(found, _MODELS):
        raise ModelError(f"the config describes no model, but {type(found).__name__}.")
    return found


def write_config(config: Config, model_type: str) -> dict[str, Any]:
    """A config.json that holds the description.

    Raises:
        ModelError: an option that JSON has no word for.
    """
    return {"model_type": model_type, "config": _written(config)}


def rules(config: Config) -> list[Rule]:
    """Every parameter under its own name; one that is used twice is stored once."""
    from .families import build

    with torch.device("meta"):
        model = build(config)
    return [Rule(name, (name,)) for name, _ in model.named_parameters()]


def _written(value: Any) -> Any:
    if is_dataclass(value) and type(value).__name__ in _KINDS:
        own = {field.name: _written(getattr(value, field.name)) for field in fields_of(value)}
        return {_KIND: type(value).__name__, **own}
    if isinstance(value, tuple):
        return [_written(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ModelError(f"a config.json cannot hold {value!r}.")


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_read(item) for item in value)
    if not isinstance(value, Mapping):
        return value
    kind = value.get(_KIND)
    if kind not in _KINDS:
        raise ModelError(f"the config holds a {kind!r}, which this version does not know.")
    options = {name: _read(item) for name, item in value.items() if name != _KIND}
    try:
        return _KINDS[kind](**options)
    except (ArgumentError, DtypeError, TypeError) as error:
        raise ModelError(f"the config's {kind} cannot be: {error}") from error
