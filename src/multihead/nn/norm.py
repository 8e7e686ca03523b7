"""Norms inside of layers, given as what builds them for a width."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import DtypeError
from .inference import differentiates, watched

NormFactory = Callable[[int], nn.Module]
"""What makes a norm over the last axis of a width: `torch.nn.RMSNorm`, or a `functools.partial` of
it that sets `eps`."""


def build_norm(argument: str, factory: NormFactory, width: int) -> nn.Module:
    """`factory(width)`; raises DtypeError, which names the argument, for what builds no module."""
    norm: object = factory
    if callable(factory) and not isinstance(factory, nn.Module):
        try:
            norm = factory(width)
        except TypeError:  # it takes something else than one width
            norm = factory
    if norm is factory or not isinstance(norm, nn.Module):
        raise DtypeError(
            f"{argument} must build a norm when called with a width; got {factory!r}. Write "
            f"{argument}=torch.nn.RMSNorm, or functools.partial(torch.nn.RMSNorm, eps=1e-6)."
        )
    return norm


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, with fewer passes over memory for bfloat16 and float16 at inference.

    Like torch's it computes in float32 and rounds once.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Numbers [..., width] over their root mean square, times the weight; x's dtype."""
        if watched() or not self._widens(x):
            return super().forward(x)
        wide = x.float()
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        wide *= size.square_().div_(x.shape[-1]).add_(self.eps).rsqrt_()
        if self.weight is not None:
            wide *= self.weight
        return wide.to(x.dtype)

    def _widens(self, x: Tensor) -> bool:
        weight: Tensor | None = self.weight
        return (
            type(x) is Tensor
            and x.dtype in (torch.bfloat16, torch.float16)
            and x.is_cpu
            and len(self.normalized_shape) == 1
            and x.shape[-1:] == self.normalized_shape
            and (weight is None or (weight.dtype == x.dtype and weight.is_cpu))
            and self.eps is not None
            and not differentiates(x, weight)
        )
