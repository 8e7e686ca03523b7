"""Watching the logits and the entropy of every head while a model trains.

    monitor = multihead.heads.stability(model, every=50)
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        report = monitor.step()
        if report is not None and report.findings:
            print(report)

Shape suffixes: b batch, h head, q query row.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ArgumentError, DtypeError, ModelError
from ...ops.problem import Problem
from ...ops.row_statistics import at_rows, statistics_of
from ...ops.sweep import visible_keys
from ..running import inside_backward, observing, running_modules
from .diagnosis import StabilityReport, StabilityThresholds, table

_STATISTICS = ("entropy", "max_logit", "max_qk")
_KEPT_REPORTS = 1000


def stability(
    model: nn.Module,
    *,
    every: int = 1,
    rows: int | Literal["all"] = "all",
    thresholds: StabilityThresholds | None = None,
) -> StabilityMonitor:
    """Watch max_qk, max_logit and entropy of each head of `model` during training.

    In the steps that are looked at, statistics come from the forward pass itself where multihead
    computes the attention, and are formed beside it, from queries and keys, in transformers models
    that are set to "sdpa", "eager" or flash attention. Outputs and gradients are those of the same
    step without a monitor, bit for bit: nothing that is seen is recorded by autograd, and no
    random number is drawn from torch's generators.

    A step ends with `monitor.step()`. Of all forward passes in it (gradient accumulation) maxima
    are taken, and means over all their queries. Padding is left out, and so are passes without
    gradients (validation) and what activation checkpointing computes again during backward.

    * torch.compile: in steps that are looked at, compiled models run eagerly (the stance
      "force_eager", for the whole process), since a compiled graph shows no calls; their numbers
      are those of eager then, until the step ends or the monitor is closed or dropped. In all
      other steps the model carries no hooks, and its graph runs unbroken. The very first step is
      not looked at if the model is compiled in it.
    * Distributed: a report is of this process's own samples. `report = all_reduced(report)` makes
      it that of all, for ranks that hold the same heads (data parallel).

    Args:
        model: what trains, not its wrappers. A step is seen when `model` itself is called.
        every: look at steps 0, every, 2 every and so on.
        rows: how many query rows of each call are looked at, evenly spread from a place that moves
            with each call; "all" costs little where multihead computes the attention.
        thresholds: from where on heads are reported.

    Raises:
        ArgumentError: `every` or `rows` below 1.
        DtypeError: `model` is not a module.

    `step` raises ModelError if the model ran and no attention was seen.
    """
    return StabilityMonitor(model, every=every, rows=rows, thresholds=thresholds)


class StabilityMonitor:
    """What `stability` returns; as a context manager it is closed at the end, else when dropped.

    Attributes:
        reports: the latest of the reports, at most 1000, oldest first.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        rows: int | Literal["all"] = "all",
        thresholds: StabilityThresholds | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise DtypeError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
        _check_count("every", every)
        if rows != "all":
            _check_count("rows", rows)
        self.model: nn.Module = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
        self.every = every
        self.rows: int | Literal["all"] = rows
        self.thresholds = StabilityThresholds() if thresholds is None else thresholds
        self.reports: deque[StabilityReport] = deque(maxlen=_KEPT_REPORTS)
        self._count = 0
        self._closed = False
        self._calls = _Calls(rows)
        self._looking: ExitStack | None = None
        self._ran = False
        self._begin()

    @property
    def is_looking(self) -> bool:
        """Whether the current step is looked at."""
        return self._looking is not None

    def step(self) -> StabilityReport | None:
        """End a step, after the optimizer's; returns its report if it was looked at.

        None also where the model was not called, or ran in a compiled graph.

        Raises ModelError if the model ran and no attention was seen.
        """
        report = None
        if self._looking is not None:
            self._end()
            if self._ran:
                report = self._report()
                self.reports.append(report)
        self._count += 1
        self._begin()
        return report

    def close(self) -> None:
        """Look at no further step, and leave the model as it was."""
        self._closed = True
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        """Make ready for the next step, if it is one to look at."""
        if self._closed or self._count % self.every:
            return
        self._calls, self._ran = _Calls(self.rows), False
        self._looking = ExitStack()
        self._let_go = weakref.finalize(self, self._looking.close)
        self._let_go.atexit = False
        if "torch._dynamo" in sys.modules:
            self._looking.enter_context(torch.compiler.set_stance("force_eager"))
        running: list[ExitStack] = []
        monitor = weakref.ref(self)  # the model's hooks must not keep a monitor that is dropped

        def before(module: nn.Module, arguments: Any) -> None:
            found = monitor()
            if found is None or torch.compiler.is_compiling() or inside_backward():
                return
            stack = ExitStack()
            if not running and torch.is_grad_enabled():  # running already: it calls itself
                found._ran = True
                found._observe(stack)
            running.append(stack)

        def after(module: nn.Module, arguments: Any, result: Any) -> None:
            if not torch.compiler.is_compiling() and running and not inside_backward():
                running.pop().close()

        for handle in (
            self.model.register_forward_pre_hook(before),
            self.model.register_forward_hook(after, always_call=True),
        ):
            self._looking.callback(handle.remove)

    def _observe(self, stack: ExitStack) -> None:
        """See the calls of one forward pass, until `stack` closes."""
        if self._calls.running is None:
            # Until the step ends: torch allows no hook to be removed while it calls hooks.
            assert self._looking is not None
            self._calls.running = self._looking.enter_context(running_modules(self.model))
            # Hooks that are placed while the model is being called are not called for itself.
            reads_other = getattr(self.model, "context_dim", None) is not None
            self._calls.running.enter("", self.model, reads_other)
        stack.enter_context(observing(self._calls))
        transformers = sys.modules.get("transformers")
        kind = getattr(transformers, "PreTrainedModel", ())
        if not any(isinstance(module, kind) for module in self.model.modules()):
            return
        from ...integrations.hf_beside import beside

        names = {module: name for name, module in self.model.named_modules()}

        def show(module: nn.Module, call: Problem) -> None:
            if not inside_backward():
                reads_itself = self._calls.running.reads_itself
                self._calls.count(names[module], call, None, reads_itself)

        stack.enter_context(beside(self.model, show))

    def _end(self) -> None:
        if self._looking is not None:
            self._let_go()
            self._looking = None

    def _report(self) -> StabilityReport:
        totals = self._calls.totals
        if not totals:
            raise ModelError(
                f"{type(self.model).__name__} ran, but no attention of multihead was seen in it. A "
                "model that calls torch's scaled_dot_product_attention or nn.MultiheadAttention "
                "needs multihead.replace_sdpa(model) first."
            )
        names = [name for name, _ in self.model.named_modules() if name in totals]
        results = [totals[name].result() for name in names]
        return StabilityReport(
            step=self._count,
            layers=tuple(names),
            **{
                name: table([result[name] for result in results], np.nan)
                for name in ("max_qk", "max_logit", "entropy", "entropy_share")
            },
            queries=_counts([result["queries"] for result in results]),
            share_queries=_counts([result["share_queries"] for result in results]),
            rows=self.rows,
            thresholds=self.thresholds,
        )


