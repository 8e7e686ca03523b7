"""The layer by the textbook's formula: dense, one head at a time, in the dtype of its input."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import multihead as mh


def by_formula(
    layer: mh.MultiHeadAttention,
    x: Tensor,
    context: Tensor | None = None,
    *,
    mask: mh.Mask | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """What `layer(x, context, ...)` is; its weights are taken in x's dtype, and get gradients."""
    layer = copy.deepcopy(layer).to(x.dtype)
    return formula(layer, x, context, mask=mask, bias=bias, positions=positions)


def formula(
    layer: mh.MultiHeadAttention,
    x: Tensor,
    context: Tensor | None = None,
    *,
    mask: mh.Mask | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """As `by_formula`, of a layer whose dtype is x's already."""
    source = x if context is None else context
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    sizes = (heads * layer.head_dim, kv_heads * layer.head_dim, kv_heads * layer.value_dim)
    if context is None:
        queries, keys, values = layer.qkv_proj(x).split(sizes, -1)
    else:
        queries = layer.q_proj(x)
        keys, values = layer.kv_proj(source).split(sizes[1:], -1)
    if positions is None:
        positions = torch.arange(x.shape[1])
    scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    lengths = x.shape[1], source.shape[1]
    hidden = torch.zeros(1, 1, *lengths, dtype=torch.bool)
    for rule in (mask, layer.window):
        if rule is not None:
            hidden = hidden | ~rule.to_dense(*lengths)
    hidden = hidden.expand(x.shape[0], heads, *lengths)
    outputs = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        q = queries[..., head * layer.head_dim :][..., : layer.head_dim]
        k = keys[..., group * layer.head_dim :][..., : layer.head_dim]
        v = values[..., group * layer.value_dim :][..., : layer.value_dim]
        if layer.q_norm is not None:
            q, k = normed(q, layer.q_norm), normed(k, layer.k_norm)
        if layer.rope is not None:
            q, k = turned(q, positions, layer.rope.base), turned(k, positions, layer.rope.base)
        scores = scale * q @ k.mT
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        if bias is not None:
            shape = (x.shape[0], heads, *lengths)
            scores = scores + bias.to(scores.dtype).expand(shape)[:, head]
        empty = hidden[:, head].all(-1, keepdim=True)
        scores = scores.masked_fill(hidden[:, head] & ~empty, -torch.inf)
        if layer.sinks is not None:
            sink = layer.sinks[head].expand(*scores.shape[:2], 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : lengths[1]]
        outputs.append(weights.masked_fill(empty, 0) @ v)
    return layer.out_proj(torch.cat(outputs, dim=-1))


def normed(x: Tensor, norm: nn.Module) -> Tensor:
    """Zhang, Sennrich 2019, equation 4."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


def turned(x_bld: Tensor, positions: Tensor, base: float) -> Tensor:
    """Each pair of lanes (i, i + D/2) as a complex number, turned by `position / base^(2i/D)`."""
    half = x_bld.shape[-1] // 2
    angles = positions[..., None].double() * base ** (-torch.arange(half).double() / half)
    cos, sin = angles.cos().to(x_bld.dtype), angles.sin().to(x_bld.dtype)
    real, imaginary = x_bld[..., :half], x_bld[..., half:]
    return torch.cat((real * cos - imaginary * sin, real * sin + imaginary * cos), dim=-1)


class Reordered(nn.Module):
    """A projection that sums its products in another order of the input's lanes."""

    def __init__(self, linear: nn.Linear, order: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.order = order(linear.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x[..., self.order], self.weight[:, self.order], self.bias)


def orders() -> Iterator[Callable[[int], Tensor]]:
    """Some orders of lanes: on a small call the error of one alone is small by luck."""
    yield torch.arange
    yield lambda count: torch.arange(count).flip(0)
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        yield partial(torch.randperm, generator=draw)


def reordered(layer: nn.Module, order: Callable[[int], Tensor]) -> nn.Module:
    """A copy whose projections sum in another order; its parameters come in the same order."""
    layer = copy.deepcopy(layer)
    for name, linear in list(layer.named_modules()):
        if type(linear) is nn.Linear:  # torch's own layer reads its output's, a subclass
            layer.set_submodule(name, Reordered(linear, order))
    return layer


def worst(exact: Tensor, plain: Sequence[Tensor]) -> Tensor:
    """The exact answer, each number off by the largest error that any of `plain` makes there."""
    errors = [(it.double() - exact).abs() for it in plain]
    return exact + torch.stack(errors).amax(0)
