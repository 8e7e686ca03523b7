"""Exact attention by torch operations over blocks of query rows: O(N) memory, any device.

Each block sees all of its visible keys at once, so its softmax needs no running state. The
backward recomputes each block instead of keeping its weights, as FlashAttention does (Dao et
al. 2022, algorithm 4).

Shape suffixes: b batch, h head, q query row, k key column, d width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..problem import Problem
from ..scores import Rectangle, bias_rectangle, distances, grouped_matmul, rectangle, row_blocks

NAME = "chunked"


def reasons(problem: Problem) -> list[str]:
    """Nothing keeps it from serving."""
    return []


def forward(problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
    """Output [B, H, Lq, Dv] and the wanted statistics [B, H, Lq], block by block."""
    query = problem.query
    shape_bhq = query.shape[:3]
    out = query.new_zeros((*shape_bhq, problem.value_dim))
    stats = {
        name: query.new_empty(
            shape_bhq, dtype=torch.int64 if name == "argmax" else problem.compute_dtype
        )
        for name in problem.stats
    }
    value = problem.value.to(problem.compute_dtype)
    values_finite = bool(value.isfinite().all())
    for rows, columns in row_blocks(problem):
        block = _softmax(problem, rectangle(problem, rows, columns))
        visible = None if values_finite else block.rectangle.visible
        weights, _ = _dropped(problem, block)
        out[:, :, rows] = _weigh(weights, value[:, :, columns], visible).to(out.dtype)
        for name, statistic in _statistics(problem, block).items():
            stats[name][:, :, rows] = statistic
    return out, stats


@dataclass(frozen=True, eq=False)
class _Softmax:
    """One block's softmax: weights [B, H, q, k] and the row quantities [B, H, q] behind them."""

    rectangle: Rectangle
    weights: Tensor
    shifted: Tensor  # logit - keys_peak; 0 where hidden
    mass: Tensor  # e^shifted; 0 where hidden
    keys_peak: Tensor  # the largest logit of a row's keys; -inf without any
    keys_total: Tensor  # sum of mass
    peak: Tensor  # the largest logit, a sink included
    total: Tensor  # sum of e^(logit - peak), a sink included; 1 for an empty row
    mean: Tensor  # mean of logit - peak under the softmax

    @property
    def lse(self) -> Tensor:
        return self.peak + self.total.log()

    @property
    def entropy(self) -> Tensor:
        return self.total.log() - self.mean

    @property
    def keys_below_peak(self) -> Tensor:
        """keys_peak - peak, 0 for a row without keys."""
        return (self.keys_peak - self.peak).masked_fill(self.keys_peak == -torch.inf, 0)


def _softmax(problem: Problem, block: Rectangle) -> _Softmax:
    logits = block.logits
    shape_bhq = logits.shape[:3]
    keys_peak = logits.amax(-1) if logits.shape[-1] else logits.new_full(shape_bhq, -torch.inf)
    nothing = keys_peak == -torch.inf
    shifted = block.hide(logits - keys_peak.masked_fill(nothing, 0)[..., None])
    mass = block.hide(shifted.exp())
    keys_total = mass.sum(-1)

    # The sink joins at the row's end, in the maximum and in the sum.
    moment = (mass * shifted).masked_fill(mass == 0, 0).sum(-1)
    peak, total, rescale = keys_peak, keys_total, torch.ones_like(keys_total)
    if problem.sinks is not None:
        sinks = problem.sinks.to(problem.compute_dtype)[:, None]
        peak = torch.maximum(keys_peak, sinks)
        raised = (keys_peak - peak).masked_fill(nothing, 0)
        below = (sinks - peak).masked_fill(peak == -torch.inf, 0)
        rescale = raised.exp().masked_fill(nothing, 0)
        sink_mass = below.exp().masked_fill(sinks == -torch.inf, 0)
        total = rescale * keys_total + sink_mass
        moment = rescale * moment + (rescale * raised).masked_fill(rescale == 0, 0) * keys_total
        moment = moment + (sink_mass * below).masked_fill(sink_mass == 0, 0)
    empty = peak == -torch.inf
    total = total.masked_fill(empty, 1)
    return _Softmax(
        rectangle=block,
        weights=mass * (rescale / total)[..., None],
        shifted=shifted,
        mass=mass,
        keys_peak=keys_peak,
        keys_total=keys_total,
        peak=peak,
        total=total,
        mean=moment / total,
    )


