"""A transformer block: attention and a feed-forward, each added to what it read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from torch import Tensor, nn

from ..errors import ArgumentError, DtypeError
from ..masks import Mask
from ..ops import ALiBi
from . import convert_block
from .cache import Cache
from .feed_forward import build_dropout, dropped
from .latent import LatentAttention
from .latent_cache import LatentKVCache
from .multi_head import MultiHeadAttention
from .norm import NormFactory, build_norm
from .positions import Rotation

NormPlacement = Literal["pre", "post", "sandwich"]
"""Where a block norms around a sublayer f: "pre" `x + f(norm(x))`, "post" `norm(x + f(x))`,
"sandwich" `x + norm(f(norm(x)))` with two norms."""


class TransformerBlock(nn.Module):
    """Attention, optionally cross-attention, and a feed-forward, each with norm and residual.

    Args:
        attention: a self-attention: a `MultiHeadAttention` or a `LatentAttention`.
        feed_forward: a module from [B, L, embed_dim] to the same, such as `FeedForward` or
            `GatedFeedForward`.
        cross_attention: a layer with a `context_dim`, between the two.
        norm: what builds a norm for the width: `torch.nn.LayerNorm`, `torch.nn.RMSNorm`, or a
            `functools.partial` of one that sets `eps`.
        norm_placement: "pre", "post" or "sandwich": before each sublayer, after its residual is
            added, or before and after each sublayer.
        dropout: share of each sublayer's output that training drops out before it is added.

    Raises:
        ArgumentError: layers of different widths, a self-attention in the place of a
            cross-attention or the reverse, an unknown placement, or a share that is none.
        DtypeError: an option of another type.

    Source: Vaswani et al. 2017 (post); Xiong et al. 2020 (pre); Ding et al. 2021, section 2.4, and
    Gemma 2 (sandwich).
    """

    def __init__(
        self,
        attention: MultiHeadAttention | LatentAttention,
        feed_forward: nn.Module,
        *,
        cross_attention: MultiHeadAttention | None = None,
        norm: NormFactory = nn.LayerNorm,
        norm_placement: NormPlacement = "pre",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check_layers(attention, feed_forward, cross_attention)
        if norm_placement not in get_args(NormPlacement):
            names = ", ".join(map(repr, get_args(NormPlacement)))
            raise ArgumentError(f"norm_placement must be one of {names}; got {norm_placement!r}.")
        width = attention.embed_dim
        crosses = cross_attention is not None
        sandwiched = norm_placement == "sandwich"

        def build(wanted: bool = True) -> nn.Module | None:
            return build_norm("norm", norm, width) if wanted else None

        self.norm_placement = norm_placement
        self.attention_norm = build()
        self.attention = attention
        self.attention_out_norm = build(sandwiched)
        self.cross_attention_norm = build(crosses)
        self.cross_attention = cross_attention
        self.cross_attention_out_norm = build(crosses and sandwiched)
        self.feed_forward_norm = build()
        self.feed_forward = feed_forward
        self.feed_forward_out_norm = build(sandwiched)
        self.dropout = build_dropout(dropout)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | ALiBi | None = None,
        context_mask: Mask | Tensor | None = None,
        cache: Cache | LatentKVCache | None = None,
        cross_cache: Cache | None = None,
        positions: Tensor | Rotation | None = None,
    ) -> Tensor:
        """One block of a transformer.

        Args:
            x: [B, L, embed_dim].
            context: [B, Lk, context_dim], what the cross-attention reads.
            mask, bias, cache, positions: of the self-attention, as in `MultiHeadAttention`.
            context_mask: which tokens of the context each query may read.
            cross_cache: the cross-attention's keys and values. It is filled in the first call;
                later ones give no context.

        Returns:
            [B, L, embed_dim].

        Raises:
            ArgumentError: a context, a context's mask or its cache for a block without
                cross-attention.
            ArgumentError, MaskError, DtypeError, DeviceError: as `MultiHeadAttention`.
        """
        crossing = {"context": context, "context_mask": context_mask, "cross_cache": cross_cache}
        if self.cross_attention is None:
            _check_absent(crossing)
        branch = self.attention(
            self._before(x, self.attention_norm),
            mask=mask,
            bias=bias,
            cache=cache,
            positions=positions,
        )
        x = self._after(x, branch, self.attention_norm, self.attention_out_norm)
        if self.cross_attention is not None:
            branch = self.cross_attention(
                self._before(x, self.cross_attention_norm),
                context,
                mask=context_mask,
                cache=cross_cache,
            )
            x = self._after(x, branch, self.cross_attention_norm, self.cross_attention_out_norm)
        branch = self.feed_forward(self._before(x, self.feed_forward_norm))
        return self._after(x, branch, self.feed_forward_norm, self.feed_forward_out_norm)

    def _before(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        return x if norm is None or self.norm_placement == "post" else norm(x)

    def _after(
        self, x: Tensor, branch: Tensor, norm: nn.Module | None, out_norm: nn.Module | None
    ) -> Tensor:
        if out_norm is not None:
            branch = out_norm(branch)
        x = x + dropped(branch, self.dropout)
        return x if norm is None or self.norm_placement != "post" else norm(x)

    @classmethod
    def from_torch(
        cls, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    ) -> TransformerBlock:
        """The same block as one of torch's layers, with a copy of its weights.

        A decoder layer becomes a block with cross-attention. Inputs are [B, L, width] whatever the
        layer's `batch_first` says, a bool mask says True for "may attend", and a decoder's block
        reads `block(x, context, mask=multihead.Causal())`.

        Raises:
            ArgumentError: a layer whose dropouts behind the sublayers differ.
            DtypeError: a module of another kind.
        """
        return convert_block.block_from_torch(cls, layer)

    def extra_repr(self) -> str:
        """The placement that `print(block)` shows."""
        return f"norm_placement={self.norm_placement!r}"


def _check_layers(
    attention: MultiHeadAttention | LatentAttention,
    feed_forward: nn.Module,
    cross_attention: MultiHeadAttention | None,
) -> None:
    if not isinstance(feed_forward, nn.Module):
        raise DtypeError(f"feed_forward must be a module; got {type(feed_forward).__name__}.")
    if not isinstance(attention, MultiHeadAttention | LatentAttention):
        remedy = (
            " Convert it with MultiHeadAttention.from_torch."
            if isinstance(attention, nn.MultiheadAttention)
            else ""
        )
        raise DtypeError(
            "attention must be a MultiHeadAttention or a LatentAttention; got "
            f"{type(attention).__name__}.{remedy}"
        )
    if isinstance(attention, MultiHeadAttention) and attention.context_dim is not None:
        raise ArgumentError(
            "attention must be a self-attention; got a layer with context_dim="
            f"{attention.context_dim}. Pass that one as cross_attention=."
        )
    if cross_attention is not None and getattr(cross_attention, "context_dim", None) is None:
        raise ArgumentError(
            "cross_attention must be a layer with a context_dim; got a self-attention. Build it "
            "with MultiHeadAttention(..., context_dim=...)."
        )
    for name, part in (("cross_attention", cross_attention), ("feed_forward", feed_forward)):
        width = getattr(part, "embed_dim", attention.embed_dim)
        if width != attention.embed_dim:
            raise ArgumentError(
                f"{name} must have the width of attention, embed_dim={attention.embed_dim}; got "
                f"{width}."
            )


def _check_absent(crossing: Mapping[str, object]) -> None:
    for name, given in crossing.items():
        if given is not None:
            raise ArgumentError(
                f"{name} was given to a block without cross-attention. Build it with "
                "TransformerBlock(attention, feed_forward, cross_attention=...)."
            )
