"""What the arithmetic units of this machine can do at most, measured in the same run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from multihead.ops.backends import native


@dataclass(frozen=True)
class Limits:
    """Peaks in GF/s on the threads of the run; None where the processor lacks the instruction."""

    fma: float
    dpbf16: float | None

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
        return cls(fma, best("dpbf16"))

    def of(self, dtype: torch.dtype) -> tuple[str, float]:
        """The limit on products in `dtype`, by name and in GF/s.

        bfloat16 may also be widened and multiplied in float32, which some processors do faster.
        """
        if dtype == torch.bfloat16 and self.dpbf16 is not None and self.dpbf16 > self.fma:
            return "dpbf16", self.dpbf16
        return "FMA", self.fma

    def to_json(self) -> dict[str, float | None]:
        """GF/s by the limit's name."""
        return {"FMA": self.fma, "dpbf16": self.dpbf16}
