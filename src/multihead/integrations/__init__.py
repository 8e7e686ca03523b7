"""Other people's models and files: transformers, GGUF."""

from .gguf import LoadedModel, ModelFacts, load_gguf
from .loading import SMOLLM2, load, smollm2_file

__all__ = ["SMOLLM2", "LoadedModel", "ModelFacts", "load", "load_gguf", "smollm2_file"]
