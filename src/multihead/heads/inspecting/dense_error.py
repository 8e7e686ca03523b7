"""How far attention is from the dense computation in float64, on sampled rows.

Shape suffixes: b batch, h head, g KV head, m sampled row, k key column, d width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...ops.cells import visible_at
from ...ops.problem import Problem
from ...ops.scores import grouped_matmul
from ...ops.weights import rectangle_at


@dataclass(frozen=True)
class DenseError:
    """The largest distance from the dense output in float64: ours, and torch's own on these rows.

    `baseline` is None where torch's scaled_dot_product_attention lacks a feature of the call.
    """

    ours: float
    baseline: float | None
    rows: int


def dense_error(problem: Problem, out: Tensor, rows: Tensor) -> DenseError:
    """Compare `out` [B, H, Lq, Dv] with softmax(QK)V of the rows `rows` in float64, all heads."""
    exact = _dense(problem, rows)
    ours = float((out[:, :, rows].double() - exact).abs().max())
    torch_out = _torch(problem, rows)
    baseline = None if torch_out is None else float((torch_out.double() - exact).abs().max())
    return DenseError(ours, baseline, len(rows))


def _dense(problem: Problem, rows: Tensor) -> Tensor:
    bias = problem.bias
    exact = replace(
        problem,
        query=problem.query.detach().double(),
        key=problem.key.detach().double(),
        bias=bias.detach().double() if isinstance(bias, Tensor) else bias,
    )
    everything = torch.arange(problem.key_length, device=rows.device)
    logits_bhmk = rectangle_at(exact, rows, everything).logits
    if problem.sinks is not None:
        sinks_h11 = problem.sinks.detach().double()[:, None, None]
        sinks_bhm1 = sinks_h11.expand(*logits_bhmk.shape[:3], 1)
        weights = torch.softmax(torch.cat([logits_bhmk, sinks_bhm1], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(logits_bhmk, -1)
    return grouped_matmul(weights, problem.value.detach().double())


def _torch(problem: Problem, rows: Tensor) -> Tensor | None:
    if problem.softcap is not None or problem.sinks is not None or problem.bias is not None:
        return None
    everything = torch.arange(problem.key_length, device=rows.device)
    return torch.nn.functional.scaled_dot_product_attention(
        problem.query.detach()[:, :, rows],
        problem.key.detach(),
        problem.value.detach(),
        attn_mask=visible_at(problem.parts, rows, everything[None, None]),
        scale=problem.scale,
        enable_gqa=problem.group > 1,
    )
