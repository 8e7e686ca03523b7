"""What was seen of a model's heads, as one frozen object to keep, compare and add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ArgumentError, MissingExtraError
from .histogram import BINS_OF, Counts, Quantile, Table, quantile
from .lazy_weights import LazyWeights
from .statistics import checked_statistics
from .totals import StatisticTotals

if TYPE_CHECKING:
    from .comparison import Comparison


@dataclass(frozen=True, eq=False, repr=False)
class HeadRecord:
    """Statistics of every head that `watch` saw, with exact means and extremes, and histograms.

    Attributes:
        model: the model's name.
        dtype: of queries and keys; several are joined by commas.
        backend: the backends that served, likewise.
        layers: the names of the attention modules.
        heads: for each layer the numbers of the heads that were watched; those that were pruned
            are among them, with no query counted.
        tokens: how many tokens were read: the real queries of the layer that had most of them.
        texts: how many texts they were in: sequences or packed documents that began, but no fewer
            than were read at a time.
        queries: how many queries each head's statistics are taken over, int64 [layers, heads].
        totals: of each statistic; arrays [layers, heads], past a layer's last head without counts.
        patterns: weights under TransformerLens' names, if `watch` was asked to keep them. They are
            neither saved nor merged.
    """

    model: str
    dtype: str
    backend: str
    layers: tuple[str, ...]
    heads: tuple[tuple[int, ...], ...]
    tokens: int
    texts: int
    queries: Counts
    totals: Mapping[str, StatisticTotals]
    patterns: LazyWeights = field(default_factory=lambda: LazyWeights(()))

    @classmethod
    def of_layers(
        cls,
        *,
        queries: Sequence[Counts],
        totals: Mapping[str, Sequence[StatisticTotals]],
        **others: Any,
    ) -> HeadRecord:
        """Of arrays [heads], one for each layer, joined to [layers, heads]."""
        fills = {"count": 0, "sum": 0.0, "lowest": np.inf, "highest": -np.inf, "histogram": 0}
        tables = {
            name: _frozen_totals(
                StatisticTotals(
                    **{
                        array: joined([getattr(it, array) for it in layers], fill=fills[array])
                        for array in StatisticTotals.arrays()
                    }
                )
            )
            for name, layers in totals.items()
        }
        return cls(queries=_frozen(joined(queries, fill=0)), totals=tables, **others)

    @property
    def one_text(self) -> bool:
        """Whether all of it was seen on a single text, of which no head should be judged."""
        return self.texts <= 1

    @property
    def names(self) -> tuple[str, ...]:
        """The statistics that were collected."""
        return tuple(self.totals)

    @property
    def statistics(self) -> dict[str, Table]:
        """Each statistic, float64 [layers, heads]: the mean over queries, or for `max_logit` and
        `max_qk` the largest; NaN past a layer's last head and where no query counted.
        """
        return {name: totals.result(name) for name, totals in self.totals.items()}

    def mean(self, name: str) -> Table:
        """The mean over queries, float64 [layers, heads]."""
        return self._of(name).mean

    def lowest(self, name: str) -> Table:
        """The smallest value that a query had, float64 [layers, heads]."""
        totals = self._of(name)
        return np.where(totals.count > 0, totals.lowest, np.nan)

    def highest(self, name: str) -> Table:
        """The largest value that a query had, float64 [layers, heads]."""
        totals = self._of(name)
        return np.where(totals.count > 0, totals.highest, np.nan)

    def quantile(self, name: str, share: float) -> Quantile:
        """The smallest value that at least `share` of the queries have at most.

        Its `low` and `high` hold the exact one between them: they are the edges of a bin of
        `multihead.heads.watching.histogram.BINS_OF`, or the extremes where these are nearer.

        Raises ArgumentError for a share outside of 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ArgumentError(f"share must lie between 0 and 1, 0.5 for the median; got {share}.")
        totals = self._of(name)
        return quantile(BINS_OF[name], totals.histogram, totals.lowest, totals.highest, share)

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each head: layer (its place), module, head, queries, and for
        each statistic its value. `attrs` has model, dtype, backend, tokens and texts.

        Raises MissingExtraError where pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise MissingExtraError(
                "to_pandas needs the package pandas, which is not installed. "
                "Install it with: pip install 'multihead[pandas]'"
            ) from error
        places = self.places()
        columns: dict[str, Any] = {
            "layer": [layer for layer, _ in places],
            "module": [self.layers[layer] for layer, _ in places],
            "head": [self.heads[layer][column] for layer, column in places],
            "queries": [int(self.queries[place]) for place in places],
        }
        for name, table in self.statistics.items():
            columns[name] = [float(table[place]) for place in places]
        frame = pandas.DataFrame(columns)
        frame.attrs = self.facts()
        return frame

    def facts(self) -> dict[str, Any]:
        """What the record says beside its tables."""
        names = ("model", "dtype", "backend", "tokens", "texts", "one_text")
        return {name: getattr(self, name) for name in names}

    def places(self) -> list[tuple[int, int]]:
        """Layer and column of every head in the tables, in order."""
        return [
            (layer, column)
            for layer, heads in enumerate(self.heads)
            for column in range(len(heads))
        ]

    def save(self, path: str | Path) -> None:
        """Write it to one safetensors file, whole or not at all; `load` reads it back.

        Raises:
            InputError: the path cannot be written.
            MissingExtraError: safetensors is not installed.
        """
        from .record_file import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> HeadRecord:
        """Read what `save` wrote.

        Raises:
            InputError: no such file, or none that `save` wrote.
            MissingExtraError: safetensors is not installed.
        """
        from .record_file import load

        return load(Path(path))

    def compare(
        self, other: HeadRecord, statistics: Sequence[str] | str | None = None
    ) -> Comparison:
        """What `other` has in other measure, head by head, the largest difference first.

        `statistics` are those that both have, unless given. Layers are compared by their place, and
        heads of which one of the two has no query are left out: they are not there, or see nothing.

        Raises ArgumentError for records of different layers or heads, or without a common
        statistic.
        """
        from .comparison import compare

        return compare(self, other, statistics)

    def merge(self, other: HeadRecord) -> HeadRecord:
        """The record of what both have seen, which must not be the same texts.

        Raises ArgumentError unless model, dtype, layers, heads and statistics are the same.
        """
        for name in ("model", "dtype", "layers", "heads", "names"):
            mine, yours = getattr(self, name), getattr(other, name)
            if mine != yours:
                what = "statistics" if name == "names" else name
                raise ArgumentError(
                    f"Only records of the same {what} merge: {_short(mine)} is not "
                    f"{_short(yours)}. compare() sets two different ones side by side."
                )
        backends = {*self.backend.split(", "), *other.backend.split(", ")}
        return HeadRecord(
            model=self.model,
            dtype=self.dtype,
            backend=", ".join(sorted(backends)),
            layers=self.layers,
            heads=self.heads,
            tokens=self.tokens + other.tokens,
            texts=self.texts + other.texts,
            queries=_frozen(self.queries + other.queries),
            totals={
                name: _frozen_totals(it.plus(other.totals[name]))
                for name, it in self.totals.items()
            },
        )

    def __repr__(self) -> str:
        heads = sum(map(len, self.heads))
        texts = "one text" if self.one_text else f"{self.texts:,} texts"
        return (
            f"HeadRecord({self.model}: {len(self.layers)} layers, {heads} heads, "
            f"{len(self.totals)} statistics over {self.tokens:,} tokens of {texts}, {self.dtype})"
        )

    def _of(self, name: str) -> StatisticTotals:
        (name,) = checked_statistics(name)
        if name not in self.totals:
            raise ArgumentError(
                f"{name!r} was not watched; this record has {', '.join(self.totals)}."
            )
        return self.totals[name]


def joined(rows: Sequence[Any], *, fill: float) -> Any:
    """Arrays [heads, ...] of layers as one, [layers, most heads, ...], filled up with `fill`."""
    longest = max(map(len, rows), default=0)
    inner = rows[0].shape[1:] if rows else ()
    dtype = rows[0].dtype if rows else np.float64
    table = np.full((len(rows), longest, *inner), fill, dtype=dtype)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table


def _frozen(array: Any) -> Any:
    array.flags.writeable = False
    return array


def _frozen_totals(totals: StatisticTotals) -> StatisticTotals:
    for array in StatisticTotals.arrays():
        _frozen(getattr(totals, array))
    return totals


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