def _dropped(problem: Problem, block: _Softmax) -> tuple[Tensor, Tensor | None]:
    """The weights after dropout, and the factor of each; the weights as they are without it."""
    if problem.dropout is None:
        return block.weights, None
    rows, columns = block.rectangle.rows, block.rectangle.columns
    shape = problem.batch, problem.heads
    factor = problem.dropout.factor(*shape, rows, columns, block.weights.dtype)
    return block.weights * factor, factor


def _statistics(problem: Problem, block: _Softmax) -> dict[str, Tensor]:
    """The wanted statistics of one block of rows, each [B, H, q]."""
    nothing = block.keys_peak == -torch.inf
    keys_divisor = block.keys_total.masked_fill(nothing, 1)
    rows, columns = block.rectangle.rows, block.rectangle.columns
    stats: dict[str, Tensor] = {}
    if "lse" in problem.stats:
        stats["lse"] = block.lse
    if "entropy" in problem.stats:
        stats["entropy"] = block.entropy
    if "max_logit" in problem.stats:
        stats["max_logit"] = block.keys_peak
    if "max_qk" in problem.stats:
        qk, visible = block.rectangle.qk, block.rectangle.visible
        if visible is not None:
            qk = qk.masked_fill(~visible, -torch.inf)
        stats["max_qk"] = qk.amax(-1) if qk.shape[-1] else block.keys_peak
    if "max_weight" in problem.stats:
        weight = block.keys_below_peak.exp() / block.total
        stats["max_weight"] = weight.masked_fill(nothing, 0)
    if "argmax" in problem.stats:
        stats["argmax"] = _argmax(block)
    if "mean_distance" in problem.stats:
        distance = distances(problem, rows, columns).to(block.mass.dtype)
        stats["mean_distance"] = (block.mass * distance).sum(-1) / keys_divisor
    if "sink_mass" in problem.stats:
        first = problem.parts.first
        column_k = torch.arange(columns.start, columns.stop, device=block.mass.device)
        first_b = first.view(-1, 1, 1, 1) if isinstance(first, Tensor) else first
        stats["sink_mass"] = (block.mass * (column_k == first_b)).sum(-1) / keys_divisor
    if "participation" in problem.stats:
        squares = (block.mass * block.mass).sum(-1).masked_fill(nothing, 1)
        stats["participation"] = block.keys_total * block.keys_total / squares
    undefined = block.total.isnan()
    return {
        name: statistic.masked_fill(undefined, -1 if name == "argmax" else torch.nan)
        for name, statistic in stats.items()
    }


def _argmax(block: _Softmax) -> Tensor:
    """Column of the largest logit, the lowest one on ties; -1 for an empty or a NaN row."""
    if not block.mass.shape[-1]:
        return torch.full_like(block.keys_peak, -1, dtype=torch.int64)
    at_peak = block.shifted == 0
    if block.rectangle.visible is not None:
        at_peak = at_peak & block.rectangle.visible
    column: Tensor = at_peak.to(torch.uint8).argmax(-1) + block.rectangle.columns.start
    return column.masked_fill(block.keys_peak == -torch.inf, -1)


