"""Two records head by head: what differs most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ArgumentError
from .statistics import checked_statistics

if TYPE_CHECKING:
    from .record import HeadRecord


@dataclass(frozen=True)
class HeadDifference:
    """One statistic of one head in two records.

    `difference` is `there - here`; `spreads` is its size over the standard deviation of that
    statistic among all heads of both records: what makes different statistics comparable.
    """

    layer: int
    head: int
    statistic: str
    here: float
    there: float
    difference: float
    spreads: float

    def __str__(self) -> str:
        return (
            f"layer {self.layer} head {self.head} {self.statistic}: {self.here:.4g} -> "
            f"{self.there:.4g} ({self.difference:+.4g}, {self.spreads:.1f} spreads)"
        )


@dataclass(frozen=True)
class Comparison:
    """Differences between two records, the largest in spreads first; a sequence of them."""

    here: str
    there: str
    differences: tuple[HeadDifference, ...]

    def __len__(self) -> int:
        return len(self.differences)

    def __getitem__(self, place: int) -> HeadDifference:
        return self.differences[place]

    def __iter__(self) -> Iterator[HeadDifference]:
        return iter(self.differences)

    def of(self, statistic: str) -> tuple[HeadDifference, ...]:
        """Those of one statistic, the largest first."""
        return tuple(it for it in self.differences if it.statistic == statistic)

    def __str__(self) -> str:
        shown = [f"{self.here} -> {self.there}", *(f"  {it}" for it in self.differences[:10])]
        more = len(self.differences) - 10
        return "\n".join([*shown, f"  and {more:,} more"] if more > 0 else shown)


def compare(
    here: HeadRecord, there: HeadRecord, statistics: Sequence[str] | str | None
) -> Comparison:
    """`HeadRecord.compare`."""
    if here.heads != there.heads:
        raise ArgumentError(
            "Records are compared head by head, so they must have the same layers and heads; got "
            f"{_shape(here)} and {_shape(there)}. Watch both with the same layers=[...] and "
            "heads=[...]."
        )
    names = checked_statistics(statistics)
    common = [name for name in names if name in here.totals and name in there.totals]
    missing = [name for name in names if name not in common]
    if not common or (statistics is not None and missing):
        raise ArgumentError(
            f"Both records must have {', '.join(missing)}; they have {', '.join(here.names)} and "
            f"{', '.join(there.names)}."
        )
    tables = here.statistics, there.statistics
    both = (here.queries > 0) & (there.queries > 0)
    found = []
    for name in common:
        spread = float(np.nanstd(np.stack([table[name] for table in tables])))
        for layer, column in here.places():
            mine, yours = (float(table[name][layer, column]) for table in tables)
            if not both[layer, column] or (np.isnan(mine) and np.isnan(yours)):
                continue
            difference = yours - mine
            # Without a spread there is no difference, or one of the two is NaN.
            spreads = abs(difference) / spread if difference and spread else abs(difference)
            found.append(
                HeadDifference(
                    layer, here.heads[layer][column], name, mine, yours, difference, spreads
                )
            )
    found.sort(key=lambda it: np.inf if np.isnan(it.spreads) else it.spreads, reverse=True)
    return Comparison(here.model, there.model, tuple(found))


def _shape(record: HeadRecord) -> str:
    counts = [len(heads) for heads in record.heads]
    each = str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))
    return f"{len(record.layers)} layers of {each} heads"
