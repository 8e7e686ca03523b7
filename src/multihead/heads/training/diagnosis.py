"""What the logits and the entropy of a head say about a training run, in plain words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Table = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]

Kind = Literal["not finite", "collapsed", "large logits"]

_STATISTICS = ("max_qk", "max_logit", "entropy", "entropy_share")


@dataclass(frozen=True)
class StabilityThresholds:
    """From where on a head is reported.

    Attributes:
        max_qk: logits above this are large. 100 is where Kimi K2 clips; e^-100 of a weight is
            nothing in any dtype, and a growth of logits does not turn back by itself.
        entropy: a head whose mean entropy is below, in nats, reads one key: 0.1 nats are what a
            query has that gives 0.98 to one key. Alone this is no finding: heads that rest on the
            first key do so in healthy models. With large logits it is entropy collapse.

    Source: Kimi Team 2025 (max_qk); Zhai et al. 2023 (entropy collapse).
    """

    max_qk: float = 100.0
    entropy: float = 0.1


@dataclass(frozen=True)
class Finding:
    """What is wrong with one head.

    Attributes:
        layer: the place of the layer among those that ran, from 0.
        name: of its attention module.
        head: from 0.
        kind: "not finite", "collapsed" (large logits and no entropy) or "large logits".
        max_qk: the largest `scale * q.k`.
        entropy: the mean over queries, in nats.
    """

    layer: int
    name: str
    head: int
    kind: Kind
    max_qk: float
    entropy: float

    def __str__(self) -> str:
        return (
            f"layer {self.layer} head {self.head}: max_qk {_short(self.max_qk)}, entropy "
            f"{self.entropy:.2f} nats: {self.kind}"
        )


@dataclass(frozen=True, eq=False)
class StabilityReport:
    """What the heads of a model did in one training step; print it.

    Attributes:
        step: the number of the step, from 0.
        layers: names of the attention modules that ran, in the model's order.
        max_qk: float64 [layers, heads], the largest `scale * q.k` of a visible key, before softcap
            and bias: what QK-clip goes by.
        max_logit: the same after softcap and bias.
        entropy: float64 [layers, heads], the mean over queries in nats.
        entropy_share: entropy over the log of the number of visible keys, the mean over queries
            that see more than one; 1 is a uniform head.
        queries: int64 [layers, heads], how many queries were counted.
        share_queries: how many of them see more than one key.
        rows: "all", or how many rows of each call were looked at. A maximum over some rows is a
            lower bound of the whole one.
        thresholds: from where on a head is reported.

    Heads are counted as the modules have them: where some were pruned, those that are left. Tables
    end in NaN in layers that have fewer heads than others.
    """

    step: int
    layers: tuple[str, ...]
    max_qk: Table
    max_logit: Table
    entropy: Table
    entropy_share: Table
    queries: Counts
    share_queries: Counts
    rows: int | Literal["all"] = "all"
    thresholds: StabilityThresholds = StabilityThresholds()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The heads that are reported, worst kind first, then by max_qk."""
        found = []
        for layer, head in self._heads():
            max_qk, entropy = float(self.max_qk[layer, head]), float(self.entropy[layer, head])
            kind = self._kind(max_qk, entropy)
            if kind is not None:
                found.append(Finding(layer, self.layers[layer], head, kind, max_qk, entropy))
        order = ("not finite", "collapsed", "large logits")
        return tuple(sorted(found, key=lambda it: (order.index(it.kind), -_rank(it.max_qk))))

    @property
    def single_key_heads(self) -> int:
        """How many heads read one key (entropy below the threshold) with logits in bounds."""
        return sum(
            bool(self.entropy[at] < self.thresholds.entropy)
            and bool(self.max_qk[at] <= self.thresholds.max_qk)
            for at in self._heads()
        )

    def __str__(self) -> str:
        rows = "" if self.rows == "all" else f", {self.rows} rows of each call"
        lines = [f"step {self.step}: {self._summary()}{rows}", *map(str, self.findings)]
        count = self.single_key_heads
        if count:
            heads = "1 head reads" if count == 1 else f"{count} heads read"
            lines.append(
                f"{heads} a single key (entropy below {self.thresholds.entropy:g} nats) with "
                "logits in bounds, as heads that rest on the first key do in healthy models"
            )
        return "\n".join(lines)

    def to_json(self) -> str:
        """The report as one JSON document; what is not finite is null."""
        tables = {name: _plain(getattr(self, name)) for name in _STATISTICS}
        return json.dumps(
            {
                "step": self.step,
                "rows": self.rows,
                "layers": list(self.layers),
                **tables,
                "queries": self.queries.tolist(),
                "thresholds": {it: _finite(value) for it, value in vars(self.thresholds).items()},
                "findings": [
                    {**vars(finding), "max_qk": _finite(finding.max_qk)}
                    | {"entropy": _finite(finding.entropy)}
                    for finding in self.findings
                ],
            }
        )

    def _summary(self) -> str:
        if not self._heads():
            return "no queries were counted"
        count = len(self.findings)
        verdict = "no head is reported" if not count else f"{count} of {len(self._heads())} heads:"
        finite = np.where(np.isfinite(self.max_qk), self.max_qk, -np.inf)
        if not np.isfinite(finite).any():
            return f"no max_qk is finite; {verdict}"
        layer, head = (int(it) for it in np.unravel_index(finite.argmax(), finite.shape))
        largest = f"largest max_qk {_short(float(finite[layer, head]))} (layer {layer} head {head})"
        entropy = np.nanmean(np.where(self.queries > 0, self.entropy, np.nan))
        return f"{largest}, mean entropy {entropy:.2f} nats; {verdict}"

    def _kind(self, max_qk: float, entropy: float) -> Kind | None:
        if not (math.isfinite(max_qk) and math.isfinite(entropy)):
            return "not finite"
        if max_qk <= self.thresholds.max_qk:
            return None
        return "collapsed" if entropy < self.thresholds.entropy else "large logits"

    def _heads(self) -> list[tuple[int, int]]:
        """Places of the heads that were counted."""
        return [
            (int(layer), int(head)) for layer, head in zip(*self.queries.nonzero(), strict=True)
        ]


def _rank(max_qk: float) -> float:
    return math.inf if math.isnan(max_qk) else max_qk


def _short(number: float) -> str:
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:.4g}"


def _plain(table: Table) -> list[list[float | None]]:
    return [[_finite(float(value)) for value in row] for row in table]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def table(rows: Iterable[np.ndarray[Any, Any]], fill: float) -> Table:
    """Rows of different length as one float64 array."""
    rows = list(rows)
    filled = np.full((len(rows), max(map(len, rows), default=0)), fill)
    for place, row in enumerate(rows):
        filled[place, : len(row)] = row
    return filled
