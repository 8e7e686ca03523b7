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
        dropout=module.dropout,
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


def attention_to_torch(layer: MultiHeadAttention, batch_first: bool) -> nn.MultiheadAttention:
    """What `MultiHeadAttention.to_torch` documents."""
    inputs = (
        {"qkv_proj": layer.qkv_proj}
        if layer.context_dim is None
        else {"q_proj": layer.q_proj, "kv_proj": layer.kv_proj}
    )
    linears = {
        name: _linear(name, part) for name, part in {**inputs, "out_proj": layer.out_proj}.items()
    }
    _check_has_counterpart(layer)
    out = linears.pop("out_proj")
    biased = [linear.bias is not None for linear in (*linears.values(), out)]
    module = nn.MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        dropout=layer.dropout,
        bias=any(biased),
        kdim=layer.context_dim,
        vdim=layer.context_dim,
        batch_first=batch_first,
    )
    module.to(out.weight)
    module.train(layer.training)
    rows = [part for it in linears.values() for part in it.weight.split(layer.embed_dim)]
    targets = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    if module.in_proj_weight is not None:
        targets = list(module.in_proj_weight.split(layer.embed_dim))
    with torch.no_grad():
        for target, weight in zip(targets, rows, strict=True):
            target.copy_(weight)
        module.out_proj.weight.copy_(out.weight)
        if any(biased):
            # torch starts these at zero, which is what a missing one is.
            if all(biased[:-1]):
                module.in_proj_bias.copy_(torch.cat([it.bias for it in linears.values()]))
            if biased[-1]:
                module.out_proj.bias.copy_(out.bias)
    return module


def _linear(name: str, module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise DtypeError(
            f"to_torch reads the weights of {name}, a torch.nn.Linear; got "
            f"{type(module).__name__}. Merge an adapter into the layer first."
        )
    return module


def _check_has_counterpart(layer: MultiHeadAttention) -> None:
    width = layer.num_heads * layer.head_dim
    beyond = {
        f"num_kv_heads={layer.num_kv_heads}": layer.num_kv_heads != layer.num_heads,
        f"head_dim={layer.head_dim}": width != layer.embed_dim,
        f"value_dim={layer.value_dim}": layer.value_dim != layer.head_dim,
        f"scale={layer.scale}": layer.scale not in (None, layer.head_dim**-0.5),
        f"rope={layer.rope}": layer.rope is not None,
        "qk_norm": layer.q_norm is not None,
        f"window={layer.window}": layer.window is not None,
        f"softcap={layer.softcap}": layer.softcap is not None,
        "sinks": layer.sinks is not None,
    }
    found = [name for name, has in beyond.items() if has]
    if found:
        raise ArgumentError(
            f"torch.nn.MultiheadAttention has no counterpart for {', '.join(found)}."
        )


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


def _fill(linear: nn.Linear, weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> None:
    linear.weight.copy_(torch.cat(tuple(weights)))
    if biases is not None:
        linear.bias.copy_(torch.cat(tuple(biases)))
