"""Rotary positions: queries and keys turned by angles that grow with their positions.

Shape suffixes: b batch (or 1), h head, l length, d width of a head, r half the turned width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, DtypeError
from ..ops.rotate import rotate, serves
from .angles import angles_of, check_base, checked_positions, positions_per_radian
from .checks import check_sizes
from .rope_config import read_config
from .rope_scaling import RoPEScaling

# Real lanes in the widest vectors of complex float32 numbers: AVX-512's.
_COMPLEX_LANES = 16


@dataclass(frozen=True)
class RoPE:
    """Rotary position embedding: which lanes turn, and how fast. A description without state.

    Pair i of the turned lanes turns by `position * base^(-2i / rotary_dim)` radians, so that the
    product of a query and a key depends on how far apart they are, not on where.

    Args:
        base: sets the frequencies; `rope_theta` in configs.
        rotary_dim: how many lanes turn, the first ones; the rest passes through. None is all.
        interleaved: lanes 2i and 2i + 1 are a pair (GPT-J, DeepSeek); else lanes i and
            i + rotary_dim / 2 (GPT-NeoX, Llama).
        scaling: LinearScaling, NTKScaling, DynamicNTKScaling, YaRNScaling, LongRoPEScaling,
            Llama3Scaling, or None.

    Raises:
        ArgumentError: an odd or non-positive `rotary_dim`, or a `base` that is not above 1.
        DtypeError: a `rotary_dim` that is no integer, or a `scaling` of another type.

    Source: Su et al. 2021, "RoFormer".
    """

    base: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    scaling: RoPEScaling | None = None

    def __post_init__(self) -> None:
        check_base(self.base)
        if self.rotary_dim is not None:
            check_sizes(rotary_dim=self.rotary_dim)
            _check_even("rotary_dim", self.rotary_dim)
        if self.scaling is not None and not isinstance(self.scaling, RoPEScaling):
            raise DtypeError(
                f"scaling must be a scaling such as LinearScaling(factor=2.0), or None; got "
                f"{self.scaling!r}. RoPE.from_config reads the dictionaries of configs."
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, layer_type: str | None = None) -> RoPE:
        """What a Hugging Face config says, given as a mapping (`config.to_dict()`, config.json).

        Reads rope_theta, rope_parameters (or rope_scaling, as older files call it),
        partial_rotary_factor, rotary_dim, head_dim, max_position_embeddings and rope_interleave,
        and knows by model_type whose lanes are interleaved.

        Args:
            config: the config; of a multimodal one, its text_config.
            layer_type: which of the entries, where each type of layer has its own
                ("full_attention", "sliding_attention").

        Raises:
            ArgumentError: a kind of scaling that is not known here, a missing or unknown
                layer_type, or a value that the scaling cannot have.
        """
        return cls(**read_config(config, layer_type))

    def frequencies(self, positions: Tensor, head_dim: int) -> Tensor:
        """Radians a position for each pair, float32: [r], or [1|B, 1, r] where rows differ."""
        width = self.width(head_dim)
        if self.scaling is not None:
            return self.scaling.frequencies(self.base, width, positions)
        return positions_per_radian(self.base, width, positions.device).reciprocal()

    def width(self, head_dim: int) -> int:
        """How many lanes of a head turn; raises ArgumentError if `head_dim` has not as many."""
        if self.rotary_dim is None:
            _check_even("head_dim", head_dim)
            return head_dim
        if self.rotary_dim > head_dim:
            raise ArgumentError(
                f"rotary_dim={self.rotary_dim} lanes shall turn, but a head has only "
                f"head_dim={head_dim}."
            )
        return self.rotary_dim

    def rotation(self, positions: Tensor, head_dim: int) -> Rotation:
        """Cosines and sines of `positions`, integers [L] or [B, L], for heads of `head_dim` lanes.

        Compute it once and give it to every layer. Angles are float32 products of position and
        frequency, whatever the dtype of the model, as in training; beyond position 2^24, which
        float32 cannot tell from the next one, they are exact.

        Raises:
            ArgumentError: positions of another shape, or a `head_dim` that does not fit.
            DtypeError: positions that are not integers.
        """
        positions_bl = checked_positions(positions)
        angles_blr = angles_of(positions_bl, self.frequencies(positions_bl, head_dim))
        cos_blr, sin_blr = angles_blr.cos(), angles_blr.sin()
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude
        if amplitude != 1.0:
            cos_blr, sin_blr = cos_blr * amplitude, sin_blr * amplitude
        return Rotation(
            cos_blr[:, None].float(), sin_blr[:, None].float(), head_dim, self.interleaved
        )


@dataclass(frozen=True, eq=False)
class Rotation:
    """By how much each position of a call turns each pair of lanes.

    `RoPE.rotation` makes it; every layer of a model can share it.

    Attributes:
        cos, sin: float32 [1|B, 1, L, rotary_dim / 2].
        head_dim: width of the heads that it is for; the lanes beyond rotary_dim stay.
        interleaved: which lanes are pairs, as in `RoPE`.
    """

    cos: Tensor
    sin: Tensor
    head_dim: int
    interleaved: bool = False

    _turn: tuple[Tensor, ...] = field(init=False, repr=False)
    _by_kernel: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # The forms that `apply` reads: made once for all layers, for queries and for keys.
        turn: tuple[Tensor, ...]
        if self.interleaved:
            turn = (torch.complex(self.cos, self.sin),)
        else:
            turn = torch.cat((self.cos, self.cos), -1), torch.cat((-self.sin, self.sin), -1)
        object.__setattr__(self, "_turn", turn)
        by_kernel = not self.interleaved and serves(self.cos, self.sin)
        object.__setattr__(self, "_by_kernel", by_kernel)

    def apply(self, x: Tensor) -> Tensor:
        """Turn `x` [B, H, L, head_dim], any strides; the same shape and dtype.

        Computed in float32 (float64 if x is) and rounded once. Lanes that do not turn come out
        bit for bit.

        Raises:
            ArgumentError: a shape that does not fit the positions or head_dim.
            DtypeError: x is not a float tensor.
        """
        self._check(x)
        if self._by_kernel:
            turned = rotate(x, self.cos, self.sin)
            if turned is not None:
                return turned
        width = 2 * self.cos.shape[-1]
        turned = self._turned(x if width == self.head_dim else x[..., :width]).to(x.dtype)
        if width == self.head_dim:
            return turned
        return torch.cat((turned, x[..., width:]), dim=-1)

    def _turned(self, x_bhld: Tensor) -> Tensor:
        """`x` turned, in float32 or float64."""
        width = x_bhld.shape[-1]
        if not self.interleaved:
            # Two products and a sum over all lanes: fewer operations than half by half.
            cos, sin = self._turn
            return (x_bhld * cos).addcmul_(_halves_swapped(x_bhld), sin)
        # One product of complex numbers. torch rounds the rest of a row, which fills no vector,
        # in another way: such a row would depend on where it lies. And compilers fuse the other
        # form, but have no code for complex numbers.
        if width % _COMPLEX_LANES == 0 and not torch.compiler.is_compiling():
            (turn,) = self._turn
            return torch.view_as_real(_as_complex(x_bhld) * turn).flatten(-2)
        first, second = x_bhld[..., ::2], x_bhld[..., 1::2]
        turned = first * self.cos - second * self.sin, second * self.cos + first * self.sin
        return torch.stack(turned, dim=-1).flatten(-2)

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise DtypeError(f"x must be a float tensor [B, H, L, head_dim]; got {kind}.")
        batch, _, length, _ = self.cos.shape
        fits = (
            x.ndim == 4
            and x.shape[3] == self.head_dim
            and x.shape[2] == length
            and batch in (1, x.shape[0])
        )
        if not fits:
            rows = "B" if batch == 1 else batch
            raise ArgumentError(
                f"x must be [{rows}, H, {length}, {self.head_dim}] ([B, H, L, head_dim]) for these "
                f"positions; got {list(x.shape)}."
            )


def apply_rope(
    x: Tensor, positions: Tensor, *, base: float = 10000.0, interleaved: bool = False
) -> Tensor:
    """Turn `x` [B, H, L, D] by its `positions`, integers [L] or [B, L]: RoPE in one call.

    `RoPE(...).rotation(positions, D)` is what to keep where several tensors share positions.

    Raises:
        ArgumentError, DtypeError: as `RoPE`, `RoPE.rotation` and `Rotation.apply`.

    Source: Su et al. 2021, "RoFormer".
    """
    if not isinstance(x, Tensor) or x.ndim != 4:
        what = f"shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(f"x must be a tensor [B, H, L, D]; got {what}.")
    return RoPE(base, interleaved=interleaved).rotation(positions, x.shape[-1]).apply(x)


def _as_complex(x: Tensor) -> Tensor:
    """Neighboring lanes as the two parts of a complex number: a view where the strides allow it."""
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()
    *others, last = x.stride()
    if last != 1 or x.storage_offset() % 2 or any(stride % 2 for stride in others):
        x = x.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _halves_swapped(x: Tensor) -> Tensor:
    """The second half of the lanes, then the first."""
    half = x.shape[-1] // 2
    if torch.compiler.is_compiling():
        # To a length that is not known, roll is refused: it asks whether there is anything.
        return torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return x.roll(half, -1)


def _check_even(name: str, width: int) -> None:
    if width % 2:
        raise ArgumentError(f"{name} must be even, since lanes turn in pairs; got {width}.")


def check_rotation(rotation: Rotation, lanes: int, interleaved: bool) -> None:
    """Raises ArgumentError for a rotation of other lanes: another RoPE's, as far as it shows."""
    turned = 2 * rotation.cos.shape[-1]
    if (turned, rotation.interleaved) != (lanes, interleaved):
        raise ArgumentError(
            f"positions are a rotation of {turned} lanes with interleaved={rotation.interleaved}, "
            f"but the layer turns {lanes} with interleaved={interleaved}. Write "
            "layer.rope.rotation(positions, layer.head_dim)."
        )