def _weigh(weights: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    """`weights @ value` for grouped heads; with `visible`, hidden NaN or infinity stays out.

    `visible` is None where the values are known to be finite, or nothing is hidden.
    """
    finite = None if visible is None else value.isfinite()
    if visible is None or finite is None or bool(finite.all()):
        return grouped_matmul(weights, value)
    total: Tensor = grouped_matmul(weights, value.masked_fill(~finite, 0))
    group = weights.shape[1] // value.shape[1]
    for k in (~finite.all(-1)).any(0).any(0).nonzero()[:, 0].tolist():
        wild = value[:, :, k].masked_fill(finite[:, :, k], 0).repeat_interleave(group, dim=1)
        terms = weights[..., k, None] * wild[:, :, None, :]
        seen = visible if visible.shape[-1] == 1 else visible[..., k, None]
        total = total + terms.masked_fill(~seen, 0)
    return total


@dataclass(frozen=True, eq=False)
class Cotangents:
    """Gradients of the loss with respect to what a call returned; None where there is none."""

    out: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None
    max_logit: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients with respect to a call's inputs, each in its input's shape."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None

    @classmethod
    def zeros(cls, problem: Problem) -> Gradients:
        """Zeros in the compute dtype, to be filled block by block."""

        def zeros_like(tensor: Tensor) -> Tensor:
            return torch.zeros(tensor.shape, dtype=problem.compute_dtype, device=tensor.device)

        query, key, value, *others = problem.differentiated
        assert query is not None
        assert key is not None
        assert value is not None
        optional = (None if tensor is None else zeros_like(tensor) for tensor in others)
        return cls(zeros_like(query), zeros_like(key), zeros_like(value), *optional)

    def add_bias(self, problem: Problem, grad_logits: Tensor, rows: slice, columns: slice) -> None:
        if self.slopes is not None:
            distance = distances(problem, rows, columns).to(grad_logits.dtype)
            self.slopes.sub_((grad_logits * distance).sum((0, 2, 3)))
        if self.bias is not None:
            target = bias_rectangle(self.bias, rows, columns)
            target += grad_logits.sum_to_size(target.shape)

    def in_order(self, problem: Problem) -> tuple[Tensor | None, ...]:
        """As `problem.differentiated` lists the inputs, each in its input's dtype."""
        grads = (self.query, self.key, self.value, self.bias, self.slopes, self.sinks)
        return tuple(
            None if grad is None or tensor is None else grad.to(tensor.dtype)
            for grad, tensor in zip(grads, problem.differentiated, strict=True)
        )


def backward(problem: Problem, given: Cotangents) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value, bias (summed to its own shape), slopes and sinks, or None.

    With y = s - lse, weights P = e^y, M the factors of dropout, dP = M (dO V^T) and delta_i =
    sum_j P_ij dP_ij, the gradient of the logits is

        dS = P (dP - delta + g_lse - g_H (y + H)),  dS[argmax] += g_max

    Every block sees whole rows, so softmax and delta are computed again rather than taken from
    the rounded output. A hidden element of dS is 0, whatever its factors are.
    """
    dtype = problem.compute_dtype
    key, value = problem.key.to(dtype), problem.value.to(dtype)
    grads = Gradients.zeros(problem)
    for rows, columns in row_blocks(problem):
        block = _softmax(problem, rectangle(problem, rows, columns))
        cells = block.rectangle
        grad_out = given.out[:, :, rows].to(dtype)
        grad_weights = grouped_matmul(grad_out, value[:, :, columns].transpose(-1, -2))
        kept, factor = _dropped(problem, block)
        if factor is not None:
            grad_weights = grad_weights * factor
        row_term = -cells.hide(block.weights * grad_weights).sum(-1)
        if given.lse is not None:
            row_term = row_term + given.lse[:, :, rows]
        slope = None if given.entropy is None else given.entropy[:, :, rows]
        if slope is not None:
            # y + H is the logit less its mean; so written, large logits do not cancel.
            centered = block.shifted + (block.keys_below_peak - block.mean)[..., None]
            centered = centered.masked_fill(block.weights == 0, 0)
            grad_weights = grad_weights - slope[..., None] * centered
        grad_logits = cells.hide(block.weights * (grad_weights + row_term[..., None]))
        if given.max_logit is not None and grad_logits.shape[-1]:
            column = _argmax(block)[..., None] - columns.start
            grad_max = given.max_logit[:, :, rows, None].to(dtype).masked_fill(column < 0, 0)
            grad_logits = grad_logits.scatter_add(-1, column.clamp(min=0), grad_max)
        if grads.sinks is not None:
            grads.sinks.add_(_sink_gradient(problem, block, row_term, slope))
        grads.add_bias(problem, grad_logits, rows, columns)
        if problem.softcap is not None:
            grad_logits = grad_logits * (1 - (cells.capped / problem.softcap).square())
        grad_qk = cells.hide(grad_logits * problem.scale)
        visible = cells.visible
        turned = None if visible is None else visible.transpose(-1, -2)
        query = problem.query[:, :, rows].to(dtype)
        grads.query[:, :, rows] += _weigh(grad_qk, key[:, :, columns], visible)
        grads.key[:, :, columns] += _group_sum(_weigh(grad_qk.mT, query, turned), problem)
        grads.value[:, :, columns] += _group_sum(_weigh(kept.mT, grad_out, turned), problem)
    return grads.in_order(problem)


def _sink_gradient(
    problem: Problem, block: _Softmax, row_term: Tensor, slope: Tensor | None
) -> Tensor:
    """Gradient [H] of the sinks: an outcome like a key's, with a value of zero."""
    assert problem.sinks is not None
    below = problem.sinks.to(problem.compute_dtype)[:, None] - block.peak
    weight = below.exp() / block.total
    grad = row_term if slope is None else row_term - slope * (below - block.mean)
    return (weight * grad).masked_fill((weight == 0) | (block.peak == -torch.inf), 0).sum((0, 2))


def _group_sum(grad_bhkd: Tensor, problem: Problem) -> Tensor:
    """Sum over the query heads that share a KV head: [B, H, k, d] to [B, Hkv, k, d]."""
    if problem.group == 1:
        return grad_bhkd
    batch, _, keys, width = grad_bhkd.shape
    return grad_bhkd.view(batch, problem.kv_heads, problem.group, keys, width).sum(2)
