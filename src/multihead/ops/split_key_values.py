"""Keys and values whose heads are held apart, and attention to them part by part.

Shape suffixes: b batch, h query head, g KV head, q query row, k key column, d width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..masks import Causal, Dense, Mask, Window
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
        windows: of each part the window that its cache has applied already; None for none.
    """

    heads: tuple[tuple[int, ...], ...] = ()
    parts: tuple[KeyValues, ...] = ()
    windows: tuple[Window | None, ...] = ()

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


def split(
    heads: tuple[tuple[int, ...], ...],
    parts: Sequence[KeyValues],
    windows: tuple[Window | None, ...],
) -> SplitKeyValues:
    """SplitKeyValues of these parts."""
    made = object.__new__(SplitKeyValues)
    first = parts[0]
    made.__dict__.update(vars(held(key=first.key, value=first.value)))
    made.__dict__.update(heads=heads, parts=tuple(parts), windows=windows)
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
    indices, places = _places(key_values.heads, group, query_bhqd.device)
    outputs = []
    for index, part, window in zip(indices, key_values.parts, key_values.windows, strict=True):
        own = None if rule is None else mask_of_heads(rule, index)
        if bias is None and query_bhqd.shape[2] == 1 and _hides_nothing(own, window):
            own, part = None, held(key=part.key, value=part.value)
        outputs.append(
            attend(
                _heads_of(query_bhqd, index),
                part,
                mask=own,
                bias=_bias_of_heads(bias, index),
                sinks=None if sinks is None else sinks.index_select(0, index),
                **options,
            )
        )
    joined = torch.cat(outputs, dim=1)
    return joined if places is None else joined.index_select(1, places)


@lru_cache(maxsize=256)
def _places(
    heads: tuple[tuple[int, ...], ...], group: int, device: torch.device
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """The query heads of each part, and where each head is once the parts stand in a row.

    None where they stand in order.
    """
    # Kept from call to call, whatever mode the first was in.
    with torch.inference_mode(False):
        order = [[g * group + member for g in part for member in range(group)] for part in heads]
        indices = tuple(torch.tensor(part, device=device) for part in order)
        places = torch.cat(indices).argsort()
        in_order = places.tolist() == list(range(len(places)))
        return indices, None if in_order else places


def _heads_of(query_bhqd: Tensor, index: Tensor) -> Tensor:
    """These heads; a view where they stand side by side."""
    if query_bhqd.device.type == "cpu":  # elsewhere a look at the index would wait
        first, last = int(index[0]), int(index[-1])
        if last - first + 1 == len(index):
            return query_bhqd.narrow(1, first, len(index))
    return query_bhqd.index_select(1, index)


def _hides_nothing(mask: Mask | None, window: Window | None) -> bool:
    """Whether the newest query sees all that a part holds: `window`, its cache's, has done it."""
    if isinstance(mask, Intersection):
        return all(_hides_nothing(rule, window) for rule in mask.masks)
    if mask is None or type(mask) is Causal:
        return True
    if type(mask) is not Window or mask.right not in (None, 0):
        return False
    if mask.left is None or window is None or isinstance(mask.left, Tensor):
        return mask.left is None
    return mask.left == window.left and mask.keep_first == window.keep_first


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
