"""What one window of a corpus adds: seen while a model reads, then put to the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ModelError
from ...ops.problem import Problem
from ..forward import LayerObserver
from ..watching.choice import Choice
from ..watching.record import HeadRecord
from ..watching.statistics import row_statistics
from ..watching.watch import Heads
from .links import (
    NEEDED,
    Draw,
    LayerLinks,
    SampledLinks,
    StrongestLinks,
    layer_links,
    stacked,
)
from .text import Window


@dataclass(frozen=True, eq=False)
class Tables:
    """Counts and links of all heads: see `CorpusRecord`."""

    firsts: Any
    strongest: StrongestLinks
    sampled: SampledLinks

    @classmethod
    def empty(cls, record: HeadRecord) -> Tables:
        """Of the heads that a record has."""
        layers, heads = record.queries.shape
        return cls(
            firsts=np.zeros((layers, heads), np.int64),
            strongest=StrongestLinks.empty(layers, heads),
            sampled=SampledLinks.empty(layers, heads),
        )

    def with_window(self, layers: Sequence[LayerLinks], drawn: Draw, window: Window) -> Tables:
        """Also what a window's layers had."""

        def table(name: str, fill: float) -> Any:
            return stacked(layers, name, fill)

        return Tables(
            firsts=self.firsts + table("firsts", 0),
            strongest=self.strongest.with_window(
                table("elsewhere", 0), table("elsewhere_key", -1), window
            ),
            sampled=self.sampled.with_window(drawn, table("weight", 0), table("key", -1), window),
        )

    def names(self, known: Mapping[int, str]) -> dict[int, str]:
        """Of the documents that links are in."""
        used = {*np.unique(self.strongest.document), *np.unique(self.sampled.document)}
        return {int(it): known[int(it)] for it in sorted(used) if it >= 0}


class WindowObserver(LayerObserver):
    """Sits in the observer slot while the model reads one window."""

    def __init__(self, model: nn.Module, choice: Choice, length: int, drawn: Draw) -> None:
        super().__init__((1, length))
        self._model = model
        self._choice = choice
        self._drawn = drawn
        self._heads: Heads | None = None
        self._links: dict[str, LayerLinks] = {}

    def wants(self, problem: Problem) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._choice.from_forward, *NEEDED)))

    @torch.no_grad()
    def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
        name = self.layers[self.next_layer(problem)]
        if name in self._links or self.running is None:
            raise ModelError(
                f"{name} attended twice in one pass. Models that use a layer several times are "
                "watched by heads.watch, which adds up its calls."
            )
        if self._heads is None:
            self._heads = Heads(self._model, self._choice, self.running)
        rows = row_statistics(problem, stats, names=self._choice.statistics)
        self._heads.add(name, problem, stats, rows)
        self._links[name] = layer_links(problem, stats, self._drawn)

    def result(self, name: str) -> tuple[HeadRecord, list[LayerLinks]]:
        """What was seen, layers in the order of the record, heads at their first numbers."""
        assert self._heads is not None  # run() raises where no layer attended
        record = self._heads.record(name)
        links = []
        for layer in record.layers:
            numbers = self._heads.numbers(layer)
            found = self._links.get(layer) or next(iter(self._links.values())).of_none()
            links.append(found.spread(numbers.columns, len(numbers.heads)))
        return record, links
