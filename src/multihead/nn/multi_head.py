"""Multi-head attention as a layer.

Shape suffixes: b batch, q query, k key, l either, h head, g KV head, d width of a head, c all
heads' widths together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DtypeError
from ..masks import Mask, Window
from ..ops import ALiBi, AttentionResult, KeyValues, attention, attention_with_stats
from ..ops.key_values import held
from ..ops.problem import checked_mask
from . import convert
from .cache import Cache, SplitKVCache, StaticKVCache, WindowKVCache
from .checks import (
    check_context,
    check_is_context,
    check_number,
    check_positions,
    check_sequence,
    check_share,
    check_sizes,
)
from .norm import NormFactory, build_norm
from .options import check_cross, check_rope, check_sinks, check_softcap, checked_window
from .positions import RoPE, Rotation
from .prune import Pruned
from .rope import check_rotation


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
        rope: rotary positions of queries and keys; None for none. Self-attention only.
        qk_norm: what builds a norm over `head_dim`, which queries and keys pass before they are
            rotated, for example `torch.nn.RMSNorm`; one for all query heads, one for all keys.
        window: an int is a causal window of so many keys, the query's own included, as
            `SlidingWindow`; a `Window` stands for itself. It is intersected with the mask of every
            call. Self-attention only.
        softcap: c > 0 turns a scaled score s into `c * tanh(s / c)`.
        sinks: learn a logit for each head that takes part in the softmax and has no value. It
            starts at 0.
        dropout: share of the attention weights that are dropped out in training mode. It costs
            speed: no kernel has it yet.

    Weights start as those of `torch.nn.Linear` do: uniform within `1 / sqrt(n)` for an input of
    width n, whatever the output's width, so that projecting together or apart starts alike.

    Raises:
        ArgumentError: sizes that do not fit one another, a number that is not finite, or an option
            that a cross-attention can't have.
        DtypeError: an option of another type.

    Source: Vaswani et al. 2017, section 3.2.2; Shazeer 2019 (MQA); Ainslie et al. 2023 (GQA);
    Su et al. 2021 (rope); Henry et al. 2020 (qk_norm); Gemma 2 (softcap); gpt-oss (sinks).
    """

    sinks: nn.Parameter | None

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
        rope: RoPE | None = None,
        qk_norm: NormFactory | None = None,
        window: int | Window | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
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
        check_sizes(head_dim=head_dim, value_dim=value_dim)
        check_number("scale", scale, "Leave it out for 1 / sqrt(head_dim).")
        check_softcap(softcap)
        check_share("dropout", dropout)
        check_sinks(sinks)
        if context_dim is not None:
            check_sizes(context_dim=context_dim)
            check_cross(rope=rope, window=window)
        if rope is not None:
            check_rope(rope, head_dim)

        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.value_dim = value_dim
        self.context_dim = context_dim
        self.scale = scale
        self.rope = rope
        self.window = checked_window(window)
        self.softcap = softcap
        self.dropout = dropout
        self.pruned: Pruned | None = None  # what `prune_heads` took out

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
        self.q_norm = None if qk_norm is None else build_norm("qk_norm", qk_norm, head_dim)
        self.k_norm = None if qk_norm is None else build_norm("qk_norm", qk_norm, head_dim)
        self.register_parameter("sinks", nn.Parameter(torch.zeros(num_heads)) if sinks else None)
        self.out_proj = nn.Linear(num_heads * value_dim, embed_dim, bias=out_bias)

    def reset_parameters(self) -> None:
        """Start the sinks anew, at zero; projections and norms have a method of this name."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | ALiBi | None = None,
        cache: Cache | None = None,
        positions: Tensor | Rotation | None = None,
    ) -> Tensor:
        """Attend from `x` to itself, or to `context` in a cross-attention.

        Args:
            x: [B, Lq, embed_dim].
            context: [B, Lk, context_dim]; given exactly when the layer has a `context_dim` and no
                cache holds the context's keys and values yet.
            mask: which keys each query may read, as in `multihead.attention`. True means "may
                attend", also in a bool tensor: the inverse of `torch.nn.MultiheadAttention`.
            bias: added to the scores, as in `multihead.attention`.
            cache: keys and values of earlier tokens, this layer's own; those of `x` are appended.
                The keys that `mask` and `bias` speak of are then all tokens so far. A
                cross-attention stores those of the context in its first call and reads them in
                later ones, which give no context.
            positions: of the tokens of `x`, for `rope` alone: integers [Lq] or [B, Lq], or the
                rotation that `rope.rotation(positions, head_dim)` made of them, for layers that
                share one. By default they count from the cache's length, or from 0. Masks and the
                window count tokens, whatever their positions.

        Returns:
            [B, Lq, embed_dim].

        Raises:
            ArgumentError: a shape that does not fit the layer, a context too many or too few, or
                positions for a layer without rope.
            MaskError, DtypeError, DeviceError: as `multihead.attention`.
        """
        query_bhqd, key_values = self._project(x, context, cache, positions)
        heads_bhqd = attention(
            query_bhqd,
            key_values,
            mask=self._windowed(mask),
            bias=bias,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self._join(heads_bhqd)

    def forward_with_stats(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | ALiBi | None = None,
        cache: Cache | None = None,
        positions: Tensor | Rotation | None = None,
        stats: Sequence[str] = ("lse", "entropy", "max_logit"),
        bins: int | None = None,
    ) -> tuple[Tensor, AttentionResult]:
        """`forward`, and what each head did: statistics [B, H, Lq], and weights on demand.

        Returns:
            The output [B, Lq, embed_dim], and the `AttentionResult` of the heads before they are
            joined: an attribute for each name in `stats`, the pooled `map` if `bins` are given, and
            `weights(rows, columns)`.

        Raises:
            As `forward`; ArgumentError for an unknown statistic.
        """
        query_bhqd, key_values = self._project(x, context, cache, positions)
        result = attention_with_stats(
            query_bhqd,
            key_values,
            mask=self._windowed(mask),
            bias=bias,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            dropout_p=self.dropout if self.training else 0.0,
            stats=tuple(stats),
            bins=bins,
        )
        return self._join(result.out), result

    def _project(
        self,
        x_bqc: Tensor,
        context_bkc: Tensor | None,
        cache: Cache | None,
        positions: Tensor | Rotation | None,
    ) -> tuple[Tensor, KeyValues]:
        """The queries [B, H, Lq, D], and the keys and values that they may read."""
        self._check_inputs(x_bqc, context_bkc, cache, positions)
        if self.context_dim is None:
            query_bhqd, key_bgkd, value_bgkd = self._of_sequence(x_bqc, cache, positions)
        else:
            query_bhqd, key_bgkd, value_bgkd = self._of_context(x_bqc, context_bkc)
        if cache is None:
            return query_bhqd, held(key=key_bgkd, value=value_bgkd)
        return query_bhqd, cache.update(key_bgkd, value_bgkd)

    def _of_sequence(
        self, x_bqc: Tensor, cache: Cache | None, positions: Tensor | Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a self-attention."""
        heads = self.num_heads, self.num_kv_heads
        value_width = self.num_kv_heads * self.value_dim
        both_blc, value_blc = self.qkv_proj(x_bqc).split_with_sizes(
            (sum(heads) * self.head_dim, value_width), dim=-1
        )
        both_bhld = _split_heads(both_blc, sum(heads), self.head_dim)
        value_bgkd = _split_heads(value_blc, self.num_kv_heads, self.value_dim)
        rotation = None if self.rope is None else self._rotation(x_bqc, cache, positions)
        if self.q_norm is None:
            # Queries and keys lie side by side: turned together, a step of decoding is shorter.
            if rotation is not None:
                both_bhld = rotation.apply(both_bhld)
            query_bhqd, key_bgkd = both_bhld.split_with_sizes(heads, dim=1)
            return query_bhqd, key_bgkd, value_bgkd
        query_bhqd, key_bgkd = self._normed(*both_bhld.split_with_sizes(heads, dim=1))
        if rotation is not None:
            query_bhqd, key_bgkd = rotation.apply(query_bhqd), rotation.apply(key_bgkd)
        # A norm with weights in float32 may leave half precision behind.
        return query_bhqd.to(value_bgkd.dtype), key_bgkd.to(value_bgkd.dtype), value_bgkd

    def _of_context(
        self, x_bqc: Tensor, context_bkc: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and keys and values of a context: none where a cache holds them."""
        query_bqc = self.q_proj(x_bqc)
        key_width = self.num_kv_heads * self.head_dim
        value_width = self.num_kv_heads * self.value_dim
        if context_bkc is None:
            both_bkc = query_bqc.new_empty(x_bqc.shape[0], 0, key_width + value_width)
        else:
            both_bkc = self.kv_proj(context_bkc)
        key_bkc, value_bkc = both_bkc.split_with_sizes((key_width, value_width), dim=-1)
        query_bhqd, key_bgkd = self._normed(
            _split_heads(query_bqc, self.num_heads, self.head_dim),
            _split_heads(key_bkc, self.num_kv_heads, self.head_dim),
        )
        value_bgkd = _split_heads(value_bkc, self.num_kv_heads, self.value_dim)
        return query_bhqd.to(value_bgkd.dtype), key_bgkd.to(value_bgkd.dtype), value_bgkd

    def _normed(self, query_bhqd: Tensor, key_bgkd: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return query_bhqd, key_bgkd
        return self.q_norm(query_bhqd), self.k_norm(key_bgkd)

    def _rotation(
        self, x_bqc: Tensor, cache: Cache | None, positions: Tensor | Rotation | None
    ) -> Rotation:
        assert self.rope is not None
        if positions is None:
            length, device = x_bqc.shape[1], x_bqc.device
            positions = (
                torch.arange(length, device=device)
                if cache is None
                else cache.positions(length).to(device)
            )
        if isinstance(positions, Rotation):
            return positions
        return self.rope.rotation(positions, self.head_dim)

    def _windowed(self, mask: Mask | Tensor | None) -> Mask | Tensor | None:
        if self.window is None:
            return mask
        return self.window if mask is None else checked_mask(mask) & self.window

    def _join(self, heads_bhqd: Tensor) -> Tensor:
        concatenated_bqc = heads_bhqd.transpose(1, 2).flatten(2)
        return self.out_proj(concatenated_bqc)  # type: ignore[no-any-return]

    def _check_inputs(
        self,
        x: Tensor,
        context: Tensor | None,
        cache: Cache | None,
        positions: Tensor | Rotation | None,
    ) -> None:
        check_sequence("x", x, "embed_dim", self.embed_dim)
        if cache is not None and not hasattr(cache, "positions"):
            raise DtypeError(
                f"cache must be one of this layer's own, such as multihead.KVCache(); got "
                f"{type(cache).__name__}."
            )
        if positions is not None and self.rope is None:
            remedy = (
                "Build it with rope=RoPE(), or add positions to x before the layer."
                if self.context_dim is None
                else "A cross-attention compares no positions: leave them out."
            )
            raise ArgumentError(f"positions were given to a layer that rotates nothing. {remedy}")
        if isinstance(positions, Rotation):
            assert self.rope is not None  # as the check above says
            check_rotation(positions, self.rope.width(self.head_dim), self.rope.interleaved)
        elif positions is not None:
            check_positions(positions, x)
        if context is not None:
            check_is_context(context)
        if self.context_dim is not None:
            if isinstance(cache, WindowKVCache | SplitKVCache):
                raise ArgumentError(
                    f"a {type(cache).__name__} drops what is far behind in one sequence; a context "
                    "is read whole. Cache it in a KVCache."
                )
            check_context(x, context, self.context_dim, _tokens_held(cache, context))
        elif context is not None:
            raise ArgumentError(
                "context was given to a self-attention layer. Build a cross-attention with "
                f"MultiHeadAttention(..., context_dim={context.shape[-1]})."
            )

    @classmethod
    def from_torch(
        cls, module: nn.MultiheadAttention, *, cross: bool | None = None
    ) -> MultiHeadAttention:
        """The same layer as a `torch.nn.MultiheadAttention`, with a copy of its weights.

        Two things differ in how they are called. This layer takes [B, L, width] whatever the
        module's `batch_first` says: transpose the inputs of a module that has it False. And a bool
        mask here says True for "may attend", there for "hidden".

        Args:
            module: packed projections, or separate ones (`kdim`, `vdim`).
            cross: whether the layer shall read a context. By default it does if the module has a
                `kdim` of its own; for one without, torch's module does not say which it is.

        Raises:
            ArgumentError: `add_bias_kv`, `add_zero_attn`, `kdim` other than `vdim`, or
                `cross=False` for a module with its own `kdim`.
            DtypeError: `module` is not a `torch.nn.MultiheadAttention`.
        """
        return convert.attention_from_torch(cls, module, cross)

    def to_torch(self, *, batch_first: bool = True) -> nn.MultiheadAttention:
        """The same layer as a `torch.nn.MultiheadAttention`, with a copy of its weights.

        A cross-attention whose context has a width of its own gets separate projections there,
        which torch calls `kdim` and `vdim`. torch has biases everywhere or nowhere: where this
        layer has some of them, the others are there as zeros.

        Raises:
            ArgumentError: what torch's module can't do: grouped KV heads, heads that do not fill
                the width, a scale, rope, qk_norm, a window, a softcap or sinks.
            DtypeError: a projection that was replaced by another module, such as an adapter.
        """
        return convert.attention_to_torch(self, batch_first)

    def extra_repr(self) -> str:
        """The sizes that `print(layer)` shows."""
        sizes = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            sizes.append(f"num_kv_heads={self.num_kv_heads}")
        sizes.append(f"head_dim={self.head_dim}")
        if self.value_dim != self.head_dim:
            sizes.append(f"value_dim={self.value_dim}")
        for name in ("context_dim", "scale", "rope", "window", "softcap"):
            if getattr(self, name) is not None:
                sizes.append(f"{name}={getattr(self, name)}")
        if self.sinks is not None:
            sizes.append("sinks=True")
        if self.pruned is not None:
            sizes.append(f"pruned={list(self.pruned.heads)}")
        if self.dropout:
            sizes.append(f"dropout={self.dropout}")
        return ", ".join(sizes)


def _tokens_held(cache: Cache | None, context: Tensor | None) -> int | None:
    """How many tokens of a context a cache holds; None without a cache."""
    if cache is None:
        return None
    if torch.compiler.is_compiling() and isinstance(cache, StaticKVCache):
        # A tensor in a graph, on which no check may depend: what the call takes for granted.
        return int(context is None)
    return cache.length


def _split_heads(projected_blc: Tensor, heads: int, width: int) -> Tensor:
    batch, length, _ = projected_blc.shape
    return projected_blc.reshape(batch, length, heads, width).transpose(1, 2)
