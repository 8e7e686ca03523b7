"""How one parameter of ours is stored elsewhere, and moving whole state dicts either way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ModelError

State = dict[str, Tensor]


@dataclass(frozen=True)
class Rule:
    """One parameter of ours and the tensors that hold it elsewhere.

    Attributes:
        ours: its name in our model.
        theirs: the tensors whose rows, one after another, are its rows.
        rows: how many rows each of `theirs` has, where there are several.
        transposed: whether `theirs` hold a matrix as [in, out], where ours is [out, in].
        flattened: whether theirs is [1, n], where ours is [n].
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    transposed: bool = False
    flattened: bool = False

    def read(self, theirs: Sequence[Tensor]) -> Tensor:
        """Our parameter; a view of theirs where there is nothing to join."""
        parts = [part.t() if self.transposed else part for part in theirs]
        if self.flattened:
            parts = [part.flatten() for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, ours: Tensor) -> Sequence[Tensor]:
        """Their tensors, in the order of `theirs`, each contiguous."""
        parts = ours.split(self.rows) if self.rows else (ours,)
        if self.flattened:
            parts = tuple(part[None] for part in parts)
        return [(part.t() if self.transposed else part).contiguous() for part in parts]


def under(
    ours: str,
    theirs: str,
    names: Iterable[tuple[str, str]],
    *,
    bias: bool = False,
    transposed: bool = False,
) -> list[Rule]:
    """Rules for linear layers and norms: pairs of names under two prefixes, weights and biases."""
    found = []
    for our_name, their_name in names:
        weight = Rule(
            f"{ours}{our_name}.weight", (f"{theirs}{their_name}.weight",), transposed=transposed
        )
        found.append(weight)
        if bias:
            found.append(Rule(f"{ours}{our_name}.bias", (f"{theirs}{their_name}.bias",)))
    return found


def joined(
    ours: str, theirs: str, names: Sequence[str], rows: Sequence[int], *, bias: bool
) -> list[Rule]:
    """Rules for one linear layer of ours that is several elsewhere."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [
        Rule(f"{ours}.{kind}", tuple(f"{theirs}{name}.{kind}" for name in names), tuple(rows))
        for kind in kinds
    ]


def read_state(rules: Sequence[Rule], theirs: Mapping[str, Tensor]) -> State:
    """Our state dict from theirs, of which each tensor is looked up once.

    Raises:
        ModelError: a tensor that no rule asks for, or one that is missing.
    """
    asked = {name for rule in rules for name in rule.theirs}
    given = set(theirs)  # a mapping's keys would look each tensor up to compare them
    unknown = sorted(given - asked)
    if unknown:
        raise ModelError(
            f"the checkpoint holds {len(unknown)} tensors that this architecture does not have, "
            f"{unknown[0]} first; leaving them out would change what the model computes."
        )
    missing = sorted(asked - given)
    if missing:
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors, {missing[0]} first.")
    return {rule.ours: rule.read([theirs[name] for name in rule.theirs]) for rule in rules}


def write_state(rules: Sequence[Rule], ours: Mapping[str, Tensor]) -> State:
    """Their state dict from ours."""
    theirs: State = {}
    for rule in rules:
        theirs |= zip(rule.theirs, rule.write(ours[rule.ours]), strict=True)
    return theirs


class Renamed(Mapping[str, Tensor]):
    """Tensors of a mapping under other names, looked up only when they are asked for.

    Args:
        tensors: the mapping; reading a tensor of it may read a file.
        names: its name for each of ours.
    """

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._tensors = tensors
        self._names = names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
