"""A cache in int8: a quarter of float32's bytes, one scale for each token and head."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import KeyValues
from ...ops.key_values import held
from .growing import GrowingCache
from .protocol import refuse_gradients

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


class QuantizedKVCache(GrowingCache):
    """Keys and values of all tokens so far as int8, with a float32 scale for each token and head.

    A number is off by half its scale at most: 1/254 of the largest in its token and head. What a
    token was stored as never changes. It grows and forks as KVCache does, and takes
    `(1 + 4 / D) / 4` of the bytes of float32 keys of width D, scales included. Gradients are
    refused.

    The native kernel reads int8 where a call has few queries. In torch.compile it behaves as
    KVCache does.
    """

    def update(self, key: Tensor, value: Tensor) -> KeyValues:
        """Append `key` [B, Hkv, L, D] and `value` [B, Hkv, L, Dv]; returns all tokens so far.

        Raises ArgumentError, DtypeError or DeviceError for tensors that do not fit what is held.
        """
        refuse_gradients("QuantizedKVCache", key, value)
        count = self._accepted(key, value)
        keys, key_scale, values, value_scale = self._tokens.append(
            (*quantize(key), *quantize(value)), count
        )
        return held(key=keys, value=values, key_scale=key_scale, value_scale=value_scale)
