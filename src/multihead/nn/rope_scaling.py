"""How rotary positions reach beyond the length that a model was trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError, DtypeError
from .angles import checked_positions, positions_per_radian
from .checks import check_number, check_sizes


class RoPEScaling:
    """A change of the frequencies of rotary positions, and of the size of what they turn."""

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        return 1.0

    @property
    def logit_factor(self) -> float:
        """Factor on the scale of the scores that latent attention (MLA) takes on top."""
        return 1.0

    def frequencies(self, base: float, width: int, positions: Tensor) -> Tensor:
        """Radians a position, float32: [width / 2], or [1|B, 1, width / 2] where rows differ."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearScaling(RoPEScaling):
    """Positions divided by `factor`.

    Source: Chen et al. 2023, "Extending context window of large language models via positional
    interpolation".
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def frequencies(self, base: float, width: int, positions: Tensor) -> Tensor:
        """Every frequency divided by the factor."""
        return 1 / positions_per_radian(base, width, positions.device) / self.factor


@dataclass(frozen=True)
class NTKScaling(RoPEScaling):
    """A larger base: the slowest lane turns `factor` times slower, the fastest as before.

    Source: bloc97 2023, "NTK-aware scaled RoPE".
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    def frequencies(self, base: float, width: int, positions: Tensor) -> Tensor:
        """The frequencies of the larger base."""
        larger = base * self.factor ** _ntk_power(width)
        return 1 / positions_per_radian(larger, width, positions.device)


@dataclass(frozen=True)
class DynamicNTKScaling(RoPEScaling):
    """`NTKScaling` that grows with the sequence once it is longer than `max_length`.

    The length is the largest position of the call + 1, for each row of positions [B, L] its own:
    a row does not depend on the batch around it, nor a call on those before it. What was cached
    under a smaller length stays turned as it was then.

    Source: emozilla 2023, "Dynamically scaled RoPE".
    """

    factor: float
    max_length: int

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        check_sizes(max_length=self.max_length)

    def frequencies(self, base: float, width: int, positions: Tensor) -> Tensor:
        """The frequencies of each row's base, [1|B, 1, width / 2]."""
        power = _ntk_power(width)
        positions = checked_positions(positions)
        if positions.shape[1] == 0:
            return 1 / positions_per_radian(base, width, positions.device)
        length = (positions.amax(dim=1) + 1).clamp(min=self.max_length)
        growth = self.factor * length / self.max_length - (self.factor - 1)
        larger = (base * growth**power)[:, None, None]
        return 1 / positions_per_radian(larger, width, positions.device)


