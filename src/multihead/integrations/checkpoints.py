"""Folders of checkpoints: a config.json and its tensors as safetensors, read and written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from ..models.checkpoints import Model, from_checkpoint, to_checkpoint
from .extras import import_extra

CONFIG = "config.json"
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_checkpoint(folder: str | Path, *, dtype: torch.dtype | None = None) -> Model:
    """The model of a folder that transformers' `save_pretrained` or `save_checkpoint` wrote.

    Args:
        folder: with a config.json and model.safetensors, whole or in several files with an index.
            Nothing else is read: no code, no pickled file.
        dtype: of the model; by default that of each tensor.

    Returns:
        A `LanguageModel`, an `Encoder` or an `EncoderDecoder` in eval mode.

    Raises:
        ModelError: a file is missing or damaged, or the model is of a kind that we do not have.
        MissingExtraError: safetensors is not installed.
    """
    folder = Path(folder)
    fields = read_json(folder / CONFIG)
    return from_checkpoint(fields, StoredTensors(folder), dtype=dtype)


def save_checkpoint(model: Model, folder: str | Path, model_type: str) -> None:
    """Write a model as a checkpoint of `model_type`, which transformers loads too.

    Models of any make are written as "multihead", our own type, which `load_checkpoint` alone
    loads.

    Raises:
        ModelError: a model that is not built like one of that type.
        MissingExtraError: safetensors is not installed.
    """
    fields, state = to_checkpoint(model, model_type)
    safetensors = import_extra("safetensors.torch")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save_file(state, folder / _WHOLE, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises ModelError where the file is missing or is no such thing."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} is no checkpoint: it has no {path.name}. Give a folder that "
            "save_pretrained wrote."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object; it holds a {type(found).__name__}.")
    return found


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a folder, each read when it is looked up.

    Raises:
        ModelError: there are no safetensors, or a file is damaged.
        MissingExtraError: safetensors is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._open = import_extra("safetensors").safe_open
        self._files: dict[Path, Any] = {}
        self._places: dict[str, Path] = {}
        if (folder / _WHOLE).is_file():
            paths = [folder / _WHOLE]
        elif (folder / _INDEX).is_file():
            parts = read_json(folder / _INDEX).get("weight_map", {})
            paths = [folder / name for name in sorted({Path(part).name for part in parts.values()})]
        else:
            raise ModelError(
                f"{folder} holds no {_WHOLE}. Weights are read from safetensors alone; other files "
                "may run code when they are loaded. transformers' save_pretrained writes them."
            )
        for path in paths:
            self._places |= dict.fromkeys(self._file(path).keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file(self._places[name]).get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = self._open(path, framework="pt")
            except Exception as error:  # safetensors raises a class of its own, and OSError
                raise ModelError(f"{path} cannot be read: {error}") from error
        return self._files[path]
