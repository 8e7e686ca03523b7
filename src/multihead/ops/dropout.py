"""Which weights dropout keeps: random bits that depend on the seed and on a weight's place alone.

So a block of the matrix can be drawn where it is needed, again in the backward pass, and in any
order. The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1,
2, 3"), on the counter (column // 4, row, head, batch): its four words serve four columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # of the golden ratio and of sqrt(3) - 1
_ROUNDS = 10


@dataclass(frozen=True, eq=False)
class Dropout:
    """A weight is dropped with probability `p`; what is kept is divided by 1 - p.

    `seed` is int64 [2], two words of 32 bits.
    """

    p: float
    seed: Tensor

    @classmethod
    def drawn(cls, p: float, device: torch.device) -> Dropout:
        """A seed from torch's generator, so that what replays its state replays the dropout."""
        return cls(p, torch.randint(1 << 32, (2,), dtype=torch.int64, device=device))

    def factor(
        self, batch: int, heads: int, rows: slice, columns: slice, dtype: torch.dtype
    ) -> Tensor:
        """0 for dropped weights, 1 / (1 - p) for kept ones: [B, H, rows, columns]."""
        first, last = columns.start // 4, -(-columns.stop // 4)
        device = self.seed.device
        counter = (
            torch.arange(first, last, device=device),
            torch.arange(rows.start, rows.stop, device=device)[:, None],
            torch.arange(heads, device=device)[:, None, None],
            torch.arange(batch, device=device)[:, None, None, None],
        )
        words = torch.stack(philox(counter, (self.seed[0], self.seed[1])), dim=-1).flatten(-2)
        begin = columns.start - 4 * first
        words = words[..., begin : begin + columns.stop - columns.start]
        kept = words >= round(self.p * (_WORD + 1))
        return kept.to(dtype) * (1.0 / (1.0 - self.p) if self.p < 1 else 0.0)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Four random words of each counter, which broadcast; all int64 that hold 32 bits."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product of two words fills all 64 bits, the sign among them: hence the mask.
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (product1 >> 32 & _WORD) ^ c1 ^ k0, (product0 >> 32 & _WORD) ^ c3 ^ k1
        c1, c3 = product1 & _WORD, product0 & _WORD
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3
