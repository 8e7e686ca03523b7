"""Multi-head latent attention (MLA) as a layer.

Shape suffixes: b batch, q query, k key, l either, h head, n unrotated width of a head, r rotated
width, v value width of a head, c latent width, e width of a cache's entry: c + r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DtypeError
from ..masks import Mask
from ..ops import ALiBi, AttentionResult, KeyValues, attention, attention_with_stats
from ..ops.key_values import held
from . import convert_latent
from .checks import check_number, check_positions, check_sequence, check_sizes
from .latent_cache import LatentKVCache
from .packed_linear import PackedLinear
from .rope import RoPE, Rotation, check_rotation

Form = Literal["materialized", "absorbed"]


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values of all heads are made from one small latent.

    A token's latent has `latent_dim` numbers; each head's key is `nope_dim` lanes made from it,
    and `rope_dim` rotated lanes that all heads share. A cache holds `latent_dim + rope_dim`
    numbers a token and no head's keys or values.

    There are two ways to compute it, the same function up to rounding:

    * materialized: make every head's keys and values, and attend;
    * absorbed: multiply the queries, instead of the keys, with the weights that make keys, attend
      to the latents themselves (multi-query attention on wide heads), and multiply the result,
      instead of the values, with the weights that make values.

    Each call takes the one with fewer products, from its lengths alone: absorbed for a few queries
    on many keys, such as a step of decoding, materialized for a prompt (see `cheaper_form`).

    Args:
        embed_dim: width of the input and of the output.
        num_heads: number of heads.
        latent_dim: width of the latent; `kv_lora_rank` in configs.
        nope_dim: lanes of a head's query and key that are not rotated.
        rope_dim: lanes that are rotated.
        value_dim: width of a value in one head.
        query_latent_dim: make queries from a latent of this width too; None makes them from x.
        latent_bias: add a bias to what makes the latents.
        out_bias: add a bias to the output.
        rope: how the rotated lanes turn; by default `RoPE(interleaved=True)`.
        norm_eps: of the norms (RMSNorm) of the latents.
        scale: factor on the scores; by default `1 / sqrt(nope_dim + rope_dim)`, times the
            `logit_factor` of rope's scaling (YaRN with mscale_all_dim).

    Raises:
        ArgumentError: sizes that are not positive, an odd `rope_dim`, or a number that is not
            finite.
        DtypeError: a size that is no integer, a `rope` of another type.

    Source: DeepSeek-V2, 2024, section 2.1.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        latent_dim: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        query_latent_dim: int | None = None,
        latent_bias: bool = False,
        out_bias: bool = False,
        rope: RoPE | None = None,
        norm_eps: float = 1e-6,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, latent_dim=latent_dim)
        check_sizes(nope_dim=nope_dim, rope_dim=rope_dim, value_dim=value_dim)
        check_number("scale", scale, "Leave it out for 1 / sqrt(nope_dim + rope_dim).")
        check_number("norm_eps", norm_eps, "Usual is 1e-6.")
        rope = RoPE(interleaved=True) if rope is None else rope
        if not isinstance(rope, RoPE):
            raise DtypeError(f"rope must be a RoPE, or None for the default; got {rope!r}.")
        rope.width(rope_dim)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.latent_dim = latent_dim
        self.nope_dim = nope_dim
        self.rope_dim = rope_dim
        self.value_dim = value_dim
        self.query_latent_dim = query_latent_dim
        self.rope = rope
        if scale is None:
            factor = 1.0 if rope.scaling is None else rope.scaling.logit_factor
            scale = factor / math.sqrt(nope_dim + rope_dim)
        self.scale = scale

        query_width = num_heads * (nope_dim + rope_dim)
        if query_latent_dim is None:
            self.q_proj = nn.Linear(embed_dim, query_width, bias=False)
        else:
            check_sizes(query_latent_dim=query_latent_dim)
            self.q_down_proj = nn.Linear(embed_dim, query_latent_dim, bias=latent_bias)
            self.q_norm = nn.RMSNorm(query_latent_dim, eps=norm_eps)
            self.q_up_proj = nn.Linear(query_latent_dim, query_width, bias=False)
        self.kv_down_proj = nn.Linear(embed_dim, latent_dim + rope_dim, bias=latent_bias)
        self.kv_norm = nn.RMSNorm(latent_dim, eps=norm_eps)
        self.kv_up_proj = nn.Linear(latent_dim, num_heads * (nope_dim + value_dim), bias=False)
        self.out_proj = nn.Linear(num_heads * value_dim, embed_dim, bias=out_bias)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | ALiBi | None = None,
        cache: LatentKVCache | None = None,
        positions: Tensor | Rotation | None = None,
        form: Form | None = None,
    ) -> Tensor:
        """Attend from `x` to itself, and to the tokens of the cache.

        Args:
            x: [B, Lq, embed_dim].
            mask: which keys each query may read, as in `multihead.attention`.
            bias: added to the scores, as in `multihead.attention`.
            cache: latents of earlier tokens, this layer's own; those of `x` are appended. The keys
                that `mask` and `bias` speak of are then all tokens so far.
            positions: of the tokens of `x`: integers [Lq] or [B, Lq], or the rotation that
                `rope.rotation(positions, rope_dim)` made of them, for layers that share one. By
                default they count from the cache's length, or from 0.
            form: "materialized" or "absorbed"; by default the cheaper one.

        Returns:
            [B, Lq, embed_dim].

        Raises:
            ArgumentError: a shape that does not fit the layer, an unknown form, or "absorbed" where
                another module stands in for `kv_up_proj` (an adapter), whose weights would be
                passed by.
            MaskError, DtypeError, DeviceError: as `multihead.attention`.
        """
        query_bhqd, key_values, form = self._project(x, cache, positions, form)
        heads = attention(query_bhqd, key_values, mask=mask, bias=bias, scale=self.scale)
        return self._join(heads, form)

    def forward_with_stats(
        self,
        x: Tensor,
        *,
        mask: Mask | Tensor | None = None,
        bias: Tensor | ALiBi | None = None,
        cache: LatentKVCache | None = None,
        positions: Tensor | Rotation | None = None,
        form: Form | None = None,
        stats: Sequence[str] = ("lse", "entropy", "max_logit"),
        bins: int | None = None,
    ) -> tuple[Tensor, AttentionResult]:
        """`forward`, and what each head did: statistics [B, H, Lq], and weights on demand.

        Returns:
            The output [B, Lq, embed_dim], and the `AttentionResult` of the heads, whose `out` is in
            latents [B, H, Lq, latent_dim] in the absorbed form.

        Raises:
            As `forward`; ArgumentError for an unknown statistic.
        """
        query_bhqd, key_values, form = self._project(x, cache, positions, form)
        result = attention_with_stats(
            query_bhqd,
            key_values,
            mask=mask,
            bias=bias,
            scale=self.scale,
            stats=tuple(stats),
            bins=bins,
        )
        return self._join(result.out, form), result

    def cheaper_form(self, query_length: int, key_length: int) -> Form:
        """The form with fewer products for so many queries and keys, each query reading each key.

        Materializing multiplies every key's latent with the weights, absorbing every query instead;
        then each pair of a query and a key costs `nope_dim + rope_dim + value_dim` products, or
        `2 latent_dim + rope_dim`. DeepSeek-V3 decodes absorbed up to 170 queries at a time.
        """
        weights = self.latent_dim * (self.nope_dim + self.value_dim)
        pairs = query_length * key_length
        materialized = key_length * weights + pairs * (
            self.nope_dim + self.rope_dim + self.value_dim
        )
        absorbed = query_length * weights + pairs * (2 * self.latent_dim + self.rope_dim)
        return "absorbed" if absorbed < materialized else "materialized"

    def _project(
        self,
        x_bqc: Tensor,
        cache: LatentKVCache | None,
        positions: Tensor | Rotation | None,
        form: Form | None,
    ) -> tuple[Tensor, KeyValues, Form]:
        """The queries, what they may read, and the form that both are in."""
        self._check_inputs(x_bqc, cache, positions, form)
        rotation = self._rotation(x_bqc, cache, positions)
        query_bqhd = self._queries(x_bqc).unflatten(-1, (self.num_heads, -1))
        nope_bqhn, rope_bqhr = query_bqhd.split((self.nope_dim, self.rope_dim), dim=-1)
        rope_bhqr = rotation.apply(rope_bqhr.transpose(1, 2))
        entries = self._entries(x_bqc, cache, rotation)
        if form is None:
            form = "materialized"
            if self._weights_are_plain():
                form = self.cheaper_form(x_bqc.shape[1], entries.key_length)
        if form == "absorbed":
            key_hnc, _ = self._up_weights()
            query = torch.cat((_per_head(nope_bqhn, key_hnc), rope_bhqr), dim=-1)
            return query, entries, form
        query = torch.cat((nope_bqhn.transpose(1, 2), rope_bhqr), dim=-1)
        return query, self._materialized(entries), form

    def _queries(self, x_bqc: Tensor) -> Tensor:
        if self.query_latent_dim is None:
            return self.q_proj(x_bqc)  # type: ignore[no-any-return]
        latent = self.q_down_proj(x_bqc)
        # A norm with weights in float32 may leave half precision behind.
        return self.q_up_proj(self.q_norm(latent).to(latent.dtype))  # type: ignore[no-any-return]

    def _entries(self, x_blc: Tensor, cache: LatentKVCache | None, rotation: Rotation) -> KeyValues:
        """Keys [B, 1, Lk, C + rope_dim], and values that are their first C lanes."""
        down = self.kv_down_proj(x_blc)[:, None]
        latent, rope = down.split((self.latent_dim, self.rope_dim), dim=-1)
        latent, rope = self.kv_norm(latent).to(down.dtype), rotation.apply(rope)
        if cache is not None:
            return cache.update(rope, latent)
        entries = torch.cat((latent, rope), dim=-1)
        return held(key=entries, value=entries[..., : self.latent_dim])

    def _materialized(self, entries: KeyValues) -> KeyValues:
        """Every head's keys [B, H, Lk, N + R] and values [B, H, Lk, V]."""
        entry_b1ke, _ = entries.tensors(entries.key.dtype)
        latent_bkc, rope_bkr = entry_b1ke[:, 0].split((self.latent_dim, self.rope_dim), dim=-1)
        both = self.kv_up_proj(latent_bkc).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key_bhkn, value_bhkv = both.split((self.nope_dim, self.value_dim), dim=-1)
        rope_bhkr = rope_bkr[:, None].expand(*key_bhkn.shape[:3], -1)
        key = torch.cat((key_bhkn, rope_bhkr), dim=-1)
        return held(key=key, value=value_bhkv, frame=entries.frame, columns=entries.columns)

    def _join(self, heads_bhqd: Tensor, form: Form) -> Tensor:
        if form == "absorbed":
            _, value_hvc = self._up_weights()
            heads_bhqd = _per_head(heads_bhqd.transpose(1, 2), value_hvc.mT)
        return self.out_proj(heads_bhqd.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _up_weights(self) -> tuple[Tensor, Tensor]:
        """What makes each head's key and value from a latent."""
        weight_hdc = self.kv_up_proj.weight.unflatten(0, (self.num_heads, -1))
        key_hnc, value_hvc = weight_hdc.split((self.nope_dim, self.value_dim), dim=1)
        return key_hnc, value_hvc

    def _weights_are_plain(self) -> bool:
        """Whether `kv_up_proj` does nothing but multiply with its weight."""
        module = self.kv_up_proj
        hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        if hooks or "forward" in module.__dict__:
            return False
        return type(module) in (nn.Linear, PackedLinear) and module.bias is None

    def _rotation(
        self, x: Tensor, cache: LatentKVCache | None, positions: Tensor | Rotation | None
    ) -> Rotation:
        if isinstance(positions, Rotation):
            return positions
        if positions is None:
            length = x.shape[1]
            new = torch.arange(length) if cache is None else cache.positions(length)
            positions = new.to(x.device)
        return self.rope.rotation(positions, self.rope_dim)

    def _check_inputs(
        self,
        x: Tensor,
        cache: LatentKVCache | None,
        positions: Tensor | Rotation | None,
        form: Form | None,
    ) -> None:
        check_sequence("x", x, "embed_dim", self.embed_dim)
        if isinstance(positions, Rotation):
            check_rotation(positions, self.rope.width(self.rope_dim), self.rope.interleaved)
        elif positions is not None:
            check_positions(positions, x)
        if cache is not None and not isinstance(cache, LatentKVCache):
            raise DtypeError(
                f"cache must be a LatentKVCache({self.latent_dim}), which holds latents; got "
                f"{type(cache).__name__}. It takes other caches: LatentKVCache(latent_dim, cache)."
            )
        if cache is not None and cache.latent_dim != self.latent_dim:
            raise ArgumentError(
                f"the cache holds latents of {cache.latent_dim} numbers, but the layer's have "
                f"latent_dim={self.latent_dim}."
            )
        if form not in (None, "materialized", "absorbed"):
            raise ArgumentError(
                f"form must be 'materialized', 'absorbed' or None for the cheaper; got {form!r}."
            )
        if form == "absorbed" and not self._weights_are_plain():
            raise ArgumentError(
                "form='absorbed' reads the weight of kv_up_proj and would pass by what "
                f"{type(self.kv_up_proj).__name__}, its hooks or its bias add. Merge an adapter "
                "into the layer first, or leave form out."
            )

    @classmethod
    def from_deepseek(
        cls, config: Mapping[str, Any], state_dict: Mapping[str, Tensor], *, prefix: str = ""
    ) -> LatentAttention:
        """A layer with weights as DeepSeek-V2 and V3 have them in transformers.

        Args:
            config: the model's config, as a mapping (`config.to_dict()`, config.json).
            state_dict: tensors by name, of one layer or of a model.
            prefix: of the names of this layer, such as "model.layers.0.self_attn.".

        Raises:
            ArgumentError: a key of the config or a tensor that is missing or does not fit.
        """
        return convert_latent.latent_from_deepseek(cls, config, state_dict, prefix)

    def extra_repr(self) -> str:
        """The sizes that `print(layer)` shows."""
        names = ("embed_dim", "num_heads", "latent_dim", "nope_dim", "rope_dim", "value_dim")
        sizes = [f"{name}={getattr(self, name)}" for name in names]
        if self.query_latent_dim is not None:
            sizes.append(f"query_latent_dim={self.query_latent_dim}")
        return ", ".join([*sizes, f"scale={self.scale:.6g}", f"rope={self.rope}"])


def _per_head(x_blhi: Tensor, weight_hij: Tensor) -> Tensor:
    """Each head's rows times its own matrix: [B, H, L, J]."""
    batch, length, _, _ = x_blhi.shape
    x_hmi = x_blhi.flatten(0, 1).transpose(0, 1)
    out_hmj = torch.bmm(x_hmi, weight_hij)
    return out_hmj.unflatten(1, (batch, length)).transpose(0, 1)  # type: ignore[no-any-return]
