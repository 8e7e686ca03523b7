"""Weights between our layers and torch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DtypeError

if TYPE_CHECKING:
    from .multi_head import MultiHeadAttention


def attention_from_torch(
    kind: type[MultiHeadAttention], module: nn.MultiheadAttention, cross: bool | None
) -> MultiHeadAttention:
    """What `MultiHeadAttention.from_torch` documents."""
    _check_convertible(module)
    packed = module.in_proj_weight is not None
    if cross is None:
        cross = not packed
    if not cross and not packed:
        raise ArgumentError(
            f"cross=False, but the module reads keys of width kdim={module.kdim} and queries "
            f"of width embed_dim={module.embed_dim}: it can only be a cross-attention."
        )
    layer = kind(
        module.embed_dim,
        module.num_heads,
        context_dim=module.kdim if cross else None,
        qkv_bias=module.in_proj_bias is not None,
        out_bias=module.out_proj.bias is not None,
    )
    layer.to(module.out_proj.weight)
    layer.train(module.training)
    weights = (
        module.in_proj_weight.chunk(3)
        if packed
        else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    )
    biases = None if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    with torch.no_grad():
        if cross:
            _fill(layer.q_proj, weights[:1], biases and biases[:1])
            _fill(layer.kv_proj, weights[1:], biases and biases[1:])
        else:
            _fill(layer.qkv_proj, weights, biases)
        out = module.out_proj
        _fill(layer.out_proj, (out.weight,), None if out.bias is None else (out.bias,))
    return layer


def _check_convertible(module: nn.MultiheadAttention) -> None:
    if not isinstance(module, nn.MultiheadAttention):
        raise DtypeError(
            f"from_torch takes a torch.nn.MultiheadAttention; got {type(module).__name__}."
        )
    if module.bias_k is not None or module.bias_v is not None:
        raise ArgumentError(
            "add_bias_kv=True appends a learned key and value to every sequence; this layer has no "
            "such parameters."
        )
    if module.add_zero_attn:
        raise ArgumentError(
            "add_zero_attn=True appends a zero key and value to every sequence; this layer does "
            "not."
        )
    if module.kdim != module.vdim:
        raise ArgumentError(
            f"keys of width kdim={module.kdim} and values of width vdim={module.vdim} come from "
            "two sequences; this layer projects both from one context."
        )
    if module.dropout > 0 and module.training:
        raise ArgumentError(
            f"the module drops out attention weights (dropout={module.dropout}) while training; "
            "this layer does not. Call module.eval() first to convert it for inference, or set "
            "module.dropout = 0.0 to train without."
        )


def _fill(linear: nn.Linear, weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> None:
    linear.weight.copy_(torch.cat(tuple(weights)))
    if biases is not None:
        linear.bias.copy_(torch.cat(tuple(biases)))
