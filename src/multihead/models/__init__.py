"""Whole transformers, and how texts are continued with them."""

from .config import BlockConfig, EncoderConfig, EncoderDecoderConfig, LanguageModelConfig
from .encoder import Encoder
from .encoder_decoder import EncoderDecoder, EncoderDecoderCaches
from .generate import Step, generate, generate_steps
from .language_model import LanguageModel
from .sampling import Sampling

__all__ = [
    "BlockConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderCaches",
    "EncoderDecoderConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "Sampling",
    "Step",
    "generate",
    "generate_steps",
]
