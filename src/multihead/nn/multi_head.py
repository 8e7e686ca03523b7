"""Multi-head attention as a layer.

Shape suffixes: b batch, q query, k key, h head, g KV head, d width of a head, c all heads' widths
together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DtypeError
from ..masks import Mask
from ..ops import ALiBi, AttentionResult, attention, attention_with_stats


class MultiHeadAttention(nn.Module):
    """Multi-head attention: project, split into heads, attend, concatenate, project.

    One matrix product makes the queries, keys and values of all heads; a reshape splits them. With
    `num_kv_heads` below `num_heads` neighboring query heads share a KV head (grouped-query
    attention; 1 is multi-query attention). With `context_dim` the layer is a cross-attention: it
    reads keys and values from a second sequence.

    For the defaults the weights number `4 * embed_dim ** 2`, whatever `num_heads` is.

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of query heads.
        num_kv_heads: number of key and value heads; divides `num_heads`, and defaults to it.
        head_dim: width of a query and of a key in one head; by default `embed_dim / num_heads`.
        value_dim: width of a value in one head; by default `head_dim`.
        context_dim: width of the sequence that a cross-attention reads; None is self-attention.
        qkv_bias: add a bias to queries, keys and values.
        out_bias: add a bias to the output.
        scale: factor on the scores; by default `1 / sqrt(head_dim)`.

    Weights start as those of `torch.nn.Linear` do: a projection's distribution depends on its
    input's width alone, so that projecting together or apart starts alike.

    Raises:
        ArgumentError: sizes that do not fit one another, or a scale that is not finite.
        DtypeError: a size that is not an integer, or a scale that is not a number.

    Source: Vaswani et al. 2017, section 3.2.2; Shazeer 2019 (MQA); Ainslie et al. 2023 (GQA).
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        context_dim: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_sizes(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
        _check_scale(scale)
        if num_heads % num_kv_heads:
            raise ArgumentError(
                f"num_kv_heads must divide num_heads, so that each KV head serves as many query "
                f"heads; got num_heads={num_heads}, num_kv_heads={num_kv_heads}."
            )
        if head_dim is None:
            if embed_dim % num_heads:
                raise ArgumentError(
                    f"num_heads must divide embed_dim; got embed_dim={embed_dim}, "
                    f"num_heads={num_heads}. Choose the heads' width yourself with head_dim=."
                )
            head_dim = embed_dim // num_heads
        value_dim = head_dim if value_dim is None else value_dim
        _check_sizes(head_dim=head_dim, value_dim=value_dim)
        if context_dim is not None:
            _check_sizes(context_dim=context_dim)

        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.context_dim = context_dim
        self.scale = scale

        query_width = num_heads * head_dim
        key_width = num_kv_heads * head_dim
        value_width = num_kv_heads * value_dim
        if context_dim is None:
            self.qkv_proj = nn.Linear(
                embed_dim, query_width + key_width + value_width, bias=qkv_bias
            )
        else:
            self.q_proj = nn.Linear(embed_dim, query_width, bias=qkv_bias)
            self.kv_proj = nn.Linear(context_dim, key_width + value_width, bias=qkv_bias)
        self.out_proj = nn.Linear(num_heads * value_dim, embed_dim, bias=out_bias)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | ALiBi | None = None,
    ) -> Tensor:
        """Attend from `x` to itself, or to `context` in a cross-attention.

        Args:
            x: [B, Lq, embed_dim].
            context: [B, Lk, context_dim]; given exactly when the layer has a `context_dim`.
            mask: which keys each query may read, as in `multihead.attention`. True means "may
                attend", also in a bool tensor: the inverse of `torch.nn.MultiheadAttention`.
            bias: added to the scores, as in `multihead.attention`.

        Returns:
            [B, Lq, embed_dim].

        Raises:
            ArgumentError: a shape that does not fit the layer, or a context too many or too few.
            MaskError, DtypeError, DeviceError: as `multihead.attention`.
        """
        query_bhqd, key_bgkd, value_bgkd = self._project(x, context)
        heads_bhqd = attention(
            query_bhqd, key_bgkd, value_bgkd, mask=mask, bias=bias, scale=self.scale
        )
        return self._join(heads_bhqd)

    def forward_with_stats(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | ALiBi | None = None,
        stats: Sequence[str] = ("lse", "entropy", "max_logit"),
    ) -> tuple[Tensor, AttentionResult]:
        """`forward`, and what each head did: statistics [B, H, Lq], and weights on demand.

        Returns:
            The output [B, Lq, embed_dim], and the `AttentionResult` of the heads before they are
            joined: an attribute for each name in `stats`, and `weights(rows, columns)`.

        Raises:
            As `forward`; ArgumentError for an unknown statistic.
        """
        query_bhqd, key_bgkd, value_bgkd = self._project(x, context)
        result = attention_with_stats(
            query_bhqd,
            key_bgkd,
            value_bgkd,
            mask=mask,
            bias=bias,
            scale=self.scale,
            stats=tuple(stats),
        )
        return self._join(result.out), result

    def _project(self, x_bqc: Tensor, context_bkc: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        self._check_inputs(x_bqc, context_bkc)
        query_width = self.num_heads * self.head_dim
        key_width = self.num_kv_heads * self.head_dim
        value_width = self.num_kv_heads * self.value_dim
        if context_bkc is None:
            query_bqc, key_bkc, value_bkc = self.qkv_proj(x_bqc).split(
                (query_width, key_width, value_width), dim=-1
            )
        else:
            query_bqc = self.q_proj(x_bqc)
            key_bkc, value_bkc = self.kv_proj(context_bkc).split((key_width, value_width), dim=-1)
        return (
            _split_heads(query_bqc, self.num_heads, self.head_dim),
            _split_heads(key_bkc, self.num_kv_heads, self.head_dim),
            _split_heads(value_bkc, self.num_kv_heads, self.value_dim),
        )

    def _join(self, heads_bhqd: Tensor) -> Tensor:
        concatenated_bqc = heads_bhqd.transpose(1, 2).flatten(2)
        return self.out_proj(concatenated_bqc)  # type: ignore[no-any-return]

    def _check_inputs(self, x: Tensor, context: Tensor | None) -> None:
        _check_sequence("x", x, "embed_dim", self.embed_dim)
        if self.context_dim is None:
            if context is not None:
                raise ArgumentError(
                    "context was given to a self-attention layer. Build a cross-attention with "
                    f"MultiHeadAttention(..., context_dim={context.shape[-1]})."
                )
            return
        if context is None:
            raise ArgumentError(
                "context is missing: this layer is a cross-attention (it has "
                f"context_dim={self.context_dim}). Call layer(x, context)."
            )
        _check_sequence("context", context, "context_dim", self.context_dim)
        if x.shape[0] != context.shape[0]:
            raise ArgumentError(
                f"x and context must have the same batch size; got {x.shape[0]} and "
                f"{context.shape[0]}."
            )

    @classmethod
    def from_torch(
        cls, module: nn.MultiheadAttention, *, cross: bool | None = None
    ) -> MultiHeadAttention:
        """The same layer as a `torch.nn.MultiheadAttention`, with a copy of its weights.

        Three things differ in how the two are called. This layer takes [B, L, width] whatever the
        module's `batch_first` says: transpose the inputs of a module that has it False. A bool mask
        here says True for "may attend", there for "hidden". And weights are not dropped out: a
        module with `dropout` is accepted in eval mode, where it drops nothing.

        Args:
            module: packed projections, or separate ones (`kdim`, `vdim`).
            cross: whether the layer shall read a context. By default it does if the module has a
                `kdim` of its own; for one without, torch's module does not say which it is.

        Raises:
            ArgumentError: `add_bias_kv`, `add_zero_attn`, `kdim` other than `vdim`, dropout in
                training mode, or `cross=False` for a module with its own `kdim`.
            DtypeError: `module` is not a `torch.nn.MultiheadAttention`.
        """
        _check_convertible(module)
        packed = module.in_proj_weight is not None
        if cross is None:
            cross = not packed
        if not cross and not packed:
            raise ArgumentError(
                f"cross=False, but the module reads keys of width kdim={module.kdim} and queries "
                f"of width embed_dim={module.embed_dim}: it can only be a cross-attention."
            )
        layer = cls(
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

    def extra_repr(self) -> str:
        """The sizes that `print(layer)` shows."""
        sizes = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            sizes.append(f"num_kv_heads={self.num_kv_heads}")
        sizes.append(f"head_dim={self.head_dim}")
        if self.value_dim != self.head_dim:
            sizes.append(f"value_dim={self.value_dim}")
        if self.context_dim is not None:
            sizes.append(f"context_dim={self.context_dim}")
        if self.scale is not None:
            sizes.append(f"scale={self.scale}")
        return ", ".join(sizes)


def _split_heads(projected_blc: Tensor, heads: int, width: int) -> Tensor:
    batch, length, _ = projected_blc.shape
    return projected_blc.reshape(batch, length, heads, width).transpose(1, 2)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        try:
            operator.index(size)
        except TypeError:
            given: object = size
            whole = isinstance(given, float) and given.is_integer()
            hint = f" Write {size:.0f}." if whole else ""
            raise DtypeError(f"{name} must be an integer; got {size!r}.{hint}") from None
        if size < 1:
            raise ArgumentError(f"{name} must be at least 1; got {size}.")


def _check_scale(scale: float | None) -> None:
    try:
        finite = scale is None or math.isfinite(scale)
    except TypeError:
        raise DtypeError(
            f"scale must be a number; got {scale!r}. Leave it out for 1 / sqrt(head_dim)."
        ) from None
    if not finite:
        raise ArgumentError(
            f"scale must be finite; got {scale}. Leave it out for 1 / sqrt(head_dim)."
        )


def _check_sequence(name: str, sequence: Tensor, width_name: str, width: int) -> None:
    if sequence.ndim != 3:
        hint = f" For one sequence without a batch: {name}[None]." if sequence.ndim == 2 else ""
        raise ArgumentError(
            f"{name} must be [batch, length, {width_name}={width}]; got shape "
            f"{list(sequence.shape)}.{hint}"
        )
    if sequence.shape[-1] != width:
        raise ArgumentError(
            f"{name} must have the width {width_name}={width} in its last dimension; got shape "
            f"{list(sequence.shape)}."
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
