"""Keys and values whose heads are held apart, and attention to them part by part.

Shape suffixes: b batch, h query head, g KV head, q query row, k key column, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..masks import Dense, Mask, Window
from ..masks.rules import Intersection
from . import dispatch
from .key_values import KeyValues, held
from .problem import ALiBi, checked_mask

UNBOUNDED = 1 << 30
"""A window's `left` from which on it bounds nothing: of heads that see all, in a tensor [H]."""


@dataclass(frozen=True, eq=False)
class SplitKeyValues(KeyValues):
    """KeyValues of a layer some of whose heads hold other tokens than the others.

    `attention` attends to each part by itself. Masks, biases and sinks are given as for one call
    with all heads.

    Attributes:
        heads: the KV heads of each part; together each head once.
        parts: their keys and values.
    """

    heads: tuple[tuple[int, ...], ...] = ()
    parts: tuple[KeyValues, ...] = ()

    @property
    def key_length(self) -> int:
        """Lk of the part that holds most."""
        return max(part.key_length for part in self.parts)

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Refused: the parts differ in length."""
        raise ArgumentError(_ONE_PIECE)

    stand_ins = tensors


_ONE_PIECE = (
    "these keys are held in parts of different length (SplitKVCache), and give no statistics, maps "
    "or weights: attention() alone reads them. Use a KVCache here."
)


def split(heads: Sequence[tuple[int, ...]], parts: Sequence[KeyValues]) -> SplitKeyValues:
    """SplitKeyValues of these parts."""
    made = object.__new__(SplitKeyValues)
    first = parts[0]
    made.__dict__.update(vars(held(key=first.key, value=first.value)))
    made.__dict__.update(heads=tuple(heads), parts=tuple(parts))
    return made


def refuse_split(key: object) -> None:
    """Raise ArgumentError for keys that are held in parts."""
    if isinstance(key, SplitKeyValues):
        raise ArgumentError(_ONE_PIECE)


def attend_to_parts(
    attend: Callable[..., Tensor],
    query_bhqd: Tensor,
    key_values: SplitKeyValues,
    *,
    mask: Mask | Tensor | None,
    bias: Tensor | ALiBi | None,
    sinks: Tensor | None,
    **options: Any,
) -> Tensor:
    """`attend` to each part with its own query heads; the heads come back in their order."""
    if dispatch.observer.get() is not None:
        raise ArgumentError(
            "heads whose keys are held in parts (SplitKVCache) are not watched. Watch the model "
            "with caches of kind 'growing': what its heads do is the same."
        )
    kv_heads = sum(map(len, key_values.heads))
    if query_bhqd.shape[1] % kv_heads:
        raise ArgumentError(
            f"{query_bhqd.shape[1]} query heads can't share {kv_heads} KV heads evenly: the number "
            "of KV heads must divide the number of query heads."
        )
    group = query_bhqd.shape[1] // kv_heads
    rule = None if mask is None else checked_mask(mask)
    outputs, order = [], []
    for kv_part, held_part in zip(key_values.heads, key_values.parts, strict=True):
        heads = [g * group + member for g in kv_part for member in range(group)]
        index = torch.tensor(heads, device=query_bhqd.device)
        order += heads
        outputs.append(
            attend(
                query_bhqd.index_select(1, index),
                held_part,
                mask=None if rule is None else mask_of_heads(rule, index),
                bias=_bias_of_heads(bias, index),
                sinks=None if sinks is None else sinks.index_select(0, index),
                **options,
            )
        )
    places = torch.tensor(order, device=query_bhqd.device).argsort()
    return torch.cat(outputs, dim=1).index_select(1, places)


def mask_of_heads(mask: Mask, heads: Tensor) -> Mask:
    """The mask as these heads have it: what differs by head is selected."""
    if isinstance(mask, Intersection):
        return Intersection(tuple([mask_of_heads(rule, heads) for rule in mask.masks]))
    if isinstance(mask, Dense) and mask.visible.shape[1] > 1:
        return Dense(mask.visible.index_select(1, heads.to(mask.visible.device)))
    if isinstance(mask, Window):
        left, right = _bound(mask.left, heads), _bound(mask.right, heads)
        if isinstance(left, int) and left >= UNBOUNDED:
            left = None
        return replace(mask, left=left, right=right)
    return mask


def _bound(bound: int | Tensor | None, heads: Tensor) -> int | Tensor | None:
    """The bound of these heads; one number where they share it, which kernels read best."""
    if not isinstance(bound, Tensor):
        return bound
    selected = bound.index_select(0, heads.to(bound.device))
    numbers = set(selected.tolist())
    return numbers.pop() if len(numbers) == 1 else selected


def _bias_of_heads(bias: Tensor | ALiBi | None, heads: Tensor) -> Tensor | ALiBi | None:
    if isinstance(bias, ALiBi):
        return ALiBi(bias.slopes.index_select(0, heads))
    if bias is None or bias.ndim != 4 or bias.shape[1] == 1:
        return bias
    return bias.index_select(1, heads)
