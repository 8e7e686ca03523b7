"""A language model: embeddings and positions below, layers, norm and vocabulary above.

Shape suffixes: b batch, l length, c width, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, MaskError
from ..masks import Causal, KeyPadding, Mask
from ..masks.rules import Intersection
from ..nn import Cache
from ..nn.positions import alibi_slopes
from ..ops import ALiBi
from ..ops.problem import checked_mask
from .blocks import build_block, rotations
from .caches import CacheKind, build_caches, check_caches, length_of
from .config import LanguageModelConfig
from .embeddings import (
    build_norm,
    build_positions,
    check_position_ids,
    check_token_ids,
    embed,
)

Rows = Literal["all", "last"]


class LanguageModel(nn.Module):
    """A causal decoder that gives logits for the token after each one.

    Build one with random weights from a `LanguageModelConfig`, or with those of a checkpoint by
    `multihead.integrations.load_language_model`. Continue texts with `multihead.generate`.

    Args:
        config: what it is made of.

    Source: Radford et al. 2019; Touvron et al. 2023.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.positions = build_positions(config)
        self.embedding_norm = build_norm(config, config.embedding_norm)
        self.blocks = nn.ModuleList(build_block(layer) for layer in config.layers)
        self.norm = build_norm(config, config.final_norm)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=config.head_bias)
        nn.init.normal_(self.embedding.weight, std=config.embed_dim**-0.5)
        self.tie()

    def tie(self) -> None:
        """Make the head's matrix that of the embeddings, where the config says so.

        Needed after `load_state_dict(assign=True)`, which puts a parameter of its own in each
        place.
        """
        if self.config.tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        token_ids: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        positions: Tensor | None = None,
        rows: Rows = "all",
        context: Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        cross_caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """Logits of the tokens that follow.

        Args:
            token_ids: [B, L] integers.
            mask: what a token may see, besides `Causal()`, which always holds. Its keys are all
                tokens so far, those in `caches` too. Padding is `KeyPadding(visible)`.
            caches: earlier tokens, one a layer, of `make_caches`; those of this call are appended.
            positions: of the tokens, [L] or [B, L]. By default they go on from the caches' length;
                with a `KeyPadding` in `mask` each row counts its visible tokens alone.
            rows: "all", or "last" for the last column alone: a vocabulary's product is not small.
            context: [B, Lk, context_dim], for layers with cross-attention.
            context_mask: which tokens of the context each token may read.
            cross_caches: keys and values of the context, one a layer, filled by the first call;
                later ones give no context.

        Returns:
            Logits [B, L, V], [B, 1, V] for the last row.

        Raises:
            ArgumentError: tokens outside of the vocabulary, caches that do not fit, or positions
                that do not, or that no part of the model reads.
            DtypeError: tokens that are not integers.
            MaskError: a mask that does not fit the tokens so far.
        """
        if rows not in ("all", "last"):
            raise ArgumentError(f"rows must be 'all' or 'last'; got {rows!r}.")
        x_blc = self.hidden(
            token_ids,
            mask=mask,
            caches=caches,
            positions=positions,
            context=context,
            context_mask=context_mask,
            cross_caches=cross_caches,
        )
        return self.logits(x_blc if rows == "all" else x_blc[:, -1:])

    def hidden(
        self,
        token_ids: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        caches: Sequence[Cache] | None = None,
        positions: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        cross_caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """What the head reads, [B, L, C]: takes the arguments of `forward`."""
        check_token_ids(token_ids, self.config.vocab_size)
        check_caches("caches", caches, len(self.blocks))
        check_caches("cross_caches", cross_caches, len(self.blocks))
        if positions is None:
            positions = self._positions(token_ids, mask, caches)
        else:
            check_position_ids(positions, token_ids, self.config)
        x_blc = embed(token_ids, self.embedding, self.config, self.positions, positions)
        if self.embedding_norm is not None:
            x_blc = self.embedding_norm(x_blc)
        seen = Causal() if mask is None else Causal() & checked_mask(mask)
        slopes = self._slopes(x_blc.device)
        turned = rotations(self.config.layers, positions)
        for index, block in enumerate(self.blocks):
            x_blc = block(
                x_blc,
                context,
                mask=seen,
                bias=None if slopes is None else ALiBi(slopes[index]),
                context_mask=context_mask,
                cache=None if caches is None else caches[index],
                cross_cache=None if cross_caches is None else cross_caches[index],
                positions=turned[index],
            )
        return x_blc if self.norm is None else self.norm(x_blc)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: logits [B, L, V] of what `hidden` gave, [B, L, C]."""
        logits_blv: Tensor = self.head(hidden)
        cap = self.config.logit_softcap
        return logits_blv if cap is None else cap * torch.tanh(logits_blv / cap)

    def make_caches(
        self, kind: CacheKind = "growing", *, batch: int = 1, capacity: int | None = None
    ) -> list[Cache]:
        """An empty cache for each layer.

        Args:
            kind: "growing" holds what it gets; "static" is allocated at once for `capacity` tokens;
                "window" rolls in layers and for heads that have a window, and grows for others;
                "paged" takes memory by pages; "int8" holds a byte for each number, and a scale for
                each token.
            batch: number of rows, for "static" and "paged".
            capacity: how many tokens a row may have, for "static".

        Raises:
            ArgumentError: an unknown kind, or a capacity missing.
        """
        weight = self.embedding.weight
        dtype, device = weight.dtype, weight.device
        if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device.type)  # that of keys and values there
        windows = [getattr(block.attention, "window", None) for block in self.blocks]
        return build_caches(
            self.config.layers, windows, kind, batch, capacity, dtype=dtype, device=device
        )

    def _slopes(self, device: torch.device) -> list[Tensor] | None:
        """The ALiBi slopes of each layer's heads; a head keeps its own when others are pruned."""
        if self.config.positions != "alibi":
            return None
        slopes = alibi_slopes(self.config.layers[0].whole().num_heads).to(device)
        kept = [None if it.pruned is None else list(it.pruned.kept) for it in self.config.layers]
        return [slopes if heads is None else slopes[heads] for heads in kept]

    def _positions(
        self,
        token_ids: Tensor,
        mask: Mask | Tensor | None,
        caches: Sequence[Cache] | None,
    ) -> Tensor:
        length = token_ids.shape[1]
        if caches:
            positions = caches[0].positions(length).to(token_ids.device)
        else:
            positions = torch.arange(length, device=token_ids.device)
        padding = _padding(mask)
        if padding is None:
            return positions
        if positions.ndim == 2:  # columns of rows that differ, or that a graph counts so
            before = padding.visible.cumsum(1) - 1
            return before.gather(1, positions).clamp(min=0)
        held = 0 if not caches else length_of(caches)
        if padding.visible.shape != (len(token_ids), held + length):
            raise MaskError(
                f"KeyPadding must cover all tokens so far, {[len(token_ids), held + length]}; got "
                f"{list(padding.visible.shape)}."
            )
        return (padding.visible.cumsum(1) - 1)[:, held:].clamp(min=0)


def _padding(mask: Mask | Tensor | None) -> KeyPadding | None:
    """The padding among the rules of a mask."""
    rules = mask.masks if isinstance(mask, Intersection) else (mask,)
    return next((rule for rule in rules if isinstance(rule, KeyPadding)), None)
