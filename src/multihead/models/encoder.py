"""An encoder: every token sees every other.

Shape suffixes: b batch, l length, c width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..masks import Mask
from .blocks import build_block, rotations
from .config import EncoderConfig
from .embeddings import (
    build_norm,
    build_positions,
    check_position_ids,
    check_token_ids,
    embed,
)


class Encoder(nn.Module):
    """A bidirectional transformer: hidden states of a text, such as BERT's.

    Args:
        config: what it is made of.

    Source: Devlin et al. 2018.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.positions = build_positions(config)
        self.types = nn.Embedding(config.num_types, config.embed_dim) if config.num_types else None
        self.embedding_norm = build_norm(config, config.embedding_norm)
        self.blocks = nn.ModuleList(build_block(layer) for layer in config.layers)
        self.norm = build_norm(config, config.final_norm)
        self.pooler = nn.Linear(config.embed_dim, config.embed_dim) if config.pooler else None
        nn.init.normal_(self.embedding.weight, std=config.embed_dim**-0.5)

    def forward(
        self,
        token_ids: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        type_ids: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [B, L, C] of tokens.

        Args:
            token_ids: [B, L] integers.
            mask: what a token may see; padding is `KeyPadding(visible)`. Rows of padding hold
                numbers without a meaning.
            type_ids: [B, L], the segment of each token; 0 by default.
            positions: of the tokens, [L] or [B, L]; by default the columns, from 0.

        Raises:
            ArgumentError: tokens outside of the vocabulary, types for a model without them, or
                positions that do not fit, or that no part of the model reads.
            DtypeError: tokens that are not integers.
            MaskError: a mask that does not fit the tokens.
        """
        check_token_ids(token_ids, self.config.vocab_size)
        if positions is None:
            positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        else:
            check_position_ids(positions, token_ids, self.config)
        x_blc = embed(token_ids, self.embedding, self.config, self.positions, positions)
        if self.types is not None:
            kinds_bl = torch.zeros_like(token_ids) if type_ids is None else type_ids
            x_blc = x_blc + self.types(kinds_bl)
        elif type_ids is not None:
            raise ArgumentError("type_ids were given to an encoder without types (num_types=0).")
        if self.embedding_norm is not None:
            x_blc = self.embedding_norm(x_blc)
        turned = rotations(self.config.layers, positions)
        for block, rotation in zip(self.blocks, turned, strict=True):
            x_blc = block(x_blc, mask=mask, positions=rotation)
        return x_blc if self.norm is None else self.norm(x_blc)

    def pool(self, hidden: Tensor) -> Tensor:
        """The text as one vector, [B, C]: a linear layer and tanh on its first token.

        Raises:
            ArgumentError: the encoder has no pooler.
        """
        if self.pooler is None:
            raise ArgumentError("this encoder has no pooler; build it with pooler=True.")
        return self.pooler(hidden[:, 0]).tanh()  # type: ignore[no-any-return]
