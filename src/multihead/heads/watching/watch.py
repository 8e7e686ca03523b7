"""Watching the heads of a model while it runs at full speed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModelError
from ...ops import dispatch
from ...ops.problem import Problem
from ..running import Running, inside_backward, observing, running_modules, set_to_multihead
from .choice import Choice, Keep, choose
from .histogram import Counts
from .lazy_weights import Copies, KeptCall, LazyWeights
from .numbers import Numbers, pruned_layers
from .record import HeadRecord, joined
from .statistics import RowStatistics, row_statistics
from .totals import HeadTotals, StatisticTotals

FloatTable = np.ndarray[Any, np.dtype[np.float32]]


@contextmanager
def watch(
    model: nn.Module,
    *,
    statistics: Sequence[str] | str | None = None,
    layers: Sequence[str | int] | str | int | None = None,
    heads: Sequence[int] | int | None = None,
    keep: Keep | None = None,
) -> Iterator[Heads]:
    """Collect what every head of `model` does while the model runs.

        with mh.watch(model) as heads:
            model(input_ids)
        heads.statistics["entropy"]
        record = heads.record()

    Args:
        model: a transformers model; a module with layers of multihead; or any module that calls
            torch's `scaled_dot_product_attention` or has an `nn.MultiheadAttention`. Inside the
            block it computes its attention by multihead, after it as before, also after an error.
        statistics: names out of `multihead.heads.STATISTICS`; all unless given. No other is
            computed.
        layers: names of modules (the attention's own, or a block's that has it) or the numbers of
            blocks, which are the first number in a module's name; all unless given.
        heads: numbers of heads in each layer; all unless given. Heads keep the numbers that they
            had before any were pruned; those that are gone have no queries.
        keep: "weights" keeps queries and keys of each layer's last call, so that
            `record().patterns` gives any row of its weights.

    Results are those of multihead's attention without watching, bit for bit (for a plain torch
    module: of `replace_sdpa`; a call that it leaves to torch, since dropout or weights are asked
    for, stays torch's and is computed a second time for the statistics, which are those before
    dropout).

    Counted are the queries of every call in the block, of batches, of chunks and of decoding steps
    alike, each once and at its absolute position: padding and queries that see nothing are left
    out, and a forward pass that autograd repeats during backward (activation checkpointing) is
    computed but not counted. A layer is a module: one that runs several times in a pass is one
    layer, which counts its queries as often. Inside a nested `watch`, calls count for the inner
    one only. A model that was compiled before runs eagerly inside the block.

    Of a plain torch module padding is known from the masks it passes, and the axis before the
    length is that of the heads. In a cross-attention no mask tells which queries are padding: all
    that see a key count.

    Raises:
        ModelError: no module, or one that has nothing that could attend.
        ArgumentError: a statistic or a layer that is not there; when the model runs, such a head.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            # A compiled graph shows no calls, so inside the block compiled models run eagerly.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        set_to_multihead(model, stack)
        choice = choose(model, statistics, layers, heads, keep)
        running = stack.enter_context(running_modules(model))
        found = Heads(model, choice, running)
        stack.enter_context(observing(_Watcher(found, choice, running)))
        yield found


