"""What the arithmetic units and the memory of this machine can do at most, in the same run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from multihead.ops.backends import native

# What the products of a set are made of, where that is not the FMA in float32.
_INSTRUCTIONS = {"avx512_bf16": "dpbf16", "avx512_amx": "AMX"}

_GIB = 2**30

# Buffers together stay below this, also where four times the last-level cache is more.
MOST_BUFFER_BYTES = 6 * _GIB


@dataclass(frozen=True)
class Limits:
    """Peaks in GF/s on the threads of the run; None where the processor lacks the instruction."""

    fma: float
    dpbf16: float | None
    amx: float | None

    @classmethod
    def measure(cls, threads: int) -> Limits:
        """Run chains of independent instructions on `threads` threads; the best of three tries.

        Raises:
            BackendError: the native extension is not built.
        """

        def best(kind: str) -> float | None:
            peaks = [native.peak(kind, threads) for _ in range(3)]
            return max((peak for peak in peaks if peak is not None), default=None)

        fma = best("fma")
        assert fma is not None
        return cls(fma, best("dpbf16"), best("amx"))

    def of(self, dtype: torch.dtype) -> tuple[str, float]:
        """The limit of the instruction that serves `dtype` now, by name and in GF/s.

        bfloat16 is widened and multiplied in float32 where no set for it is the fastest.
        """
        name = _INSTRUCTIONS.get(native.instruction_set(dtype) or "", "FMA")
        peak = self.to_json()[name]
        assert peak is not None
        return name, peak

    def to_json(self) -> dict[str, float | None]:
        """GF/s by the limit's name."""
        return {"FMA": self.fma, "dpbf16": self.dpbf16, "AMX": self.amx}


def last_level_cache_bytes() -> int | None:
    """Size of the largest cache of the first processor; None where the system does not tell."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:])
        if unit is not None and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes, default=None)


def cold_bytes() -> int:
    """What to read in turn so that none of it is still in a cache: four times the largest one.

    Capped at `MOST_BUFFER_BYTES`, and the cap where the size of the cache is not known.
    """
    cache = last_level_cache_bytes()
    return MOST_BUFFER_BYTES if cache is None else min(4 * cache, MOST_BUFFER_BYTES)


def read_bandwidth(size: int | None = None) -> float:
    """GB/s of reading memory from end to end on torch's threads; the best of six tries.

    Each try reads a buffer of `size` bytes, or of what is cold, but 1 GiB at least and 2 GiB at
    most, by a product with a vector and by a sum: both do too little with a number to be bound by
    anything else.
    """
    size = max(_GIB, min(cold_bytes(), 2 * _GIB)) if size is None else size
    columns = 4096
    buffer = torch.ones(max(1, size // (4 * columns)), columns)
    vector = torch.ones(columns)
    best = 0.0

    def multiplied() -> Tensor:
        return buffer @ vector

    for read in (multiplied, partial(torch.sum, buffer)):
        read()
        for _ in range(3):
            start = time.perf_counter()
            read()
            best = max(best, buffer.nbytes / (time.perf_counter() - start) / 1e9)
    return best
