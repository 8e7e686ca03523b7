"""What of a model is watched: which statistics, layers and heads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import nn

from ...errors import ArgumentError
from .statistics import asked_of_forward, checked_statistics

Keep = Literal["weights"]


@dataclass(frozen=True)
class Choice:
    """`layers` None stands for all; else for each module whether it is in one that was chosen.

    `heads` None stands for all.
    """

    statistics: tuple[str, ...]
    layers: frozenset[str] | None
    heads: tuple[int, ...] | None
    keep_weights: bool

    @property
    def from_forward(self) -> tuple[str, ...]:
        """What the forward pass must yield."""
        asked = asked_of_forward(self.statistics)
        return asked if asked and not self.keep_weights else tuple({"lse", *asked})

    def takes(self, layer: str) -> bool:
        """Whether the module named `layer` is watched."""
        return self.layers is None or layer in self.layers

    def heads_of(self, layer: str, heads: int) -> tuple[int, ...]:
        """The heads that are watched of a layer's; ArgumentError where it lacks one of them."""
        if self.heads is None:
            return tuple(range(heads))
        if self.heads[-1] >= heads:
            raise ArgumentError(
                f"heads names head {self.heads[-1]}, but {layer or 'the model'} has {heads} heads, "
                f"0 to {heads - 1}."
            )
        return self.heads


def choose(
    model: nn.Module,
    statistics: Sequence[str] | str | None,
    layers: Sequence[str | int] | str | int | None,
    heads: Sequence[int] | int | None,
    keep: Keep | None,
) -> Choice:
    """Check what `watch` was asked for. Raises ArgumentError."""
    if keep not in (None, "weights"):
        raise ArgumentError(f"keep must be 'weights' or None; got {keep!r}.")
    names = checked_statistics(statistics)
    if not names and keep is None:
        raise ArgumentError(
            "Nothing is asked for: name statistics, leave them out for all, or pass keep='weights'."
        )
    return Choice(
        statistics=names,
        layers=None if layers is None else _modules(model, layers),
        heads=None if heads is None else _heads(heads),
        keep_weights=keep is not None,
    )


def _modules(model: nn.Module, layers: Sequence[str | int] | str | int) -> frozenset[str]:
    asked = _several(layers, "layers", "names of modules or numbers of blocks")
    if not asked:
        raise ArgumentError("layers is empty; leave it out for all of them.")
    names = [name for name, _ in model.named_modules()]
    blocks = _blocks(names)
    found: set[str] = set()
    for layer in asked:
        if isinstance(layer, int) and not isinstance(layer, bool):
            inside = blocks.get(layer, [])
            known = (
                f"Its blocks are numbered {_listed(sorted(blocks))}" if blocks else "It has none"
            )
        else:
            inside = [it for it in names if it == layer or it.startswith(f"{layer}.")]
            known = f"Its modules are {_listed([name for name in names if name])}"
        if not inside:
            raise ArgumentError(
                f"layers names {layer!r}, which {type(model).__name__} has not. {known}."
            )
        found.update(inside)
    return frozenset(found)


def _blocks(names: Sequence[str]) -> Mapping[int, list[str]]:
    """The modules of each numbered block: the first number in a module's name is its block's."""
    blocks: dict[int, list[str]] = {}
    for name in names:
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        if number is not None:
            blocks.setdefault(int(number[1]), []).append(name)
    return blocks


def _heads(heads: Sequence[int] | int) -> tuple[int, ...]:
    asked = _several(heads, "heads", "numbers of heads, from 0")
    wrong = [it for it in asked if isinstance(it, bool) or not isinstance(it, int) or it < 0]
    if wrong or not asked:
        got = repr(wrong[0]) if wrong else "none"
        raise ArgumentError(f"heads must be numbers of heads, from 0; got {got}.")
    return tuple(sorted(set(asked)))


def _several(given: Any, name: str, kind: str) -> tuple[Any, ...]:
    """One or several, numpy's integers as Python's."""
    if isinstance(given, str | int | np.integer):
        given = (given,)
    if not isinstance(given, Iterable):
        raise ArgumentError(f"{name} must be {kind}; got {given!r}.")
    return tuple(int(it) if isinstance(it, np.integer) else it for it in given)


def _listed(names: Sequence[object]) -> str:
    """Some of them, where there are many."""
    shown = [str(name) for name in names]
    if len(shown) > 12:
        shown = [*shown[:10], "...", shown[-1]]
    return ", ".join(shown)