class _Calls:
    """Sits in the observer slot while the model runs, and counts."""

    def __init__(self, rows: int | Literal["all"]) -> None:
        self.totals: dict[str, _Totals] = {}
        self.running: Any = None
        self._rows = rows
        self._seen = 0

    def wants(self, problem: Problem) -> tuple[str, ...]:
        if inside_backward() or self.running is None or self.running.innermost is None:
            return ()
        # For a sample of the rows nothing is asked of the forward pass but to be shown the call.
        return _STATISTICS if self._rows == "all" else ("lse",)

    @torch.no_grad()
    def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
        given = stats if self._rows == "all" else None
        self.count(self.running.innermost, problem, given, self.running.reads_itself)

    def count(
        self,
        layer: str,
        call: Problem,
        stats: Mapping[str, Tensor] | None,
        reads_itself: bool,
    ) -> None:
        """Count a call of the module named `layer`, whose statistics may be there already."""
        padding_bk = call.parts.key_visible if call.parts.key_positions is None else None
        if self._rows != "all":
            call = at_rows(call, self._sample(call))
        if stats is None:
            stats = statistics_of(call, _STATISTICS)
        keys_bhq = visible_keys(call)
        counted_bhq = keys_bhq > 0
        if padding_bk is not None and reads_itself:
            position_bq = call.parts.query_position(slice(0, call.query_length))[:, 0]
            counted_bhq = counted_bhq & _own_key(padding_bk, position_bq)[:, None]
        outcomes_bhq = keys_bhq + (call.sinks is not None)
        self.totals.setdefault(layer, _Totals()).add(stats, counted_bhq, outcomes_bhq)

    def _sample(self, call: Problem) -> Tensor:
        """Rows evenly spread over the call, from a place that moves with each call."""
        assert self._rows != "all"
        length, device = call.query_length, call.query.device
        count = min(self._rows, length)
        if count == length:
            return torch.arange(length, device=device)
        self._seen += 1
        begin = (self._seen * 0.6180339887498949) % 1.0  # the golden ratio: no place twice
        places = (torch.arange(count, dtype=torch.float64) + begin) * (length / count)
        return places.long().clamp(max=length - 1).to(device)


