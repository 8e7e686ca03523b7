"""Layers from their descriptions, and what all layers of one forward share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..nn import FeedForward, GatedFeedForward, MultiHeadAttention, TransformerBlock
from ..nn.norm import NormFactory, RMSNorm
from ..nn.prune import prune_heads
from .config import BlockConfig

if TYPE_CHECKING:
    from ..nn.positions import RoPE, Rotation

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class OffsetRMSNorm(nn.Module):
    """RMSNorm whose gains are stored less 1, as Gemma's checkpoints have them.

    Args:
        width: of the last axis.
        eps: added to the mean square.
    """

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """`x` over the root of its mean square, times `1 + weight`; computed in float32."""
        wide = x if x.dtype == torch.float64 else x.float()
        normed = F.rms_norm(wide, self.weight.shape, eps=self.eps)
        return (normed * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)

    def extra_repr(self) -> str:
        """The width and eps that `print(norm)` shows."""
        return f"{self.weight.numel()}, eps={self.eps}"


_NORMS: dict[str, Callable[..., nn.Module]] = {
    "rms": RMSNorm,
    "rms_offset": OffsetRMSNorm,
    "layer": nn.LayerNorm,
}


def norm_factory(config: BlockConfig) -> NormFactory:
    """What builds a norm of the layer's kind for a width."""
    return partial(_NORMS[config.norm], eps=config.norm_eps)


def build_block(config: BlockConfig) -> TransformerBlock:
    """The layer of a description, its weights at random."""
    pruned, config = config.pruned, config.whole()
    norm = norm_factory(config)
    attention = MultiHeadAttention(
        config.embed_dim,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        scale=config.scale,
        rope=config.rope,
        qk_norm=norm if config.qk_norm else None,
        window=config.window,
        softcap=config.softcap,
        sinks=config.sinks,
    )
    if pruned is not None:
        prune_heads(attention, pruned.heads)
    cross = None
    if config.context_dim is not None:
        cross = MultiHeadAttention(
            config.embed_dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            context_dim=config.context_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            scale=config.scale,
        )
    feed_forward = GatedFeedForward if config.gated else FeedForward
    return TransformerBlock(
        attention,
        feed_forward(
            config.embed_dim,
            config.ffn_dim,
            activation=_ACTIVATIONS[config.activation],
            bias=config.ffn_bias,
        ),
        cross_attention=cross,
        norm=norm,
        norm_placement=config.norm_placement,
    )


def rotations(layers: Iterable[BlockConfig], positions: Tensor) -> list[Rotation | None]:
    """The rotation of each layer at `positions` [L] or [B, L]; layers alike share one."""
    made: dict[tuple[RoPE, int], Rotation] = {}
    found: list[Rotation | None] = []
    for layer in layers:
        if layer.rope is None:
            found.append(None)
            continue
        key = (layer.rope, layer.width)
        if key not in made:
            made[key] = layer.rope.rotation(positions, layer.width)
        found.append(made[key])
    return found
