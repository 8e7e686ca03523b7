"""Which heads a layer's calls have, by the numbers that they had before any were pruned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ...integrations.attention_layers import PRUNED
from ...nn import MultiHeadAttention, Pruned
from .choice import Choice


@dataclass(frozen=True)
class Numbers:
    """The heads of one layer that are watched.

    Attributes:
        heads: their first numbers; those that were pruned are among them.
        taken: places among the heads of a call of those that are there.
        columns: their places in `heads`.
    """

    heads: tuple[int, ...]
    taken: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def of(cls, choice: Choice, layer: str, count: int, pruned: Pruned | None) -> Numbers:
        """Of a module whose calls have `count` heads; ArgumentError for a choice it never had."""
        pruned = heads_before(pruned, count)
        heads = choice.heads_of(layer, pruned.num_heads)
        column_of = {head: column for column, head in enumerate(heads)}
        found = [(place, head) for place, head in enumerate(pruned.kept) if head in column_of]
        return cls(
            heads=heads,
            taken=tuple(place for place, _ in found),
            columns=tuple(column_of[head] for _, head in found),
        )


def heads_before(pruned: Pruned | None, count: int) -> Pruned:
    """What a module whose calls have `count` heads had at first; a record of others is not its."""
    if pruned is None or len(pruned.kept) != count:
        return Pruned(count, count)
    return pruned


def pruned_layers(model: nn.Module) -> Mapping[str, Pruned]:
    """What each layer of a model has lost, by the module's name; those that are whole left out."""
    found = {}
    for name, module in model.named_modules():
        ours = isinstance(module, MultiHeadAttention)
        pruned = module.pruned if ours else getattr(module, PRUNED, None)
        if isinstance(pruned, Pruned) and pruned.heads:
            found[name] = pruned
    return found
