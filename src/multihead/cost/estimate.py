"""How long a pass takes at the limits of a device: a roofline, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multihead.cost.device import Device
from multihead.cost.model import Model
from multihead.cost.operations import Pass, forward
from multihead.cost.traffic import Widths, traffic

_PARTS = ("embeddings", "projections", "attention", "feed_forward", "head")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a pass: its operations and bytes, and how long a device needs for them."""

    name: str
    flops: int
    bytes: int
    seconds: float | None
    bound: str | None

    @property
    def intensity(self) -> float:
        """Operations a byte; 0 where nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A pass by part. Times are None where no device was given.

    `seconds` is the sum over the parts of the longer of flops / peak and bytes / bandwidth: a lower
    bound, which kernels come near to and never below. Exponentials, h of them for each pair of
    tokens, are in no peak and not timed: of very narrow heads they take longer than the products.
    """

    parts: tuple[Part, ...]

    @property
    def flops(self) -> int:
        """Operations of all parts."""
        return sum(part.flops for part in self.parts)

    @property
    def bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def intensity(self) -> float:
        """Operations a byte of the whole pass."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def seconds(self) -> float | None:
        """The sum of the parts' times."""
        times = [part.seconds for part in self.parts if part.seconds is not None]
        return sum(times) if len(times) == len(self.parts) else None

    def as_dict(self) -> dict[str, Any]:
        """The parts by name, and the whole."""
        return {
            "parts": {
                part.name: {
                    "flops": part.flops,
                    "bytes": part.bytes,
                    "intensity": part.intensity,
                    "seconds": part.seconds,
                    "bound": part.bound,
                }
                for part in self.parts
            },
            "flops": self.flops,
            "bytes": self.bytes,
            "intensity": self.intensity,
            "seconds": self.seconds,
        }


def estimate(
    model: Model,
    step: Pass,
    *,
    dtype: object = "bfloat16",
    cache_dtype: object = None,
    device: Device | None = None,
) -> Estimate:
    """Operations, bytes and, at a device's limits, times of a forward pass.

    Operations are those over visible pairs. An int8 cache (`cache_dtype`) is read as int8, its
    scales left out.

    Raises ArgumentError for an unknown dtype, or one that the device's peak does not hold for.
    """
    if device is not None:
        device.check_dtype(dtype)
    counted = forward(model, step)
    moved = traffic(model, step, Widths.of(dtype, cache=cache_dtype))
    products = {
        "embeddings": 0,
        "projections": counted.projections,
        "attention": counted.attention,
        "feed_forward": counted.feed_forward + counted.router,
        "head": counted.head + counted.other,
    }
    bytes_of = moved.as_dict()
    return Estimate(
        tuple(_part(name, 2 * products[name], bytes_of[name], device) for name in _PARTS)
    )


def _part(name: str, flops: int, moved: int, device: Device | None) -> Part:
    if device is None:
        return Part(name, flops, moved, None, None)
    compute, memory = flops / device.flops, moved / device.bandwidth
    return Part(name, flops, moved, max(compute, memory), _bound(compute, memory))


def _bound(compute: float, memory: float) -> str | None:
    if not compute and not memory:
        return None
    return "compute" if compute >= memory else "memory"
