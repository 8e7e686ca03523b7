"""What processors can do at most, with the source of every figure."""

from __future__ import annotations

from dataclasses import dataclass

from multihead.cost.attention import dtype_bytes
from multihead.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Device:
    """The limits of a processor.

    Attributes:
        name: what tables call it.
        flops: floating-point operations a second, two for each multiply-add, of dense matrices.
        bandwidth: bytes a second between memory and processor.
        memory: bytes; None where nobody says.
        dtypes: the dtypes that `flops` holds for; empty for whatever the caller measured.
        source: where the figures are from.

    Raises:
        ArgumentError: a limit that is not above 0.
    """

    name: str
    flops: float
    bandwidth: float
    memory: int | None = None
    dtypes: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ArgumentError(f"{name} of a device must be above 0 and finite; got {value}.")

    @property
    def ridge(self) -> float:
        """Operations a byte above which products bound the time, and below which memory does."""
        return self.flops / self.bandwidth

    def check_dtype(self, dtype: object) -> None:
        """Raise ArgumentError where the peak is not one of `dtype`."""
        dtype_bytes(dtype)
        name = str(dtype).removeprefix("torch.")
        if self.dtypes and name not in self.dtypes:
            raise ArgumentError(
                f"the peak of {self.name} is known here for {' and '.join(self.dtypes)}, not for "
                f"{name}; give the operations a second yourself (--peak-tflops)."
            )


_HALF = ("bfloat16", "float16")
_TERA, _GIGA = 10**12, 10**9


def _preset(name: str, tflops: float, bandwidth: int, memory: int, source: str) -> Device:
    """A GPU by what its maker states: dense TFLOP/s, GB/s and GB, all decimal."""
    return Device(name, tflops * _TERA, float(bandwidth * _GIGA), memory * _GIGA, _HALF, source)


_SPARSE = "half of what it states for sparse matrices"

DEVICES: dict[str, Device] = {
    "a100": _preset("A100 80GB SXM", 312, 2039, 80, "NVIDIA A100 datasheet"),
    "h100": _preset("H100 SXM", 989.5, 3350, 80, f"NVIDIA H100 datasheet; {_SPARSE}"),
    "h200": _preset("H200 SXM", 989.5, 4800, 141, f"NVIDIA H200 datasheet; {_SPARSE}"),
    "l4": _preset("L4", 121, 300, 24, f"NVIDIA L4 datasheet; {_SPARSE}"),
    "rtx4090": _preset(
        "RTX 4090",
        165.2,
        1008,
        24,
        "NVIDIA Ada GPU architecture whitepaper; sums kept in float32",
    ),
    "mi300x": _preset("MI300X", 1307.4, 5300, 192, "AMD Instinct MI300X data sheet"),
}
"""Presets by name."""


def device(name: str) -> Device:
    """A preset by name. Raises ArgumentError for one that there is not."""
    key = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    if key not in DEVICES:
        raise ArgumentError(
            f"there is no preset {name!r}; there are {', '.join(DEVICES)}. Any other device is "
            "told by its peak and its bandwidth (--peak-tflops, --bandwidth)."
        )
    return DEVICES[key]
