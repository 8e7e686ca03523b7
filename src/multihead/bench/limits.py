"""What the arithmetic units of this machine can do at most, measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from multihead.ops.backends import native

# What the products of a set are made of, where that is not the FMA in float32.
_INSTRUCTIONS = {"avx512_bf16": "dpbf16", "avx512_amx": "AMX"}


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
