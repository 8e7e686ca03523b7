"""Blocks with the weights of torch's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from ..errors import ArgumentError, DtypeError
from .feed_forward import FeedForward
from .multi_head import MultiHeadAttention

if TYPE_CHECKING:
    from .block import TransformerBlock

TorchLayer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


def block_from_torch(kind: type[TransformerBlock], layer: TorchLayer) -> TransformerBlock:
    """What `TransformerBlock.from_torch` documents."""
    if not isinstance(layer, TorchLayer):
        raise DtypeError(
            "from_torch takes a torch.nn.TransformerEncoderLayer or TransformerDecoderLayer; got "
            f"{type(layer).__name__}."
        )
    decoder = layer if isinstance(layer, nn.TransformerDecoderLayer) else None
    feed_forward = FeedForward(
        layer.linear1.in_features,
        layer.linear1.out_features,
        activation=layer.activation,
        bias=layer.linear1.bias is not None,
        dropout=layer.dropout.p,
    )
    cross_attention = None
    norms, dropouts = [layer.norm1, layer.norm2], [layer.dropout1, layer.dropout2]
    if decoder is not None:
        cross_attention = MultiHeadAttention.from_torch(decoder.multihead_attn, cross=True)
        norms.append(decoder.norm3)
        dropouts.append(decoder.dropout3)
    block = kind(
        MultiHeadAttention.from_torch(layer.self_attn, cross=False),
        feed_forward,
        cross_attention=cross_attention,
        norm=partial(nn.LayerNorm, eps=layer.norm1.eps, bias=layer.norm1.bias is not None),
        norm_placement="pre" if layer.norm_first else "post",
        dropout=_residual_dropout(dropouts),
    )
    block.to(layer.linear1.weight)
    block.train(layer.training)
    places = [block.attention_norm, block.cross_attention_norm, block.feed_forward_norm]
    pairs = [
        *zip(norms, [it for it in places if it is not None], strict=True),
        (layer.linear1, feed_forward.up_proj),
        (layer.linear2, feed_forward.down_proj),
    ]
    for source, target in pairs:
        target.load_state_dict(source.state_dict())
    return block


def _residual_dropout(dropouts: list[nn.Dropout]) -> float:
    shares = {dropout.p for dropout in dropouts}
    if len(shares) > 1:
        raise ArgumentError(
            "a block has one dropout for what it adds; those of the layer differ: "
            f"{', '.join(map(str, sorted(shares)))}."
        )
    return shares.pop()