@dataclass(frozen=True)
class YaRNScaling(RoPEScaling):
    """Slow lanes interpolated, fast lanes left alone, a ramp between; and hotter scores.

    Args:
        factor: how much longer the context is than `original_length`.
        original_length: positions that the model was trained on before.
        attention_factor: amplitude of cosines and sines; by default 0.1 ln(factor) + 1, or the
            ratio of this for `mscale` and `mscale_all_dim` where both are given (DeepSeek).
        beta_fast, beta_slow: turns within `original_length` above which a lane is left alone, and
            below which it is interpolated.
        mscale, mscale_all_dim: weights of ln(factor); the latter also gives `logit_factor`.
        truncate: round the ends of the ramp to whole lanes.

    Source: Peng et al. 2023, "YaRN"; DeepSeek-V2 2024 for mscale_all_dim.
    """

    factor: float
    original_length: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        check_sizes(original_length=self.original_length)
        for name in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
            check_number(name, getattr(self, name), "Leave it out for its default.")
        if not self.beta_fast >= self.beta_slow > 0:
            raise ArgumentError(
                "beta_fast must be at least beta_slow, and both above 0; got "
                f"beta_fast={self.beta_fast}, beta_slow={self.beta_slow}."
            )

    @property
    def amplitude(self) -> float:
        """`attention_factor`, or what follows from the factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    @property
    def logit_factor(self) -> float:
        """The square of the magnitude for `mscale_all_dim`; 1 without it."""
        return self._magnitude(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def frequencies(self, base: float, width: int, positions: Tensor) -> Tensor:
        """Between the interpolated frequencies and the plain ones, along the ramp."""
        spans = positions_per_radian(base, width, positions.device)
        low, high = self._ramp(base, width)
        lanes = torch.arange(width // 2, device=positions.device, dtype=torch.float32)
        kept = 1 - ((lanes - low) / (high - low)).clamp(0, 1)
        return 1 / (self.factor * spans) * (1 - kept) + 1 / spans * kept

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def _ramp(self, base: float, width: int) -> tuple[float, float]:
        """The lanes where the ramp begins and ends."""

        def lane(turns: float) -> float:
            return (
                width
                * math.log(self.original_length / (turns * 2 * math.pi))
                / (2 * math.log(base))
            )

        low, high = lane(self.beta_fast), lane(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        return low, high if high != low else high + 0.001


@dataclass(frozen=True)
class LongRoPEScaling(RoPEScaling):
    """A wavelength of its own for each lane, found by search: some for short texts, some for long.

    A text is long if the largest position of the call is at or beyond `original_length`, for each
    row of positions [B, L] by itself, as with `DynamicNTKScaling`.

    Args:
        short_factor, long_factor: by how much each lane's wavelength grows, rotary_dim / 2 numbers.
        original_length: positions that the model was trained on before.
        factor: how much longer the context became; it sets the amplitude.
        attention_factor: amplitude of cosines and sines; by default
            sqrt(1 + ln(factor) / ln(original_length)).

    Source: Ding et al. 2024, "LongRoPE"; Phi-3 for the two sets and the amplitude.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    factor: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        check_sizes(original_length=self.original_length)
        check_number("attention_factor", self.attention_factor, "Leave it out for its default.")
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, _lane_factors(name, getattr(self, name)))

    @property
    def amplitude(self) -> float:
        """`attention_factor`, or what follows from the factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1 or self.original_length < 2:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))

    def frequencies(self, base: float, width: int, positions: Tensor) -> Tensor:
        """Each row's set of frequencies, [1|B, 1, width / 2]."""
        spans = positions_per_radian(base, width, positions.device)
        short, long = (
            1 / (self._of_lanes(name, width, positions.device) * spans)
            for name in ("short_factor", "long_factor")
        )
        positions = checked_positions(positions)
        if positions.shape[1] == 0:
            return short
        is_long = positions.amax(dim=1) >= self.original_length
        return torch.where(is_long[:, None, None], long, short)

    def _of_lanes(self, name: str, width: int, device: torch.device) -> Tensor:
        factors: tuple[float, ...] = getattr(self, name)
        if len(factors) != width // 2:
            raise ArgumentError(
                f"{name} must have a number for each of the {width // 2} pairs of lanes that turn; "
                f"it has {len(factors)}."
            )
        return torch.tensor(factors, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Llama3Scaling(RoPEScaling):
    """Long wavelengths stretched by `factor`, short ones left alone, a blend between.

    Args:
        factor: how much longer the long wavelengths become.
        original_length: positions that the model was trained on before.
        low_freq_factor: a wavelength above `original_length / low_freq_factor` is long.
        high_freq_factor: one below `original_length / high_freq_factor` is short.

    Source: Llama 3.1, 2024.
    """

    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        check_sizes(original_length=self.original_length)
        for name in ("low_freq_factor", "high_freq_factor"):
            check_number(name, getattr(self, name), "Leave it out for its default.")
        if not self.high_freq_factor > self.low_freq_factor > 0:
            raise ArgumentError(
                "high_freq_factor must be above low_freq_factor, and both above 0; got "
                f"low_freq_factor={self.low_freq_factor}, high_freq_factor={self.high_freq_factor}."
            )

    def frequencies(self, base: float, width: int, positions: Tensor) -> Tensor:
        """Stretched, blended or plain, by wavelength."""
        plain = 1 / positions_per_radian(base, width, positions.device)
        wavelengths = 2 * math.pi / plain
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = (self.original_length / wavelengths - low) / (high - low)
        blended = (1 - kept) * plain / self.factor + kept * plain
        is_long = wavelengths > self.original_length / low
        is_short = wavelengths < self.original_length / high
        return torch.where(is_short, plain, torch.where(is_long, plain / self.factor, blended))


def _check_factor(factor: float) -> None:
    check_number("factor", factor, "It is the new length over the one trained on.")
    if factor is None or factor < 1:
        raise ArgumentError(
            f"factor must be at least 1, the new length over the one trained on; got {factor}."
        )


def _lane_factors(name: str, factors: object) -> tuple[float, ...]:
    """Numbers above 0, as a tuple."""
    if isinstance(factors, str) or not isinstance(factors, Sequence):
        raise DtypeError(f"{name} must be a list of numbers; got {type(factors).__name__}.")
    for factor in factors:
        check_number(name, factor, "It is a list of numbers, one for each pair of lanes.")
        if factor is None or factor <= 0:
            raise ArgumentError(f"{name} must hold numbers above 0; got {factor}.")
    return tuple(map(float, factors))


def _ntk_power(width: int) -> float:
    if width < 4:
        raise ArgumentError(
            f"NTK scaling needs rotary_dim of at least 4, a fast lane and a slow one; got {width}."
        )
    return width / (width - 2)
