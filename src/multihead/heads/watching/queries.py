"""Which queries of a call are real, which key stands first in a query's text, and which before it.

Shape suffixes: b batch, h head, q query row, k key column.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from ...masks import MaskParts
from ...ops.cells import cells_at, visible_at
from ...ops.problem import Logits
from ...ops.scores import bias_rectangle
from ...ops.sweep import visible_keys
from ...ops.tracing import intercepted
from .histogram import Counts

T = TypeVar("T", bound=Logits)

# Masks of one pass are of few kinds; a decoding step has new ones, as of another length.
_MOST_KNOWN = 4
_known: dict[Hashable, Queries] = {}


@dataclass(frozen=True, eq=False)
class Queries:
    """The queries of one call and the columns that are named after them.

    `first`, `own` and `previous` are int64 [B|1, Lq]: the columns of the first key of each query's
    text, of its own key (in self-attention) and of the key before that; -1 where no column is.
    `keys` is int64
    [B|1, H|1, Lq], how many keys a query sees; `real` is bool of that shape.
    """

    first: Tensor
    own: Tensor
    previous: Tensor
    keys: Tensor
    real: Tensor

    @property
    def starts(self) -> Tensor:
        """Whether a query is the first of a text: bool [B|1, Lq]."""
        return self.real.any(1) & (self.first == self.own) & (self.own >= 0)

    @cached_property
    def tokens(self) -> int:
        """How many queries are real for any head, in the samples that are told apart."""
        return int(self.real.any(1).sum())

    @cached_property
    def texts(self) -> int:
        """How many of them begin a text."""
        return int(self.starts.sum())

    @cached_property
    def rows(self) -> int:
        """How many of these samples have a real query."""
        return int(self.real.any(-1).any(-1).sum())

    @cached_property
    def by_head(self) -> Counts:
        """How many queries are real for each head that is told apart: int64 [H|1]."""
        counts: Counts = self.real.sum((0, 2)).cpu().numpy()
        return counts


def queries_of(call: Logits, *, self_attention: bool = True) -> Queries:
    """The queries of `call`, in which a bias hides by -inf alone: see `with_hiding_bias`.

    * A query is real if it sees a key. In self-attention it must also have a key of its own that
      is no padding: one that no KeyPadding mask hides, and that a mask tensor or a bias does not
      hide from every query (if it lets any query see its own key).
    * The first key of a text is the sequence's first; its first visible one under KeyPadding; the
      first of the query's document under Documents; the one at position 0 under Positions. Where
      a tensor says who sees whom, a query that sees no key before its own begins a text.

    They are found once for all layers whose mask is the same few integers.
    """
    form = None if isinstance(call.bias, Tensor) else call.parts.closed_form
    if form is None or intercepted():
        return _found(call, self_attention=self_attention)
    key = form, call.query_length, call.key_length, call.query.device, self_attention
    known = _known.get(key)
    if known is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        with torch.inference_mode(False):  # they serve in whatever mode the next layer runs
            known = _known[key] = _found(call, self_attention=self_attention)
    return known


def _found(call: Logits, *, self_attention: bool) -> Queries:
    """`queries_of` a call that is not known."""
    own_bq = _own(call.parts)
    keys_bhq = visible_keys(call)
    real_bhq = keys_bhq > 0
    if self_attention:
        real_bhq = real_bhq & _own_key_is_real(call, own_bq)[:, None]
    return Queries(
        first=_first(call, own_bq),
        own=own_bq if self_attention else torch.full_like(own_bq, -1),
        previous=_previous(call.parts),
        keys=keys_bhq,
        real=real_bhq,
    )


def has_other_firsts(call: Logits) -> bool:
    """Whether `queries_of` may name another first key than the column `call.parts.first`."""
    parts = call.parts
    named = parts.query_ids is not None or parts.key_positions is not None
    return named or _says_who_sees_whom(call)


def with_hiding_bias(call: T) -> T:
    """`call` with -inf where its bias hides by the lowest number of its dtype, or nearly that."""
    if not isinstance(call.bias, Tensor):
        return call
    bias = call.bias.detach()
    hidden = bias <= torch.finfo(bias.dtype).min / 2
    return replace(call, bias=bias.masked_fill(hidden, -torch.inf)) if hidden.any() else call


def _says_who_sees_whom(call: Logits) -> bool:
    """Whether a tensor says what single queries see."""
    parts = call.parts
    return parts.ranges is not None or parts.dense is not None or isinstance(call.bias, Tensor)


def _positions(parts: MaskParts) -> Tensor:
    return parts.query_position(slice(0, parts.query_length))[:, 0]


def _own(parts: MaskParts) -> Tensor:
    position_bq = _positions(parts)
    if parts.key_positions is not None:
        return _column_of(parts.key_positions.long(), position_bq, parts.key_visible)
    inside = (position_bq >= 0) & (position_bq < parts.key_length)
    return torch.where(inside, position_bq, -1)


def _previous(parts: MaskParts) -> Tensor:
    position_bq = _positions(parts) - 1
    if parts.key_positions is not None:
        return _column_of(parts.key_positions.long(), position_bq, parts.key_visible)
    return torch.where(position_bq < parts.key_length, position_bq, -1)


def _first(call: Logits, own_bq: Tensor) -> Tensor:
    parts = call.parts
    if parts.query_ids is not None and parts.key_ids is not None:
        return _column_of(parts.key_ids.long(), parts.query_ids.long(), parts.key_visible)
    if parts.key_positions is not None:
        zeros_bq = torch.zeros_like(_positions(parts))
        return _column_of(parts.key_positions.long(), zeros_bq, parts.key_visible)
    first = torch.as_tensor(parts.first, device=own_bq.device).long().reshape(-1, 1)
    if not _says_who_sees_whom(call):
        return first.expand(-1, own_bq.shape[-1])
    lowest_bq = _lowest_seen(call)
    row_q = torch.arange(own_bq.shape[-1], device=own_bq.device)
    begins_bq = (lowest_bq == own_bq) & (own_bq >= 0)
    latest_bq = torch.where(begins_bq, row_q, -1).cummax(-1).values
    batch = max(latest_bq.shape[0], first.shape[0])
    begun_bq = lowest_bq.expand(latest_bq.shape).gather(-1, latest_bq.clamp(min=0))
    found_bq = torch.where(latest_bq >= 0, begun_bq, first)
    return found_bq.expand(batch, -1)


def _lowest_seen(call: Logits) -> Tensor:
    """The lowest column that any head of each query sees: int64 [B|1, Lq], Lk where there is none.

    Tables are read a few rows at a time.
    """
    parts, bias = call.parts, call.bias
    if parts.rows_are_intervals and parts.key_visible is None and not isinstance(bias, Tensor):
        rows = slice(0, parts.query_length)
        begins = [
            torch.where(begin < end, begin, parts.key_length)
            for begin, end in parts.intervals(rows)
        ]
        lowest = begins[0]
        for begin in begins[1:]:
            lowest = torch.minimum(lowest, begin)
        return lowest.amin(1)
    found = []
    for row in range(0, parts.query_length, _ROWS):
        rows = slice(row, min(row + _ROWS, parts.query_length))
        visible_bhqk = parts.visible(rows)
        if isinstance(bias, Tensor):
            shown_bhqk = bias_rectangle(bias, rows, slice(0, parts.key_length)) != -torch.inf
            visible_bhqk = visible_bhqk & shown_bhqk
        visible_bqk = visible_bhqk.any(1)
        lowest_bq = visible_bqk.to(torch.uint8).argmax(-1)
        found.append(torch.where(visible_bqk.any(-1), lowest_bq, parts.key_length))
    if not found:
        return torch.empty((1, 0), dtype=torch.long, device=parts.device)
    return torch.cat(found, -1)


def _own_key_is_real(call: Logits, own_bq: Tensor) -> Tensor:
    """False for queries whose own key is padding: bool [B|1, Lq]."""
    shown_bk = _shown_keys(call, own_bq)
    if shown_bk is None or not call.key_length:
        return torch.ones_like(own_bq, dtype=torch.bool)
    batch = max(own_bq.shape[0], shown_bk.shape[0])
    own_bq = own_bq.expand(batch, -1)
    shown_bq = shown_bk.expand(batch, -1).gather(-1, own_bq.clamp(min=0))
    return shown_bq | (own_bq < 0)


def _shown_keys(call: Logits, own_bq: Tensor) -> Tensor | None:
    """The keys that are no padding, bool [B|1, Lk]; None where there is none."""
    parts, shown = call.parts, []
    if parts.key_visible is not None:
        shown.append(parts.key_visible)
    row_q = torch.arange(call.query_length, device=own_bq.device)
    column_bq1 = own_bq.clamp(min=0)[..., None]
    if parts.ranges is not None or parts.dense is not None:
        sees_own_b = visible_at(parts, row_q, column_bq1).any(1).flatten(1).any(-1)
        shown.append(_seen_by_any(parts) | ~sees_own_b[:, None])
    if isinstance(call.bias, Tensor):
        seen_bk = (call.bias != -torch.inf).any(1).any(-2).expand(-1, call.key_length)
        own_bias = cells_at(call.bias, row_q, column_bq1)
        sees_own_b = (own_bias != -torch.inf).any(1).flatten(1).any(-1)
        shown.append(seen_bk | ~sees_own_b[:, None])
    if not shown:
        return None
    both = shown[0]
    for other in shown[1:]:
        both = both & other
    return both


def _seen_by_any(parts: MaskParts) -> Tensor:
    """The keys that a mask of ranges or booleans shows to any head of any query: bool [B|1, Lk]."""
    if parts.rows_are_intervals:
        entered_bk: Tensor | None = None
        for begin, end in parts.intervals(slice(0, parts.query_length)):
            begin, end = torch.broadcast_tensors(begin, torch.maximum(begin, end))
            empty_bk = begin.new_zeros(begin.shape[0], parts.key_length + 1)
            ones = torch.ones_like(begin).flatten(1)
            step_bk = empty_bk.scatter_add(-1, begin.clamp(0, parts.key_length).flatten(1), ones)
            step_bk.scatter_add_(-1, end.clamp(0, parts.key_length).flatten(1), -ones)
            entered_bk = step_bk if entered_bk is None else entered_bk + step_bk
        assert entered_bk is not None
        return entered_bk.cumsum(-1)[:, :-1] > 0
    seen_bk = torch.zeros((1, parts.key_length), dtype=torch.bool, device=parts.device)
    for row in range(0, parts.query_length, _ROWS):
        rows = slice(row, min(row + _ROWS, parts.query_length))
        seen_bk = seen_bk | parts.visible(rows).any(1).any(1)
    return seen_bk


def _column_of(values_bk: Tensor, wanted_bq: Tensor, visible_bk: Tensor | None) -> Tensor:
    """The lowest visible column that holds the value each query asks for, -1 where none does."""
    batch = max(values_bk.shape[0], wanted_bq.shape[0])
    if visible_bk is not None:
        batch = max(batch, visible_bk.shape[0])
        values_bk = torch.where(visible_bk, values_bk, torch.iinfo(torch.int64).max)
    values_bk, wanted_bq = values_bk.expand(batch, -1), wanted_bq.expand(batch, -1)
    if not values_bk.shape[-1]:
        return torch.full_like(wanted_bq, -1)
    sorted_bk, column_bk = torch.sort(values_bk, dim=-1, stable=True)
    place_bq = torch.searchsorted(sorted_bk, wanted_bq.contiguous())
    place_bq = place_bq.clamp(max=values_bk.shape[-1] - 1)
    found_bq = sorted_bk.gather(-1, place_bq) == wanted_bq
    return torch.where(found_bq, column_bk.gather(-1, place_bq), -1)


# Rows of booleans that are looked at together.
_ROWS = 512
