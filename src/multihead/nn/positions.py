"""What tells attention where a token stands.

Vectors that are added to the tokens, sinusoidal and learned, and the slopes of linear biases are
here; what turns queries and keys by their positions is in `rope.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from .angles import angles_of, check_base, checked_positions, positions_per_radian
from .checks import check_sizes
from .rope import RoPE, Rotation, apply_rope

__all__ = [
    "LearnedPositions",
    "RoPE",
    "Rotation",
    "SinusoidalPositions",
    "alibi_slopes",
    "apply_rope",
]


class SinusoidalPositions(nn.Module):
    """Vectors of sines and cosines: lanes 2i and 2i + 1 are `sin` and `cos` of `p / base^(2i/d)`.

    Nothing is trained and nothing is stored, so that there is no largest position. The vectors
    are computed in float32 at least, and rounded once to the dtype that the module was moved to.

    Args:
        embed_dim: width d of a vector; even.
        base: sets the wavelengths, from 2 pi to `2 pi base`.
        interleaved: False puts all sines before all cosines, as tensor2tensor did.

    Raises:
        ArgumentError: an odd or non-positive `embed_dim`, or a `base` that is not positive.

    Source: Vaswani et al. 2017, section 3.5.
    """

    like: Tensor

    def __init__(self, embed_dim: int, *, base: float = 10000.0, interleaved: bool = True) -> None:
        super().__init__()
        check_sizes(embed_dim=embed_dim)
        if embed_dim % 2:
            raise ArgumentError(
                f"embed_dim must be even, a sine and a cosine for each wavelength; got {embed_dim}."
            )
        check_base(base)
        self.embed_dim = embed_dim
        self.base = base
        self.interleaved = interleaved
        # Empty: it only follows the module to its device and dtype.
        self.register_buffer("like", torch.empty(0), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """The vectors of `positions`, integers [L] or [B, L]; returns [1|B, L, embed_dim].

        Raises:
            ArgumentError, DtypeError: positions of another shape, or not integers.
        """
        positions = checked_positions(positions)
        spans = positions_per_radian(self.base, self.embed_dim, positions.device)
        angles = angles_of(positions, 1 / spans)
        pair = angles.sin(), angles.cos()
        vectors = torch.stack(pair, dim=-1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        return vectors.to(self.like.dtype)

    def extra_repr(self) -> str:
        """The sizes that `print(module)` shows."""
        return f"embed_dim={self.embed_dim}, base={self.base}, interleaved={self.interleaved}"


class LearnedPositions(nn.Module):
    """A trained vector for each of the positions 0 ... num_positions - 1.

    The weight [num_positions, embed_dim] starts normal with standard deviation 0.02, as that of
    GPT-2 and BERT does.

    Raises:
        ArgumentError, DtypeError: sizes that are not positive integers.

    Source: Gehring et al. 2017; Radford et al. 2018.
    """

    def __init__(self, num_positions: int, embed_dim: int) -> None:
        super().__init__()
        check_sizes(num_positions=num_positions, embed_dim=embed_dim)
        self.num_positions = num_positions
        self.embed_dim = embed_dim
        self.weight = nn.Parameter(torch.empty(num_positions, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """The vectors of `positions`, integers [L] or [B, L]; returns [1|B, L, embed_dim].

        Raises:
            ArgumentError: positions of another shape, negative, or beyond the last one trained;
                values are looked at on the CPU outside of compiled code.
            DtypeError: positions that are not integers.
        """
        positions = checked_positions(positions)
        self._check_values(positions)
        return nn.functional.embedding(positions, self.weight)

    def _check_values(self, positions: Tensor) -> None:
        if torch.compiler.is_compiling() or positions.device.type != "cpu" or not positions.numel():
            return
        first, last = (int(end) for end in positions.aminmax())
        if first < 0 or last >= self.num_positions:
            raise ArgumentError(
                f"positions must lie between 0 and {self.num_positions - 1}, since no others were "
                f"trained (num_positions={self.num_positions}); got {first} to {last}. Clamp the "
                "positions of padding, whose vectors nobody reads."
            )

    def extra_repr(self) -> str:
        """The sizes that `print(module)` shows."""
        return f"num_positions={self.num_positions}, embed_dim={self.embed_dim}"


def alibi_slopes(num_heads: int) -> Tensor:
    """The slopes of `ALiBi` for any number of heads, float32 [num_heads].

    For a power of two, `2^(-8/n), 2^(-16/n), ..., 2^-8`. For another number, the slopes of the next
    lower power p, then every second slope of 2p: what BLOOM and the paper's own code do.

    Raises:
        ArgumentError, DtypeError: `num_heads` is not a positive integer.

    Source: Press, Smith, Lewis 2022, section 3.
    """
    check_sizes(num_heads=num_heads)
    power = 2 ** (num_heads.bit_length() - 1)
    between = [2.0 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor([2.0 ** (-8 * i / power) for i in range(1, power + 1)] + between)
