"""Which heads attend alike: the distance between their pooled maps, and groups of near ones.

Shape suffixes: l layer, h head, r row bin, c column bin, n a head of any layer, x a cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ...errors import ArgumentError
from ..inspecting.inspection import Inspection

Linkage = Literal["average", "single", "complete"]
Maps = Inspection | Tensor | np.ndarray[Any, Any]
Head = tuple[int, int]

# The sums of rows of float32 or half-precision maps stray from 1 by no more than this.
_ROUNDING = 1e-2
_SHOWN = 10


@dataclass(frozen=True, eq=False)
class Group:
    """Heads that attend alike.

    Attributes:
        heads: (layer, head) of each, in the model's order.
        center: the one with the least mean distance to the others.
        diameter: the largest distance between two of them.
    """

    heads: tuple[Head, ...]
    center: Head
    diameter: float

    def __len__(self) -> int:
        return len(self.heads)

    def __str__(self) -> str:
        shown = ", ".join(_name(it) for it in self.heads[:_SHOWN])
        more = len(self.heads) - _SHOWN
        shown += f" and {more} more" if more > 0 else ""
        return f"{len(self)} like {_name(self.center)}, at most {self.diameter:.3f} apart: {shown}"


@dataclass(frozen=True, eq=False)
class Similarity:
    """How far the maps of any two heads are from each other.

    Attributes:
        heads: (layer, head) of each row and column of `distances`; pruned heads are left out.
        distances: float64 [heads, heads], symmetric, 0 (the same map) to 1 (no cell in common).
        texts: how many texts the maps were taken of.
    """

    heads: tuple[Head, ...]
    distances: np.ndarray[Any, np.dtype[np.float64]]
    texts: int

    def distance(self, one: Head, other: Head) -> float:
        """Between two heads (layer, head). Raises ArgumentError for a head that there is not."""
        return float(self.distances[self._place(one), self._place(other)])

    def nearest(self, head: Head, count: int = 5) -> list[tuple[Head, float]]:
        """The `count` other heads that attend most like `head`, with their distances."""
        place = self._place(head)
        order = np.argsort(self.distances[place], kind="stable")
        others = [int(it) for it in order if it != place]
        return [(self.heads[it], float(self.distances[place, it])) for it in others[:count]]

    def groups(self, threshold: float = 0.2, linkage: Linkage = "average") -> list[Group]:
        """Groups of at least two heads, the largest first.

        The two nearest clusters are joined until none are nearer than `threshold`, or as near. The
        distance of two clusters is that of their heads on "average", of the two nearest heads
        ("single": chains grow long) or of the two farthest ("complete": no two heads of a group
        are farther apart than `threshold`). The default of 0.2 is a choice, not a finding: heads
        whose maps differ by 0.04 bits. Name the threshold wherever you name the groups.

        Raises ArgumentError for a threshold outside of 0 to 1 and for another linkage.
        """
        if not 0 <= threshold <= 1:
            raise ArgumentError(f"threshold must be a distance from 0 to 1; got {threshold}.")
        if linkage not in get_args(Linkage):
            kinds = ", ".join(get_args(Linkage))
            raise ArgumentError(f"linkage must be one of {kinds}; got {linkage!r}.")
        found = [self._group(it) for it in clusters(self.distances, threshold, linkage)]
        return sorted((it for it in found if len(it) > 1), key=lambda it: -len(it))

    def table(self, threshold: float = 0.2, linkage: Linkage = "average") -> str:
        """The groups as lines of text, with what was measured on how many texts."""
        found = self.groups(threshold, linkage)
        grouped = sum(map(len, found))
        texts = "one text" if self.texts == 1 else f"{self.texts} texts"
        first = (
            f"{len(self.heads)} heads on {texts}, groups at {threshold:g} ({linkage} linkage): "
            f"{len(found)}, of {grouped} heads; {len(self.heads) - grouped} stand alone"
        )
        return "\n".join([first, *(f"  {it}" for it in found)])

    def __str__(self) -> str:
        return self.table()

    def _group(self, places: Sequence[int]) -> Group:
        inside = self.distances[np.ix_(places, places)]
        center = int(inside.sum(0).argmin())
        heads = tuple(self.heads[it] for it in places)
        return Group(heads, heads[center], float(inside.max()))

    def _place(self, head: Head) -> int:
        if head not in self.heads:
            raise ArgumentError(
                f"There is no head {head!r}; heads are (layer, head), from {self.heads[0]} to "
                f"{self.heads[-1]}."
            )
        return self.heads.index(head)


@torch.no_grad()
def similarity(maps: Maps | Sequence[Maps]) -> Similarity:
    """How much alike the heads of a model attend: the Jensen-Shannon distance of their maps.

    Args:
        maps: of one text or of several: an inspection that was made with report=True, or a "mass"
            map [layers, heads, rows, columns], as `attention_map` gives for each layer. NaN are
            cells that the mask hides; a head of NaN alone (pruned) is left out.

    A row of a map is a distribution over the bins of keys; what a learned sink takes of it is one
    more outcome. The distance is the root of the Jensen-Shannon divergence in bits (Lin 1991),
    averaged over the rows, and over the texts where there are several: a metric from 0 to 1. It
    knows where a head looks, not what it moves from there; heads that give nearly everything to
    the first key are near each other whatever they do with the rest.

    Time is quadratic in the number of heads: 270 heads of 64 bins in about a second.

    Raises ArgumentError for inspections without maps, for maps of other shapes or of different
    heads, and for numbers that are no "mass" maps.
    """
    given = [maps] if isinstance(maps, Inspection | Tensor | np.ndarray) else list(maps)
    if not given:
        raise ArgumentError("maps is empty; give the map of at least one text.")
    tables_lhrc = [_checked(it) for it in given]
    shapes = {tuple(it.shape[:2]) for it in tables_lhrc}
    if len(shapes) > 1:
        raise ArgumentError(
            "The maps of several texts must have the same layers and heads; got "
            f"{' and '.join(f'{layers} x {heads}' for layers, heads in sorted(shapes))}."
        )
    known_lh = torch.stack([~it.isnan().all(-1).all(-1) for it in tables_lhrc]).all(0)
    heads = tuple((int(layer), int(head)) for layer, head in known_lh.nonzero())
    if not heads:
        raise ArgumentError("The maps hold no head: every cell of every one is NaN.")
    divergence_nn = torch.zeros(len(heads), len(heads), dtype=torch.float64)
    for table_lhrc in tables_lhrc:
        divergence_nn += _divergences(table_lhrc[known_lh]) / len(tables_lhrc)
    distances = divergence_nn.clamp(0, 1).sqrt().numpy()
    distances.flags.writeable = False
    return Similarity(heads, distances, len(tables_lhrc))


def clusters(
    distances: np.ndarray[Any, np.dtype[np.float64]], threshold: float, linkage: Linkage
) -> list[list[int]]:
    """Agglomerative clustering, [n, n] to ascending places of each cluster, ordered by the first.

    Equally near pairs are joined in the order of their places.
    """
    between = distances.astype(np.float64)
    np.fill_diagonal(between, np.inf)
    members = [[place] for place in range(len(between))]
    while len(between):
        one, other = sorted(map(int, np.unravel_index(between.argmin(), between.shape)))
        if between[one, other] > threshold:
            break
        rows = between[one], between[other]
        sizes = len(members[one]), len(members[other])
        if linkage == "average":
            joined = (sizes[0] * rows[0] + sizes[1] * rows[1]) / sum(sizes)
        else:
            joined = (np.minimum if linkage == "single" else np.maximum)(*rows)
        joined[one] = np.inf
        between[one], between[:, one] = joined, joined
        between[other], between[:, other] = np.inf, np.inf
        members[one] = sorted(members[one] + members[other])
        members[other] = []
    return [it for it in members if it]


def _checked(maps: Maps) -> Tensor:
    """The map of one text: float64 [l, h, r, c]."""
    if isinstance(maps, Inspection):
        if "mass" not in maps.maps:
            raise ArgumentError(
                "The inspection has no maps; make it with inspect_model(..., report=True)."
            )
        maps = maps.maps["mass"]
    if not isinstance(maps, Tensor | np.ndarray) or maps.ndim != 4:
        got = list(maps.shape) if isinstance(maps, Tensor | np.ndarray) else type(maps).__name__
        raise ArgumentError(
            f"A map must be [layers, heads, rows, columns]; got {got}. Stack what attention_map "
            "gives for each layer: torch.cat([map_of_layer, ...])."
        )
    table_lhrc = torch.as_tensor(maps).detach().double().cpu()
    shown = table_lhrc.nan_to_num(0.0)
    if bool((shown < 0).any()) or bool((shown.sum(-1) > 1 + _ROUNDING).any()):
        raise ArgumentError(
            'similarity compares "mass" maps, whose rows sum to 1; these have cells below 0 or '
            'rows that sum to more. Ask for attention_map(..., pool="mass").'
        )
    return table_lhrc


def _divergences(map_nrc: Tensor) -> Tensor:
    """The mean over rows of the Jensen-Shannon divergence in bits, float64 [n, n]."""
    live_r = ~map_nrc.isnan().all(-1).all(0)
    cells_nrc = map_nrc[:, live_r].nan_to_num(0.0)
    total_nr1 = cells_nrc.sum(-1, keepdim=True)
    # Rounding must not become a 65th outcome: what is missing of 1 counts where a sink took it.
    missing_nr1 = (1 - total_nr1).masked_fill(total_nr1 > 1 - 1e-4, 0.0)
    whole_nrc = torch.cat([cells_nrc, missing_nr1], -1)
    whole_nrc /= whole_nrc.sum(-1, keepdim=True)
    cells_nx = whole_nrc.flatten(1)
    cells_nx = cells_nx[:, (cells_nx > 0).any(0)]
    logs_nx = torch.xlogy(cells_nx, cells_nx)
    found_nn = cells_nx.new_zeros(len(cells_nx), len(cells_nx))
    for place in range(len(cells_nx) - 1):
        rest = slice(place + 1, None)
        middle = (cells_nx[rest] + cells_nx[place]) / 2
        own = (logs_nx[rest] + logs_nx[place]) / 2
        found_nn[place, rest] = (own - torch.xlogy(middle, middle)).sum(-1)
    found_nn = found_nn + found_nn.T
    bits: Tensor = found_nn / (math.log(2.0) * int(live_r.sum()))
    return bits


def _name(head: Head) -> str:
    return f"L{head[0]}H{head[1]}"