class Heads:
    """What `watch` has seen so far; may be read inside the block and after it."""

    def __init__(self, model: nn.Module, choice: Choice, running: Running) -> None:
        self._model = model
        self._choice = choice
        self._running = running
        self._order = {name: place for place, (name, _) in enumerate(model.named_modules())}
        self._totals: dict[str, HeadTotals] = {}
        self._heads: dict[str, int] = {}
        self._pruned = pruned_layers(model)
        self._numbers: dict[str, Numbers] = {}
        self._kept: dict[str, KeptCall] = {}
        self._copies = Copies()
        self._dtypes: set[str] = set()
        self._backends: set[str] = set()

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the attention modules that ran, in the order in which the model has them;
        those of which all heads were pruned are among them.
        """
        names = {*self._totals, *(self._emptied() if self._totals else ())}
        return tuple(sorted(names, key=self._order.__getitem__))

    @property
    def queries(self) -> Counts:
        """How many queries each head's statistics are taken over: int64 [layers, heads]."""
        counts: Counts = joined([self._queries_of(name) for name in self.layers], fill=0)
        return counts

    @property
    def statistics(self) -> dict[str, FloatTable]:
        """Each statistic as float32 [layers, heads]: the mean over queries, or the maximum.

        Names and meanings are those of `multihead.heads.watching.statistics`. A layer that has
        fewer heads than another ends in NaN.
        """
        layers = [self._totals_of(layer) for layer in self.layers]
        return {
            name: joined([it[name].result(name) for it in layers], fill=np.nan).astype("f4")
            for name in self._choice.statistics
        }

    def record(self, model: str | None = None) -> HeadRecord:
        """What was seen so far, to keep: `model` is its name, if not what the model says itself.

        Raises ModelError if the model called no attention that could be seen.
        """
        if not self._totals:
            raise ModelError(self._nothing_seen())
        layers, seen = self.layers, self._totals.values()
        totals = [self._totals_of(name) for name in layers]
        return HeadRecord.of_layers(
            model=model or model_name(self._model),
            dtype=", ".join(sorted(self._dtypes)),
            backend=", ".join(sorted(self._backends)),
            layers=layers,
            heads=tuple(self.numbers(name).heads for name in layers),
            tokens=max(it.tokens for it in seen),
            texts=max(it.texts_or_rows for it in seen),
            queries=[self._queries_of(name) for name in layers],
            totals={name: [it[name] for it in totals] for name in self._choice.statistics},
            patterns=LazyWeights([(it, self._kept[it]) for it in layers if it in self._kept]),
        )

    def add(
        self, layer: str, problem: Problem, stats: Mapping[str, Tensor], rows: RowStatistics
    ) -> None:
        """Count the queries of one call of the module named `layer`."""
        known = self._heads.setdefault(layer, problem.heads)
        if known != problem.heads:
            raise ModelError(
                f"The module {layer!r} attended with {known} heads and now with {problem.heads}; "
                "a module is one layer. Leave it out by layers=[...], which names the others."
            )
        taken = self.numbers(layer).taken
        every = len(taken) == problem.heads
        self._totals.setdefault(layer, HeadTotals()).add(rows, None if every else taken)
        self._dtypes.add(str(problem.query.dtype).removeprefix("torch."))
        self._backends.add(dispatch.choose(problem).NAME)
        if self._choice.keep_weights:
            self._kept[layer] = KeptCall.of(problem, stats["lse"], self._copies)

    def numbers(self, layer: str) -> Numbers:
        """Which heads of a layer that is in `layers` are watched."""
        known = self._numbers.get(layer)
        if known is None:
            count, pruned = self._heads.get(layer, 0), self._pruned.get(layer)
            known = self._numbers[layer] = Numbers.of(self._choice, layer, count, pruned)
        return known

    def _emptied(self) -> list[str]:
        """The layers without heads, which need not attend at all."""
        names = (name for name, pruned in self._pruned.items() if not pruned.kept)
        return [name for name in names if self._choice.takes(name)]

    def _queries_of(self, layer: str) -> Counts:
        numbers = self.numbers(layer)
        counts: Counts = np.zeros(len(numbers.heads), np.int64)
        if layer in self._totals:
            counts[list(numbers.columns)] = self._totals[layer].queries
        return counts

    def _totals_of(self, layer: str) -> dict[str, StatisticTotals]:
        numbers = self.numbers(layer)
        heads = len(numbers.heads)
        if layer not in self._totals:
            none = StatisticTotals.of_none((heads,))
            return dict.fromkeys(self._choice.statistics, none)
        found = self._totals[layer].totals
        return {name: it.spread(numbers.columns, heads) for name, it in found.items()}

    def _nothing_seen(self) -> str:
        name = type(self._model).__name__
        if not self._running.runs:
            return f"{name} did not run inside the block, so there is nothing to record."
        chosen = "" if self._choice.layers is None else " of the chosen layers"
        return (
            f"{name} ran, but no attention{chosen} was seen. Seen are layers of multihead, models "
            "of transformers, and calls of torch's scaled_dot_product_attention on plain tensors "
            "on the CPU; a model that multiplies queries and keys itself shows none."
        )


class _Watcher:
    """Counts the queries of each call for the module that makes it."""

    def __init__(self, heads: Heads, choice: Choice, running: Running) -> None:
        self._heads = heads
        self._choice = choice
        self._running = running

    def wants(self, problem: Problem) -> tuple[str, ...]:
        layer = self._running.innermost
        if layer is None or inside_backward() or not self._choice.takes(layer):
            return ()
        return self._choice.from_forward

    @torch.no_grad()
    def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
        layer = self._running.innermost
        if layer is None:
            return
        rows = row_statistics(
            problem,
            stats,
            self_attention=self._running.reads_itself,
            names=self._choice.statistics,
        )
        self._heads.add(layer, problem, stats, rows)


def model_name(model: nn.Module) -> str:
    """What a model is called: by its config, else by its class."""
    return getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
