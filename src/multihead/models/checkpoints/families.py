"""The families of checkpoints, and moving whole models from them and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...errors import ModelError
from ...masks import Window
from ..config import EncoderConfig, EncoderDecoderConfig, LanguageModelConfig
from ..encoder import Encoder
from ..encoder_decoder import EncoderDecoder
from ..language_model import LanguageModel
from . import bart, bert, gpt2, llama, native
from .fields import Fields, need
from .pruned import read_pruned, write_pruned
from .rules import Renamed, State, read_state, write_state

Config = LanguageModelConfig | EncoderConfig | EncoderDecoderConfig
Model = LanguageModel | Encoder | EncoderDecoder

_FAMILIES: dict[str, ModuleType] = {
    model_type: family
    for family in (llama, gpt2, bert, bart, native)
    for model_type in family.MODEL_TYPES
}

MODEL_TYPES = tuple(_FAMILIES)
"""The values of `model_type` in a config.json that can be read and written."""


def read_config(fields: Fields) -> Config:
    """Our description of the model that a config.json describes.

    Raises:
        ModelError: another type, an option that is not supported, or one that is missing.
    """
    return read_pruned(_family(need(fields, "model_type")).read_config(fields), fields)


def write_config(config: Config, model_type: str) -> dict[str, Any]:
    """What a config.json of `model_type` says of a model of ours.

    Raises:
        ModelError: another type, or a model that is not built like one.
    """
    family = _family(model_type)
    whole, pruned = write_pruned(config)
    try:
        return family.write_config(whole, model_type) | pruned  # type: ignore[no-any-return]
    except AttributeError as error:
        raise ModelError(
            f"a {type(config).__name__} does not describe a model of type {model_type!r}."
        ) from error


def build(config: Config) -> Model:
    """The model of a description, its weights at random."""
    if isinstance(config, EncoderDecoderConfig):
        return EncoderDecoder(config)
    return Encoder(config) if isinstance(config, EncoderConfig) else LanguageModel(config)


def from_checkpoint(
    fields: Fields, state: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> Model:
    """The model of a checkpoint, in eval mode.

    Args:
        fields: what its config.json says.
        state: its tensors by name, each looked up once. Those of a base model, without its head's
            prefix, will do.
        dtype: of the model; by default that of each tensor.

    Returns:
        A `LanguageModel`, an `Encoder` or an `EncoderDecoder`, as the type is. Parameters that are
        stored as ours are share their memory with `state`.

    Raises:
        ModelError: a type or an option that is not supported, or tensors that do not fit.
    """
    family = _family(need(fields, "model_type"))
    config = read_config(fields)
    theirs = _canonical(family, config, state)
    if isinstance(config, EncoderConfig) and family is not native:
        config = replace(config, pooler="pooler.dense.weight" in theirs)
    if family is bart and isinstance(config, EncoderDecoderConfig):
        config = bart.with_head_bias(config, bart.HEAD_BIAS in set(theirs))
    ours = read_state(family.rules(config), theirs)
    with torch.device("meta"), _WithoutInitialValues():
        model = build(config)
    shapes = {name: parameter.shape for name, parameter in model.state_dict().items()}
    for name, tensor in ours.items():
        if tensor.shape != shapes[name]:
            raise ModelError(
                f"the checkpoint holds {name} as {tuple(tensor.shape)}, but its config asks for "
                f"{tuple(shapes[name])}."
            )
    if dtype is not None:
        ours = {name: tensor.to(dtype) for name, tensor in ours.items()}
    model.load_state_dict(ours, strict=False, assign=True)
    if not isinstance(model, Encoder):
        model.tie()
    return model.eval()


def to_checkpoint(model: Model, model_type: str) -> tuple[dict[str, Any], State]:
    """What a config.json of `model_type` says of a model, and its tensors under their names.

    Raises:
        ModelError: another type, or a model that is not built like one.
    """
    for name, module in model.named_modules():
        window = getattr(module, "window", None)
        if isinstance(window, Window) and isinstance(window.left, Tensor):
            raise ModelError(
                f"{name} has heads with windows of their own, which no checkpoint holds. Free them "
                "by module.window = None, and keep HeadWindows.to_json() beside the weights."
            )
    fields = write_config(model.config, model_type)
    rules = _family(model_type).rules(model.config)
    return fields, write_state(rules, {n: p.detach() for n, p in model.state_dict().items()})


class _WithoutInitialValues(TorchFunctionMode):
    """Leaves parameters as they are made: on the meta device drawing values loads sympy first."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


def _family(model_type: str) -> ModuleType:
    if model_type not in _FAMILIES:
        raise ModelError(
            f"checkpoints of type {model_type!r} are not supported; there are "
            f"{', '.join(_FAMILIES)}."
        )
    return _FAMILIES[model_type]


def _renewed(name: str) -> str:
    """A name of a tensor, where BERT's first checkpoints have it in TensorFlow's words."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _canonical(family: ModuleType, config: Config, state: Mapping[str, Tensor]) -> Renamed:
    """`state` with the names of a whole model, without what follows from the rest."""
    tied = isinstance(config, EncoderDecoderConfig) or getattr(config, "tied", False)
    # A base model's names lack the prefix that it has inside of the model with a head.
    bare = not any(name.startswith(family.PREFIX) for name in state)
    names = {}
    for name in state:
        canonical = _renewed(name.removeprefix(family.OUTER_PREFIX))
        if bare and not name.startswith("lm_head."):
            canonical = family.PREFIX + canonical
        if family.DERIVED.fullmatch(canonical) or (tied and canonical == "lm_head.weight"):
            continue
        names[canonical] = name
    return Renamed(state, names)
