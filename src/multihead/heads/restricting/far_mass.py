"""What each head gives to keys beyond a window, exactly and in O(N) memory.

The softmax mass inside a window is exp(lse_window - lse): two sums over the same logits. Shape
suffixes: b batch, h head, q query row.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModelError
from ...ops.problem import Problem
from ...ops.row_statistics import statistics_of
from ..loss import Loss, evaluating
from ..running import observing, running_modules, set_to_multihead

Masses = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class FarMass:
    """The mean share of a query's weight beyond the window, over queries that see further.

    Attributes:
        mass: for each attention module by name float64 [H], in the model's order. A layer with a
            window of its own is left out.
        kv_heads: how many KV heads each of them has.
        queries: how many queries the means are over, of each head.
    """

    mass: Mapping[str, Masses]
    kv_heads: Mapping[str, int]
    queries: int


@torch.no_grad()
def far_mass(
    model: nn.Module, rows: Tensor, loss: Loss, *, window: int, keep_first: int
) -> FarMass:
    """Run `model` over each of the `rows`, int64 [n, length], and measure every head.

    Raises:
        ModelError: a model that cannot be watched, or whose attention is not causal.
    """
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        set_to_multihead(model, stack)
        running = stack.enter_context(running_modules(model))
        calls = _Calls(running, window, keep_first)
        stack.enter_context(observing(calls))
        for row in rows:
            loss(model, row[None])
    order = [name for name, _ in model.named_modules() if name in calls.sums]
    mass = {name: (calls.sums[name] / calls.counts[name]).cpu().numpy() for name in order}
    queries = max(calls.counts.values(), default=0)
    return FarMass(mass, {name: calls.kv_heads[name] for name in order}, queries)


class _Calls:
    """Sits in the observer slot while the model runs."""

    def __init__(self, running: Any, window: int, keep_first: int) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.kv_heads: dict[str, int] = {}
        self._running = running
        self._window = window
        self._keep_first = keep_first

    def wants(self, problem: Problem) -> tuple[str, ...]:
        return () if self._running.innermost is None else ("lse",)

    @torch.no_grad()
    def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
        layer, parts = self._running.innermost, problem.parts
        plain = parts.ranges is None and parts.dense is None and parts.key_positions is None
        causal = isinstance(parts.right, int) and parts.right == 0
        if not (self._running.reads_itself and plain and causal):
            raise ModelError(
                f"{layer} does not read its own text from left to right, so that nothing is far "
                "behind. Heads of causal language models are restricted here."
            )
        if parts.left is not None:
            return  # a window of its own
        near = replace(
            problem, parts=replace(parts, left=self._window - 1, keep_first=self._keep_first)
        )
        inside_bhq = statistics_of(near, ("lse",))["lse"].double()
        far_bhq = 1 - (inside_bhq - stats["lse"].double()).exp()
        first = self._window + self._keep_first  # the first query that sees beyond
        far_h = far_bhq[..., first:].clamp(min=0).sum((0, 2))
        self.sums[layer] = far_h + self.sums.get(layer, 0.0)
        count = problem.batch * max(0, problem.query_length - first)
        self.counts[layer] = self.counts.get(layer, 0) + count
        self.kv_heads[layer] = problem.kv_heads
