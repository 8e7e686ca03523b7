"""Other people's models and files: transformers, GGUF, safetensors."""

from .checkpoints import load_checkpoint, save_checkpoint
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
    "load",
    "load_checkpoint",
    "load_gguf",
    "load_language_model",
    "save_checkpoint",
    "smollm2_file",
]
