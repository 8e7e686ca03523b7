"""A norm as the linear map that it is once its scale is known.

A norm divides a row by its size: not linear, since the size depends on the whole row. At the size
that the row really had it is a gain and, in LayerNorm, centering; then what parts of the row become
adds up to what the row becomes. Elhage et al. 2021 read logits of single heads in this way.

Shape suffixes: r row, c width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import ModelError

# How far sums may be off, as a share of a row's size, before the model does something else. Models
# in float64, too, mostly norm in float32.
TOLERANCES = {
    torch.float64: 1e-5,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 3e-2,
}


@dataclass(frozen=True, eq=False)
class LinearNorm:
    """`scale[r] * gain * centered(x[r]) + bias`: a norm at the scale that each row had.

    `gain` and `bias` [C], `scale` [R], `centers` whether the row's mean is taken off.
    """

    gain: Tensor
    bias: Tensor
    scale: Tensor
    centers: bool

    def linear(self, part_rc: Tensor, rows: Tensor) -> Tensor:
        """What a part [..., R, C] of the rows becomes, without the bias."""
        return self.unscaled(part_rc) * self.scale[rows, None]

    def unscaled(self, part: Tensor) -> Tensor:
        """What a part [..., C] becomes at scale 1, without the bias."""
        return self.gain * self._centered(part)

    def backward(self, direction_c: Tensor) -> Tensor:
        """The direction [..., C] before the norm that is `direction_c` behind it, at scale 1."""
        return self._centered(self.gain * direction_c)

    def _centered(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.centers else x


def linear_norm(norm: nn.Module, x_rc: Tensor, normed_rc: Tensor, dtype: torch.dtype) -> LinearNorm:
    """The linear map of `norm` at the rows `x_rc`, of which it made `normed_rc`.

    Gain, bias and centering are read from what the module does to three made-up rows, so that it
    does not matter how it stores them.

    Raises:
        ModelError: the module does something else than norming by gain, bias and centering.
    """
    width = x_rc.shape[-1]
    sign_c = torch.ones(width, dtype=x_rc.dtype, device=x_rc.device)
    sign_c[::2] = -1
    zeros_c, ones_c = torch.zeros_like(sign_c), torch.ones_like(sign_c)
    # Without the module's hooks, which expect the model's own rows.
    made_up = norm.forward(torch.stack([zeros_c, ones_c, sign_c])[None])[0].to(dtype)
    bias_c, of_ones_c, of_signs_c = made_up.detach()
    centers = bool((of_ones_c - bias_c).abs().max() <= 1e-3 * (of_signs_c - bias_c).abs().max())
    seen_c = sign_c.to(dtype) - (sign_c.to(dtype).mean() if centers else 0.0)
    gain_c = (of_signs_c - bias_c) / seen_c
    whole = LinearNorm(gain_c, bias_c, torch.ones_like(gain_c[:1]), centers)
    unscaled_rc = whole.unscaled(x_rc.to(dtype))
    wanted_rc = normed_rc.to(dtype) - bias_c
    size_r = unscaled_rc.square().sum(-1)
    scale_r = (wanted_rc * unscaled_rc).sum(-1) / size_r.clamp(min=torch.finfo(dtype).tiny)
    error = relative_error(unscaled_rc * scale_r[:, None], wanted_rc)
    if not error <= TOLERANCES[x_rc.dtype]:
        raise ModelError(
            f"{type(norm).__name__} is no norm by gain, bias and centering: at its own scale a row "
            f"differs from the linear map by {error:.1e} of its size."
        )
    return LinearNorm(gain_c, bias_c, scale_r, centers)


def relative_error(found_rc: Tensor, expected_rc: Tensor) -> float:
    """The largest difference of a row as a share of the row's size; 0 where there are no rows."""
    difference_r = torch.linalg.vector_norm((found_rc - expected_rc).float(), dim=-1)
    size_r = torch.linalg.vector_norm(expected_rc.float(), dim=-1)
    tiny = torch.finfo(torch.float32).tiny
    share_r = (difference_r / size_r.clamp(min=tiny)).detach()
    return float(share_r.amax()) if len(size_r) else 0.0
