"""The definition: dense, one page, any dtype and device, O(Lq Lk) memory.

Every other backend is held against this one in float64. It is plain differentiable torch, so
second derivatives, forward mode and vmap go through it; else it is used only by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem import ALiBi, Problem

NAME = "reference"


def reasons(problem: Problem) -> list[str]:
    """Nothing keeps it from serving."""
    return []


def forward(problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
    """softmax(mask(bias(softcap(scale Q K^T)))) V, and the statistics of each row.

    Vaswani et al. 2017, equation 1. Returns out [B, H, Lq, Dv] in query's dtype and the
    statistics [B, H, Lq] in the compute dtype (argmax int64).
    """
    dtype, group = problem.compute_dtype, problem.group
    query = problem.query.to(dtype)
    key = problem.key.to(dtype).repeat_interleave(group, dim=1)
    value = problem.value.to(dtype).repeat_interleave(group, dim=1)

    qk = problem.scale * (query @ key.transpose(-1, -2))
    scores = qk if problem.softcap is None else problem.softcap * torch.tanh(qk / problem.softcap)
    rows, columns = slice(0, problem.query_length), slice(0, problem.key_length)
    visible = problem.parts.visible(rows, columns).expand(scores.shape)
    position_q = problem.parts.query_position(rows)[..., None]
    distance = (position_q - problem.parts.key_position(columns)).abs().to(dtype)
    if isinstance(problem.bias, ALiBi):
        scores = scores - problem.bias.slopes.to(dtype)[:, None, None] * distance
    elif problem.bias is not None:
        visible = visible & (problem.bias != -torch.inf)
        scores = scores + problem.bias.to(dtype)
    scores = scores.masked_fill(~visible, -torch.inf)

    # The sink is one more column, without a value. Without sinks it is hidden, which also gives
    # a row without keys a column to take its maximum over.
    sink = scores.new_full((problem.heads,), -torch.inf)
    if problem.sinks is not None:
        sink = problem.sinks.to(dtype)
    sink_column = sink[:, None, None].expand(*scores.shape[:-1], 1)
    outcomes = torch.cat((scores, sink_column), dim=-1)
    peak = outcomes.amax(-1, keepdim=True).detach()
    peak = peak.masked_fill(peak == -torch.inf, 0)
    possible = outcomes != -torch.inf
    shifted = (outcomes - peak).masked_fill(~possible, 0)
    exponentials = shifted.exp().masked_fill(~possible, 0)
    total = exponentials.sum(-1)
    empty = ~possible.any(-1)
    divisor = total.masked_fill(empty, 1)

    weights = exponentials[..., :-1] / divisor[..., None]
    kept = weights
    if problem.dropout is not None:
        kept = weights * problem.dropout.factor(problem.batch, problem.heads, rows, columns, dtype)
    out = _matmul_visible(kept, value, visible)
    possible_shifted = shifted.masked_fill(exponentials == 0, 0)
    stats = {
        "lse": (peak[..., 0] + divisor.log()).masked_fill(empty, -torch.inf),
        "entropy": divisor.log() - (exponentials * possible_shifted).sum(-1) / divisor,
        "max_weight": weights.detach().amax(-1) if problem.key_length else torch.zeros_like(total),
    }
    stats |= _key_statistics(problem, qk, scores, visible, distance)
    undefined = total.isnan()
    return out.to(problem.query.dtype), {
        name: stats[name].masked_fill(undefined, -1 if name == "argmax" else torch.nan)
        for name in problem.stats
    }


def _key_statistics(
    problem: Problem, qk: Tensor, scores: Tensor, visible: Tensor, distance: Tensor
) -> dict[str, Tensor]:
    """Statistics over the keys alone, a sink left out."""
    hidden_column = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    scores = torch.cat((scores, hidden_column), dim=-1)
    largest = scores.detach().amax(-1)
    argmax = (scores == largest[..., None]).to(torch.uint8).argmax(-1)
    nothing = largest == -torch.inf
    # By index, so that of several equal maxima the first alone receives the gradient.
    max_logit = scores.gather(-1, argmax[..., None])[..., 0]

    with torch.no_grad():
        peak = largest.masked_fill(nothing, 0)[..., None]
        mass = (scores[..., :-1] - peak).exp().masked_fill(~visible, 0)
        total = mass.sum(-1)
        divisor = total.masked_fill(nothing, 1)
        first = problem.parts.first
        first_column = torch.as_tensor(first, device=scores.device).long().reshape(-1, 1, 1, 1)
        column_k = torch.arange(problem.key_length, device=scores.device)
        squares = (mass * mass).sum(-1)
        qk = torch.cat((qk.masked_fill(~visible, -torch.inf), hidden_column), dim=-1)
        return {
            "max_logit": max_logit,
            "max_qk": qk.amax(-1),
            "argmax": argmax.masked_fill(nothing, -1),
            "mean_distance": (mass * distance).sum(-1) / divisor,
            "sink_mass": (mass * (column_k == first_column)).sum(-1) / divisor,
            "participation": total * total / squares.masked_fill(nothing, 1),
        }


def _matmul_visible(weights: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """`weights @ value`, where hidden values reach nothing even if they are NaN or infinite."""
    out = weights @ value.masked_fill(~value.isfinite(), 0)
    dtype = weights.dtype
    seen = visible.to(dtype)
    undefined = seen @ value.isnan().to(dtype)
    undefined = undefined + (seen * (weights == 0)) @ value.isinf().to(dtype)
    above, below = (seen @ (value == sign * torch.inf).to(dtype) > 0 for sign in (1, -1))
    out = out.masked_fill(above, torch.inf).masked_fill(below, -torch.inf)
    return out.masked_fill((undefined > 0) | (above & below), torch.nan)
