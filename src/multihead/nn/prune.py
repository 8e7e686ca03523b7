"""Taking heads out of a layer of attention for good.

Heads keep the numbers that they had at first: after head 1 of four is gone, the others are still 0,
2 and 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, DtypeError
from ..masks import Window

if TYPE_CHECKING:
    from .multi_head import MultiHeadAttention


@dataclass(frozen=True)
class Pruned:
    """What a layer had before heads were taken out, and which of them are gone.

    Attributes:
        num_heads: query heads at first.
        num_kv_heads: key and value heads at first.
        heads: the query heads that are gone, ascending, by their first numbers.
    """

    num_heads: int
    num_kv_heads: int
    heads: tuple[int, ...] = ()

    @property
    def group(self) -> int:
        """How many query heads read one KV head at first."""
        return self.num_heads // self.num_kv_heads

    @property
    def kept(self) -> tuple[int, ...]:
        """The query heads that are left, by their first numbers."""
        gone = set(self.heads)
        return tuple(head for head in range(self.num_heads) if head not in gone)

    @property
    def kept_kv(self) -> tuple[int, ...]:
        """The KV heads that are left: those that some query head still reads."""
        return tuple(sorted({head // self.group for head in self.kept}))

    def without(self, heads: Iterable[int], layer: str = "the layer") -> Pruned:
        """The same with more heads gone; `layer` is what errors call it.

        Raises:
            ArgumentError: a head that there is not, or KV groups that would keep different numbers
                of query heads.
        """
        asked = sorted(set(heads))
        kept = set(self.kept)
        for head in asked:
            if head not in kept:
                raise ArgumentError(self._no_such(head, layer))
        after = replace(self, heads=tuple(sorted({*self.heads, *asked})))
        sizes = [sum(head // self.group == kv for head in after.kept) for kv in after.kept_kv]
        if len(set(sizes)) > 1:
            raise ArgumentError(
                f"{layer} would keep KV groups of {_listed(sorted(set(sizes)))} query heads, but "
                f"every KV head must serve as many. Its groups are {self._groups()}: remove whole "
                "groups, or as many heads of each."
            )
        return after

    def _no_such(self, head: int, layer: str) -> str:
        if head in self.heads:
            left = f"it has heads {_listed(self.kept)}" if self.kept else "it has none left"
            return f"head {head} of {layer} is gone already; {left}."
        return f"{layer} has no head {head}; its heads are numbered 0 to {self.num_heads - 1}."

    def _groups(self) -> str:
        groups = [[h for h in self.kept if h // self.group == kv] for kv in self.kept_kv]
        return ", ".join("{" + ", ".join(map(str, group)) + "}" for group in groups)


def prune_heads(layer: MultiHeadAttention, heads: Iterable[int]) -> None:
    """Take query heads out of a layer, in place, and with them what only they have.

    Rows of the projections, columns of the output projection, sinks and per-head windows go; a KV
    head goes with the last query head that reads it. The result is that of the whole layer with
    these heads' outputs set to zero before `out_proj`. A layer whose heads are all gone writes its
    output bias. `layer.pruned` tells what is gone and numbers what is left; a bias or ALiBi slopes
    that calls bring are then for `layer.pruned.kept` alone: `slopes[list(layer.pruned.kept)]`.

    Parameters are replaced: make an optimizer anew afterwards.

    Args:
        layer: its class stays; projections stay the modules that they are.
        heads: by the numbers that they had before any were taken out.

    Raises:
        ArgumentError: a head that there is not, or KV groups that would keep different numbers of
            query heads.
        DtypeError: a projection that is no `torch.nn.Linear`, such as an adapter.
    """
    before = pruned_of(layer)
    after = before.without(heads)
    check_prunable(layer)
    query = places(before.kept, after.kept)
    kv = places(before.kept_kv, after.kept_kv)
    query_rows = lanes(query, layer.head_dim)
    kv_rows = torch.cat(
        (
            lanes(kv, layer.head_dim),
            lanes(kv, layer.value_dim) + len(before.kept_kv) * layer.head_dim,
        )
    )
    if layer.context_dim is None:
        rows = torch.cat((query_rows, kv_rows + len(before.kept) * layer.head_dim))
        keep_outputs(layer.qkv_proj, rows)
    else:
        keep_outputs(layer.q_proj, query_rows)
        keep_outputs(layer.kv_proj, kv_rows)
    keep_inputs(layer.out_proj, lanes(query, layer.value_dim))
    if layer.sinks is not None:
        layer.sinks = selected(layer.sinks, torch.tensor(query, dtype=torch.long), 0)
    layer.window = window_of_heads(layer.window, query)
    layer.num_heads, layer.num_kv_heads = len(query), len(kv)
    layer.pruned = after


def check_prunable(layer: MultiHeadAttention) -> None:
    """Raise DtypeError where a projection is no `torch.nn.Linear` with plain weights."""
    linears = [layer.qkv_proj] if layer.context_dim is None else [layer.q_proj, layer.kv_proj]
    for linear in (*linears, layer.out_proj):
        check_plain(linear)


def pruned_of(layer: MultiHeadAttention) -> Pruned:
    """The record of a layer, also of one that has all its heads."""
    return layer.pruned or Pruned(layer.num_heads, layer.num_kv_heads)


def places(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Where the numbers `after` stand among `before`."""
    where = {number: place for place, number in enumerate(before)}
    return [where[number] for number in after]


def lanes(heads: Sequence[int], width: int) -> Tensor:
    """The rows that heads of `width` have in a projection, int64 [heads * width]."""
    starts = torch.tensor(heads, dtype=torch.long)[:, None] * width
    return (starts + torch.arange(width)).flatten()


def keep_outputs(linear: nn.Linear, rows: Tensor) -> None:
    """Keep these rows of a linear layer's weight and bias, in place."""
    linear.weight = selected(linear.weight, rows, 0)
    if linear.bias is not None:
        linear.bias = selected(linear.bias, rows, 0)
    linear.out_features = len(rows)


def keep_inputs(linear: nn.Linear, columns: Tensor) -> None:
    """Keep these columns of a linear layer's weight, in place."""
    linear.weight = selected(linear.weight, columns, 1)
    linear.in_features = len(columns)


def selected(parameter: Tensor, index: Tensor, axis: int) -> nn.Parameter:
    """A parameter of its own with a part of another one's numbers."""
    part = parameter.detach().index_select(axis, index.to(parameter.device))
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def check_plain(linear: nn.Module) -> None:
    """Raise DtypeError for what is no linear layer with a weight of its own."""
    if isinstance(linear, nn.Linear) and type(linear.weight) is nn.Parameter:
        return
    raise DtypeError(
        f"heads are pruned out of torch.nn.Linear with plain weights; got {type(linear).__name__}. "
        "Merge adapters and remove parametrizations first; quantize afterwards."
    )


def window_of_heads(window: Window | None, heads: Sequence[int]) -> Window | None:
    """A window for these heads: bounds that differ by head are selected."""
    if window is None:
        return None

    def part(bound: int | Tensor | None) -> int | Tensor | None:
        if not isinstance(bound, Tensor) or bound.ndim == 0:
            return bound
        return bound[torch.tensor(heads, dtype=torch.long, device=bound.device)]

    return replace(window, left=part(window.left), right=part(window.right))


def _listed(numbers: Sequence[int]) -> str:
    texts = list(map(str, numbers))
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