class _Totals:
    """Maxima and sums over the queries of one layer's heads; float64 [H] on the calls' device."""

    def __init__(self) -> None:
        self._maxima: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    def add(self, stats: Mapping[str, Tensor], counted_bhq: Tensor, outcomes_bhq: Tensor) -> None:
        entropy_bhq = stats["entropy"].double()
        several_bhq = counted_bhq & (outcomes_bhq > 1)
        share_bhq = entropy_bhq / outcomes_bhq.clamp(min=2).double().log()
        for name in ("max_qk", "max_logit"):
            value_bhq = stats[name]
            counts = counted_bhq.expand_as(value_bhq)
            highest_h = value_bhq.masked_fill(~counts, -torch.inf).amax((0, 2)).double()
            known = self._maxima.get(name)
            self._maxima[name] = highest_h if known is None else known.maximum(highest_h)
        for name, value_bhq, which_bhq in (
            ("entropy", entropy_bhq, counted_bhq),
            ("entropy_share", share_bhq, several_bhq),
        ):
            counts = which_bhq.expand_as(value_bhq)
            sum_h = value_bhq.masked_fill(~counts, 0.0).sum((0, 2))
            self._sums[name] = sum_h + self._sums.get(name, 0.0)
            self._counts[name] = counts.sum((0, 2)) + self._counts.get(name, 0)

    def result(self) -> dict[str, np.ndarray[Any, Any]]:
        """Maxima and means [H], NaN where no query counted; and `queries`."""
        counts = self._counts["entropy"]
        none = counts == 0
        values = {name: x.masked_fill(none, torch.nan) for name, x in self._maxima.items()}
        values |= {name: total / self._counts[name] for name, total in self._sums.items()}
        values |= {"queries": counts, "share_queries": self._counts["entropy_share"]}
        return {name: x.cpu().numpy() for name, x in values.items()}


def _counts(rows: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return table(rows, 0.0).astype(np.int64)


def _own_key(visible_bk: Tensor, position_bq: Tensor) -> Tensor:
    """Whether each query's own key is no padding: bool [B, q]."""
    batch = max(len(visible_bk), len(position_bq))
    visible_bk, position_bq = visible_bk.expand(batch, -1), position_bq.expand(batch, -1)
    length = visible_bk.shape[1]
    inside_bq = (position_bq >= 0) & (position_bq < length)
    return visible_bk.gather(1, position_bq.clamp(0, max(0, length - 1))) | ~inside_bq


def _check_count(name: str, count: object) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        every = " or 'all'" if name == "rows" else ""
        raise ArgumentError(f"{name} must be a whole number above 0{every}; got {count!r}.")
