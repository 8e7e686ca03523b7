"""Other people's models and files: transformers, GGUF, safetensors."""

from .checkpoints import load_checkpoint, save_checkpoint
from .cost_gguf import describe_gguf
from .cost_sources import describe
from .gguf import LoadedModel, load_gguf
from .gguf_file import ModelFacts
from .language_models import LoadedLanguageModel, load_language_model
from .loading import SMOLLM2, load, smollm2_file
from .tokenizer import TextTokenizer

__all__ = [
    "SMOLLM2",
    "LoadedLanguageModel",
    "LoadedModel",
    "ModelFacts",
    "TextTokenizer",
    "describe",
    "describe_gguf",
    "load",
    "load_checkpoint",
    "load_gguf",
    "load_language_model",
    "save_checkpoint",
    "smollm2_file",
]
