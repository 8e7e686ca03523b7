"""Watching the heads of a model while it runs at full speed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ModelError
from ..nn import MultiHeadAttention
from ..ops import dispatch
from ..ops.problem import Problem
from .statistics import FROM_FORWARD, STATISTICS, HeadTotals, RowStatistics, row_statistics

FloatTable = np.ndarray[Any, np.dtype[Any]]
IntegerTable = np.ndarray[Any, np.dtype[np.int64]]

# Arguments by which attention modules are given a second sequence to read.
_OTHER_SEQUENCE = ("encoder_hidden_states", "key_value_states", "context")


@contextmanager
def watch(model: nn.Module) -> Iterator[Heads]:
    """Collect what every head of `model` does while the model runs.

        with mh.watch(model) as heads:
            model(input_ids)
        heads.statistics["entropy"]

    `model` is a transformers model, which computes its attention by multihead inside the block
    and as before after it (also after an error), or any module with multihead.MultiHeadAttention
    layers. Results are those of multihead's attention without watching, bit for bit.

    Counted are the queries of every call in the block, of batches and of decoding steps alike,
    each once: padding and queries that see nothing are left out, and a forward pass that autograd
    repeats during backward (activation checkpointing) is computed but not counted. Inside a
    nested `watch`, calls count for the inner one only.

    Raises ModelError for a model of another kind.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            # A compiled graph shows no calls, so inside the block compiled models run eagerly.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        set_to_multihead(model, stack)
        running = stack.enter_context(running_modules(model))
        heads = Heads(model)
        stack.enter_context(observing(_Watcher(heads, running)))
        yield heads


class Heads:
    """What `watch` has seen so far; may be read inside the block and after it."""

    def __init__(self, model: nn.Module) -> None:
        self._order = {name: place for place, (name, _) in enumerate(model.named_modules())}
        self._totals: dict[str, HeadTotals] = {}

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the attention modules that ran, in the order in which the model has them."""
        return tuple(sorted(self._totals, key=self._order.__getitem__))

    @property
    def queries(self) -> IntegerTable:
        """How many queries each head's statistics are taken over: int64 [layers, heads]."""
        counts = [self._totals[name].queries.double() for name in self.layers]
        return _table(counts, fill=0.0).astype(np.int64)

    @property
    def statistics(self) -> dict[str, FloatTable]:
        """Each statistic as float32 [layers, heads]: the mean over queries, or the maximum.

        Names and meanings are those of `multihead.heads.statistics`. A layer that has fewer heads
        than another ends in NaN.
        """
        results = [self._totals[name].result() for name in self.layers]
        return {
            name: _table([result[name] for result in results], fill=np.nan).astype(np.float32)
            for name in STATISTICS
        }

    def add(self, layer: str, rows: RowStatistics) -> None:
        """Count the queries of one call of the module named `layer`."""
        self._totals.setdefault(layer, HeadTotals()).add(rows)


class Running:
    """Which modules of a model are running, innermost last."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, nn.Module, bool]] = []

    @property
    def innermost(self) -> str | None:
        """The name of the module that runs now, None outside of the model."""
        return self._stack[-1][0] if self._stack else None

    @property
    def reads_itself(self) -> bool:
        """Whether the module that runs now was given no second sequence to read."""
        return not (self._stack and self._stack[-1][2])

    def enter(self, name: str, module: nn.Module, reads_other: bool) -> None:
        self._stack.append((name, module, reads_other))

    def leave(self, module: nn.Module) -> None:
        """Forget `module` and whatever it left running."""
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place][1] is module:
                del self._stack[place:]
                return


@contextmanager
def running_modules(model: nn.Module) -> Iterator[Running]:
    """Know, inside the block, which module of `model` runs."""
    running = Running()
    handles = []
    for name, module in model.named_modules():

        def enter(
            module: nn.Module, arguments: Any, keywords: Mapping[str, Any], name: str = name
        ) -> None:
            if isinstance(module, MultiHeadAttention):
                # Once a cache holds a context, the layer is called without it.
                reads_other = module.context_dim is not None
            else:
                reads_other = any(keywords.get(key) is not None for key in _OTHER_SEQUENCE)
            running.enter(name, module, reads_other)

        def leave(module: nn.Module, arguments: Any, result: Any) -> None:
            running.leave(module)

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def observing(observer: dispatch.Observer) -> Iterator[None]:
    """Show every call of attention inside the block to `observer`."""
    token = dispatch.observer.set(observer)
    try:
        yield
    finally:
        dispatch.observer.reset(token)


def set_to_multihead(model: nn.Module, stack: ExitStack) -> None:
    """Let `model` compute its attention by multihead until `stack` closes.

    Raises ModelError for a model that cannot.
    """
    transformers_models = _transformers_models(model)
    for part in transformers_models:
        from ..integrations.transformers import using

        stack.enter_context(using(part))
    if transformers_models or any(isinstance(it, MultiHeadAttention) for it in model.modules()):
        return
    raise ModelError(
        f"{type(model).__name__} cannot be watched: it is neither a transformers model nor has it "
        "multihead.MultiHeadAttention layers, and other modules are not supported. "
        "MultiHeadAttention.from_torch takes over the weights of a torch.nn.MultiheadAttention."
    )


def inside_backward() -> bool:
    """Whether autograd is running: a forward pass now is a repetition of an earlier one."""
    return torch._C._current_graph_task_id() != -1


class _Watcher:
    """Counts the queries of each call for the module that makes it."""

    def __init__(self, heads: Heads, running: Running) -> None:
        self._heads = heads
        self._running = running

    def wants(self, problem: Problem) -> tuple[str, ...]:
        if self._running.innermost is None or inside_backward():
            return ()
        return FROM_FORWARD

    @torch.no_grad()
    def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
        layer = self._running.innermost
        if layer is not None:
            reads_itself = self._running.reads_itself
            self._heads.add(layer, row_statistics(problem, stats, self_attention=reads_itself))


def _transformers_models(model: nn.Module) -> list[nn.Module]:
    """The outermost transformers models in `model`. Where there is one, transformers is loaded."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return []
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def _table(rows: list[Tensor], *, fill: float) -> FloatTable:
    """Rows of different length as one float64 array."""
    table = np.full((len(rows), max(map(len, rows), default=0)), fill)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row.cpu().numpy()
    return table
