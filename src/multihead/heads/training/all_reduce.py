"""The reports of several processes as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ...errors import ArgumentError
from .diagnosis import StabilityReport

Numbers = np.ndarray[Any, Any]


def all_reduced(report: StabilityReport, group: Any = None) -> StabilityReport:
    """The report of all ranks of a torch.distributed group together, on each of them.

    For ranks that hold the same heads and see different samples: data parallel, also sharded. Each
    rank calls it, in the same step. Maxima are those of all, means those over all queries.

    Raises ArgumentError where no process group was made.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ArgumentError(
            "all_reduced joins the reports of several processes, but torch.distributed has no "
            "process group here. Leave it out in a single process."
        )
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"

    def reduced(values: Numbers, how: Any) -> Numbers:
        tensor = torch.tensor(values, device=device)
        dist.all_reduce(tensor, op=how, group=group)
        numbers: Numbers = tensor.cpu().numpy()
        return numbers

    def largest(values: Numbers) -> Numbers:
        # Which of NaN and a number is the larger one differs between implementations.
        bad = np.isnan(values) & (report.queries > 0)
        whole = reduced(np.where(np.isnan(values), -np.inf, values), dist.ReduceOp.MAX)
        broken = reduced(bad.astype(np.float64), dist.ReduceOp.MAX) > 0
        return np.where(broken | (queries == 0), np.nan, whole)

    def mean(values: Numbers, counts: Numbers) -> Numbers:
        total = reduced(np.where(counts > 0, values, 0.0) * counts, dist.ReduceOp.SUM)
        whole = reduced(counts, dist.ReduceOp.SUM)
        return np.divide(total, whole, out=np.full_like(total, np.nan), where=whole > 0)

    queries = reduced(report.queries, dist.ReduceOp.SUM)
    return replace(
        report,
        max_qk=largest(report.max_qk),
        max_logit=largest(report.max_logit),
        entropy=mean(report.entropy, report.queries),
        entropy_share=mean(report.entropy_share, report.share_queries),
        queries=queries,
        share_queries=reduced(report.share_queries, dist.ReduceOp.SUM),
    )
