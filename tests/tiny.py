"""Tiny models of ours with random weights so wide that attention is far from flat."""

from dataclasses import replace

import torch

from multihead.models import (
    BlockConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    LanguageModelConfig,
)
from multihead.models.checkpoints import build as build_model
from multihead.nn.positions import RoPE

VOCABULARY = 101
POSITIONS = ("rope", "learned", "sinusoidal", "alibi")
_LLAMA = BlockConfig(embed_dim=42, num_heads=6, num_kv_heads=2, head_dim=10, ffn_dim=37)
_PLAIN = replace(_LLAMA, gated=False, norm="layer", activation="gelu", qkv_bias=True)


def language_model(positions="rope", *, layers=2, seed=11, dtype=torch.float32, **changes):
    """A decoder that knows positions in one of the ways of `POSITIONS`."""
    block = replace(_LLAMA, rope=RoPE()) if positions == "rope" else _PLAIN
    config = LanguageModelConfig(
        VOCABULARY,
        (replace(block, **changes),) * layers,
        positions=None if positions == "rope" else positions,
        max_positions=61,
    )
    return _filled(config, seed, dtype)


def encoder_decoder(seed=11):
    """An encoder-decoder whose parts have different widths."""
    source = replace(_PLAIN, embed_dim=34, num_heads=4, num_kv_heads=None)
    return _filled(
        EncoderDecoderConfig(
            EncoderConfig(VOCABULARY, (source,) * 2, positions="sinusoidal", final_norm=True),
            LanguageModelConfig(
                VOCABULARY, (replace(_PLAIN, context_dim=34),) * 2, positions="sinusoidal"
            ),
        ),
        seed,
        torch.float32,
    )


def _filled(config, seed, dtype):
    torch.manual_seed(seed)
    model = build_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype).eval()


def tokens(*shape, seed=3):
    """Random tokens."""
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
