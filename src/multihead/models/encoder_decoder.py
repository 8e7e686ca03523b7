"""An encoder and a decoder that reads it.

Shape suffixes: b batch, s source, l target, c width, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..masks import Mask
from ..nn import Cache, KVCache
from .caches import CacheKind
from .config import EncoderDecoderConfig
from .encoder import Encoder
from .language_model import LanguageModel, Rows


@dataclass(frozen=True)
class EncoderDecoderCaches:
    """What a decoder keeps, one cache a layer of each.

    Attributes:
        target: keys and values of the tokens so far.
        source: keys and values of the encoded source, computed once.
    """

    target: list[Cache]
    source: list[Cache]


class EncoderDecoder(nn.Module):
    """A source is encoded; a decoder sees its tokens so far and, by cross-attention, the source.

    Args:
        config: what it is made of.

    Source: Vaswani et al. 2017; Lewis et al. 2019.
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config.source)
        self.decoder = LanguageModel(config.target)
        self.tie()

    def tie(self) -> None:
        """Make one what the config says is one; needed after `load_state_dict(assign=True)`."""
        self.decoder.tie()
        if self.config.shared:
            self.encoder.embedding.weight = self.decoder.embedding.weight

    def encode(self, source_ids: Tensor, *, source_mask: Mask | Tensor | None = None) -> Tensor:
        """Hidden states [B, S, C] of a source, [B, S] tokens."""
        return self.encoder(source_ids, mask=source_mask)  # type: ignore[no-any-return]

    def forward(
        self,
        token_ids: Tensor,
        source: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        source_mask: Mask | Tensor | None = None,
        caches: EncoderDecoderCaches | None = None,
        positions: Tensor | None = None,
        rows: Rows = "all",
    ) -> Tensor:
        """Logits of the target's tokens that follow.

        Args:
            token_ids: [B, L], the target so far, or what `caches` do not hold of it.
            source: tokens [B, S] (integers), or hidden states [B, S, C] that `encode` gave. None
                where `caches` hold the source already.
            mask: what a token of the target may see of it, besides `Causal()`.
            source_mask: padding of the source, `KeyPadding(visible)`; of every call.
            caches: of `make_caches`.
            positions, rows: as in `LanguageModel`.

        Returns:
            Logits [B, L, V], [B, 1, V] for the last row.

        Raises:
            As `LanguageModel` and `Encoder`; ArgumentError for a source too many or too few.
        """
        context = source
        if source is not None and not source.is_floating_point():
            context = self.encode(source, source_mask=source_mask)
        return self.decoder(  # type: ignore[no-any-return]
            token_ids,
            mask=mask,
            caches=None if caches is None else caches.target,
            positions=positions,
            rows=rows,
            context=context,
            context_mask=source_mask,
            cross_caches=None if caches is None else caches.source,
        )

    def make_caches(
        self, kind: CacheKind = "growing", *, batch: int = 1, capacity: int | None = None
    ) -> EncoderDecoderCaches:
        """Empty caches, of the kinds of `LanguageModel.make_caches`; the source's grow."""
        target = self.decoder.make_caches(kind, batch=batch, capacity=capacity)
        return EncoderDecoderCaches(target, [KVCache() for _ in target])

    def reading(self, source: Tensor, *, source_mask: Mask | Tensor | None = None) -> Reading:
        """The decoder as it reads `source`, for `generate`: encoded once, for any targets.

            starts = [[config.start_token]] * len(source)
            multihead.generate(model.reading(source), starts, max_new_tokens=20)

        Args:
            source: tokens [B, S] (integers), or hidden states [B, S, C] that `encode` gave.
            source_mask: padding of the source, `KeyPadding(visible)`.
        """
        with torch.no_grad():
            if not source.is_floating_point():
                source = self.encode(source, source_mask=source_mask)
        return Reading(self.decoder, source, source_mask)


class Reading:
    """A decoder and what it reads, which continues targets as a `LanguageModel` continues texts.

    The source's keys and values are computed in the first call and kept.
    """

    def __init__(
        self, decoder: LanguageModel, context: Tensor, context_mask: Mask | Tensor | None
    ) -> None:
        self.config = decoder.config
        self.embedding = decoder.embedding
        self.blocks = decoder.blocks
        self.logits = decoder.logits
        self.make_caches = decoder.make_caches
        self._decoder = decoder
        self._context = context
        self._mask = context_mask
        self._caches: list[Cache] = [KVCache() for _ in decoder.blocks]

    def hidden(
        self,
        token_ids: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """What the head reads, [B, L, C]; see `LanguageModel.hidden`."""
        return self._decoder.hidden(
            token_ids,
            mask=mask,
            caches=caches,
            context=None if self._caches[-1].length else self._context,
            context_mask=self._mask,
            cross_caches=self._caches,
        )
