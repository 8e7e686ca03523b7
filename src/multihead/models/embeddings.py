"""From tokens to what enters the first layer.

Shape suffixes: b batch, l length, c width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DtypeError
from ..nn.checks import check_positions
from ..nn.positions import LearnedPositions, SinusoidalPositions
from .blocks import norm_factory
from .config import EncoderConfig, LanguageModelConfig


def build_positions(config: LanguageModelConfig | EncoderConfig) -> nn.Module | None:
    """What is added to the embeddings for their positions, if anything is."""
    if config.positions == "learned":
        assert config.max_positions is not None  # as the config checked
        return LearnedPositions(config.max_positions + config.position_offset, config.embed_dim)
    if config.positions == "sinusoidal":
        return SinusoidalPositions(config.embed_dim)
    return None


def build_norm(config: LanguageModelConfig | EncoderConfig, wanted: bool) -> nn.Module | None:
    """A norm over the model's width, of the kind that its layers have."""
    return norm_factory(config.layers[0])(config.embed_dim) if wanted else None


def embed(
    token_ids: Tensor,
    table: nn.Embedding,
    config: LanguageModelConfig | EncoderConfig,
    positions: nn.Module | None,
    position_ids: Tensor,
) -> Tensor:
    """The embeddings [B, L, C] of tokens at positions, scaled as the config says."""
    x_blc: Tensor = table(token_ids)
    if config.embedding_scale is not None:
        # In the weights' dtype, as models in half precision were trained.
        x_blc = x_blc * torch.tensor(config.embedding_scale, dtype=x_blc.dtype)
    if positions is not None:
        x_blc = x_blc + positions(position_ids + config.position_offset).to(x_blc.dtype)
    return x_blc


def check_token_ids(token_ids: Tensor, vocab_size: int) -> None:
    """Raise ArgumentError or DtypeError for what is no batch of tokens."""
    if not isinstance(token_ids, Tensor) or token_ids.dtype not in (torch.int64, torch.int32):
        kind = token_ids.dtype if isinstance(token_ids, Tensor) else type(token_ids).__name__
        raise DtypeError(f"token_ids must be an int64 or int32 tensor; got {kind}.")
    if token_ids.ndim != 2:
        hint = " For one sequence: token_ids[None]." if token_ids.ndim == 1 else ""
        raise ArgumentError(
            f"token_ids must be [batch, length]; got shape {list(token_ids.shape)}.{hint}"
        )
    if torch.compiler.is_compiling() or token_ids.device.type != "cpu" or not token_ids.numel():
        return
    least, most = (int(bound) for bound in token_ids.aminmax())
    if least < 0 or most >= vocab_size:
        raise ArgumentError(
            f"token_ids must be from 0 to {vocab_size - 1}; got {least if least < 0 else most}."
        )


def check_position_ids(
    positions: Tensor, token_ids: Tensor, config: LanguageModelConfig | EncoderConfig
) -> None:
    """Raise ArgumentError or DtypeError for positions that do not fit, or that nothing reads."""
    check_positions(positions, token_ids[..., None])
    added = config.positions in ("learned", "sinusoidal")
    if not added and all(layer.rope is None for layer in config.layers):
        raise ArgumentError(
            "positions were given, but no part of this model reads them: ALiBi counts columns, "
            "and without positions= and rope= in its config a model knows none."
        )
