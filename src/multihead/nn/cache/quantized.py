"""A cache in int8: a quarter of float32's bytes, one scale for each token and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from ...ops import KeyValues
from ...ops.key_values import held
from .growing import Growing, reordered
from .protocol import Shape, first_shape, refuse_gradients, twin

_LARGEST = 127.0  # -128 is left out: the scale is the same on both sides of zero
# A smaller scale would be subnormal, and too coarse itself for what it scales.
_LEAST_SCALE = 2.0**-126


def quantize(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """int8 of the same shape, and one float32 scale for each row along the last axis.

    The scale is the row's largest magnitude over 127, so an element is off by half a scale at most
    (and float32's rounding), zeros are exact, and no other row matters. A row that holds NaN or
    infinities becomes NaN.
    """
    # Contiguous, whatever the layout of `numbers` is.
    numbers = numbers.detach().to(torch.float32, memory_format=torch.contiguous_format)
    scale = numbers.abs().amax(-1).div_(_LARGEST).clamp_(min=_LEAST_SCALE)
    steps = (numbers / scale[..., None]).round_().nan_to_num_(0.0, 0.0, 0.0)
    scale = scale.masked_fill_(scale == torch.inf, torch.nan)
    return steps.to(torch.int8), scale


class QuantizedKVCache:
    """Keys and values of all tokens so far as int8, with a float32 scale for each token and head.

    A number is off by half its scale at most: 1/254 of the largest in its token and head. What a
    token was stored as never changes. It grows and forks as KVCache does, and takes
    `(1 + 4 / D) / 4` of the bytes of float32 keys of width D. Gradients are refused.

    The native kernel reads int8 where a call has few queries. In torch.compile it behaves as
    KVCache does.
    """

    def __init__(self) -> None:
        self._tokens = Growing()
        self._shape: Shape | None = None

    @property
    def length(self) -> int:
        """How many tokens are held."""
        return self._tokens.length

    @property
    def nbytes(self) -> int:
        """The bytes of memory that are taken, scales included."""
        return self._tokens.nbytes

    @property
    def filled_nbytes(self) -> int:
        """The part of `nbytes` that tokens fill, scales included."""
        return self._tokens.filled_nbytes

    def positions(self, length: int) -> Tensor:
        """Where the next `length` tokens stand: int64 [L]."""
        device = None if self._shape is None else self._shape.device
        return torch.arange(self.length, self.length + length, device=device)

    def update(self, key: Tensor, value: Tensor) -> KeyValues:
        """Append `key` [B, Hkv, L, D] and `value` [B, Hkv, L, Dv]; returns all tokens so far.

        Raises ArgumentError, DtypeError or DeviceError for tensors that do not fit what is held.
        """
        refuse_gradients("QuantizedKVCache", key, value)
        if self._shape is None:
            self._shape = first_shape(key, value)
        count = self._shape.accepts(key, value)
        keys, key_scale, values, value_scale = self._tokens.append(
            (*quantize(key), *quantize(value)), count
        )
        return held(key=keys, value=values, key_scale=key_scale, value_scale=value_scale)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; a negative number removes as many from the end."""
        self._tokens.crop(length)

    def reset(self) -> None:
        """Forget everything."""
        self._tokens.clear()
        self._shape = None

    def fork(self) -> Self:
        """A second cache with the same tokens, which shares their memory.

        The first to go on writes behind them; the other then copies them.
        """
        made = twin(self)
        made._tokens = self._tokens.fork()
        return made

    __copy__ = fork

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Make row i of the batch what row `rows[i]` was. Raises ArgumentError if empty."""
        self._shape = reordered(self._tokens, self._shape, rows)
