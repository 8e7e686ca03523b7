"""Whether what was timed is also right: sampled rows against the formula in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multihead.errors import BackendError
from multihead.masks import Mask
from multihead.ops import ALiBi

SAMPLED_ROWS = 16

# A peer may be less exact than plain torch; one that computes something else is off by far more.
_PEERS_FACTOR = 16.0


@dataclass(frozen=True)
class Expected:
    """What some rows of [B, H, Lq, Dv] must be, in float64.

    `rounding` is one rounding of the dtype at the largest of them, `plain_error` what torch's
    operations on the whole table make of the same rows in the dtype.
    """

    rows: Tensor
    values: Tensor
    rounding: float
    plain_error: float

    def error(self, out: Tensor) -> float:
        """The largest difference."""
        return _largest(out[:, :, self.rows] - self.values)

    def bound(self, baseline_error: float) -> float:
        """What ours may be off: twice torch's error in the same dtype, and one rounding."""
        return 2 * baseline_error + self.rounding

    @property
    def peers_bound(self) -> float:
        """What a peer may be off before it is taken to compute something else."""
        return _PEERS_FACTOR * (self.plain_error + self.rounding)


def expect(query: Tensor, key: Tensor, value: Tensor, **rules: Any) -> Expected:
    """Compute sampled rows of attention's formula in float64.

    Takes attention's mask, bias (of keys alone, or ALiBi), softcap and sinks.
    """
    length = query.shape[2]
    rows = torch.linspace(0, length - 1, min(SAMPLED_ROWS, length)).long()
    values = _formula(query.double(), key.double(), value.double(), rows, **rules)
    plain = _formula(query, key, value, rows, **rules)
    return Expected(rows, values, rounding_of(values, query.dtype), _largest(plain - values))


def rounding_of(values: Tensor, dtype: torch.dtype) -> float:
    """One rounding of the dtype at the largest of the values."""
    return torch.finfo(dtype).eps * _largest(values)


def _largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def _formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    *,
    mask: Mask | None = None,
    bias: Tensor | ALiBi | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    batch, heads, length, width = query.shape
    kv_heads, keys = key.shape[1:3]
    dtype = query.dtype
    grouped = query[:, :, rows].reshape(batch, kv_heads, -1, width)
    scores = (grouped @ key.mT * width**-0.5).reshape(batch, heads, len(rows), keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if isinstance(bias, ALiBi):
        distance = (rows[:, None] + keys - length - torch.arange(keys)).abs()
        scores = scores - (bias.slopes[:, None, None] * distance).to(dtype)
    elif bias is not None:
        scores = scores + bias.to(dtype)
    if mask is not None:
        scores = scores.masked_fill(~mask.to_dense(length, keys)[:, :, rows], -torch.inf)
    if sinks is not None:
        column = sinks.to(dtype)[:, None, None].expand(batch, heads, len(rows), 1)
        scores = torch.cat([scores, column], dim=3)
    weights = torch.softmax(scores, dim=-1)[..., :keys].reshape(batch, kv_heads, -1, keys)
    return (weights @ value).reshape(batch, heads, len(rows), -1)


def differing(out: Tensor, right: Tensor, visible: Tensor | None = None) -> float:
    """How far a model's answer [B, L, ...] is from the right one, over the size of that one.

    `visible` [B, L] tells which tokens count; all do without it.
    """
    difference, right = out.double() - right.double(), right.double()
    if visible is not None:
        difference, right = difference[visible.bool()], right[visible.bool()]
    return float(difference.norm() / right.norm())


def judge_whole(name: str, errors: Mapping[str, float], dtype: torch.dtype, baseline: str) -> None:
    """Raise BackendError where a whole model is off by more than twice what the baseline is.

    One rounding of the dtype is allowed on top. Peers that compute with other numbers than the
    model's (weights of four bits, say) are not judged so.
    """
    for contestant in errors:
        reason = off_by_too_much(contestant, errors, dtype, baseline)
        if reason is not None:
            raise BackendError(f"{name}: {reason}")


def off_by_too_much(
    contestant: str, errors: Mapping[str, float], dtype: torch.dtype, baseline: str
) -> str | None:
    """Why `judge_whole` would not accept a contestant; None where it would."""
    allowed, error = 2 * errors[baseline] + torch.finfo(dtype).eps, errors[contestant]
    if error <= allowed:  # NaN is wrong too
        return None
    return (
        f"the result of {contestant} differs by {error:.2e} of its size; {allowed:.2e} is allowed. "
        "Its time means nothing."
    )
