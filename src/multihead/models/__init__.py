"""Whole transformers: language models, encoders, and both together."""

from .config import BlockConfig, EncoderConfig, EncoderDecoderConfig, LanguageModelConfig
from .encoder import Encoder
from .encoder_decoder import EncoderDecoder, EncoderDecoderCaches
from .language_model import LanguageModel

__all__ = [
    "BlockConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderCaches",
    "EncoderDecoderConfig",
    "LanguageModel",
    "LanguageModelConfig",
]
