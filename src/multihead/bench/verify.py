"""Whether what was timed is also right: sampled rows against the formula in float64."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from multihead.masks import Mask

_SAMPLED_ROWS = 16


@dataclass(frozen=True)
class Check:
    """Largest errors on the sampled rows, ours and the peer's, and whether ours is within bound."""

    error: float
    peer_error: float
    bound: float
    passed: bool

    def to_json(self) -> dict[str, float | bool]:
        """Fields by name."""
        return asdict(self)


def check(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, out: Tensor, peer: Tensor
) -> Check:
    """Compare two results for [B, H, L, D] inputs with the dense computation in float64.

    Ours passes if its largest error is at most twice the peer's, give or take one rounding of the
    dtype at the largest expected value.
    """
    length = query.shape[2]
    rows = torch.linspace(0, length - 1, min(_SAMPLED_ROWS, length)).long()
    scores = query[:, :, rows].double() @ key.double().transpose(2, 3) / query.shape[3] ** 0.5
    if mask is not None:
        visible = mask.to_dense(length, key.shape[2])[:, :, rows]
        scores.masked_fill_(~visible, -torch.inf)
    expected = torch.softmax(scores, dim=-1) @ value.double()
    error = _largest(out[:, :, rows] - expected)
    peer_error = _largest(peer[:, :, rows] - expected)
    rounding = torch.finfo(query.dtype).eps * _largest(expected)
    bound = 2 * peer_error + rounding
    return Check(error, peer_error, bound, passed=error <= bound)


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item()
