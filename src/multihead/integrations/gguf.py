"""Llama-like decoders from GGUF files, as transformers models in plain floating point."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from .extras import import_extra
from .gguf_file import GGUFFile, GGUFTensors, ModelFacts
from .gguf_tokenizer import transformers_tokenizer


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A transformers model in eval mode, its tokenizer, and where they came from."""

    model: Any
    tokenizer: Any
    facts: ModelFacts


def load_gguf(path: str | Path, *, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Read the model and the tokenizer of a GGUF file.

    Weights are dequantized one tensor at a time into `dtype`; beside the model itself, memory
    holds one tensor.

    Raises:
        ModelError: the file is missing, damaged, or not of a supported architecture.
        MissingExtraError: transformers (5.4 or newer) or gguf is not installed.
    """
    file = GGUFFile(path)
    model = _build(file, dtype)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return LoadedModel(model, transformers_tokenizer(file), file.facts(parameters))


def _build(file: GGUFFile, dtype: torch.dtype) -> Any:
    transformers = import_extra("transformers")
    llama = import_extra("transformers.models.llama.modeling_llama")
    fields = file.fields()
    try:
        config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], dtype=dtype, **fields)
    except Exception as error:  # transformers' validation raises classes of several packages
        raise ModelError(f"{file.path.name} describes no possible llama: {error}") from error
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    model.load_state_dict(_weights(file, fields, shapes, dtype), strict=False, assign=True)
    model.tie_weights()
    # Its buffers are computed at construction, and on the meta device have no values.
    model.model.rotary_emb = llama.LlamaRotaryEmbedding(config)
    return model.eval()


def _weights(
    file: GGUFFile, fields: dict[str, Any], shapes: dict[str, torch.Size], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Every parameter of the model by its name, in `dtype`."""
    tensors = GGUFTensors(file, fields, dtype)
    weights = {}
    for name, weight in tensors.items():
        if weight.shape != shapes[name]:
            raise ModelError(
                f"{file.path.name} holds {tensors.stored_name(name)} as {tuple(weight.shape)}, but "
                f"its metadata ask for {tuple(shapes[name])}."
            )
        weights[name] = weight
    missing = sorted(shapes.keys() - weights.keys())
    if missing:
        raise ModelError(
            f"{file.path.name} lacks {len(missing)} tensors of the model, {missing[0]} first."
        )
    return weights
