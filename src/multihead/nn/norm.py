"""Norms inside of layers, given as what builds them for a width."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..errors import DtypeError

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
