"""From rules to parts: one call's masks gathered, merged and checked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from ..errors import DeviceError, MaskError
from .parts import MaskParts, common_size

_Integer = int | Tensor
_Lefts = Sequence[tuple[_Integer, int]]
_Rights = Sequence[tuple[_Integer, _Integer]]
_INTEGERS = {int, NoneType}

# Kernels hold positions and distances in 32 bits; sums of two of these still fit.
_FAR = 1 << 30

# Numbers that Python compares sooner than torch does.
_FEW = 64


class Lowering:
    """Gathers what the masks of one call contribute; `finish` merges it into MaskParts."""

    frame: tuple[str, _Integer | tuple[Tensor, Tensor | None]] | None = None
    lefts: tuple[tuple[_Integer, int], ...] = ()
    rights: tuple[tuple[_Integer, _Integer], ...] = ()
    key_lengths: Tensor | None = None
    query_lengths: Tensor | None = None
    key_visible: Tensor | None = None
    ids: tuple[Tensor, Tensor] | None = None
    dense: Tensor | None = None
    ranges: Tensor | None = None

    def __init__(
        self,
        query_length: int,
        key_length: int,
        batch: int | None,
        heads: int | None,
        device: torch.device,
    ) -> None:
        self.query_length = query_length
        self.key_length = key_length
        self.batch = batch
        self.heads = heads
        self.device = device
        # No branch of a recorded graph may depend on an integer, which stands for many there.
        self.eager = not torch.compiler.is_compiling()

    def limit_left(self, left: _Integer, keep_first: int) -> None:
        self.lefts += ((self._per_head(left, "Window.left"), min(keep_first, _FAR)),)

    def limit_right(self, right: _Integer, prefix: _Integer = 0) -> None:
        right = self._per_head(right, "Window.right")
        self.rights += ((right, self._per_batch(prefix, "PrefixCausal.length", 0)),)

    def show_keys(self, visible: Tensor) -> None:
        visible = self._two_dims(visible, self.key_length, "KeyPadding", "key")
        self.key_visible = visible if self.key_visible is None else self.key_visible & visible

    def show_pairs(self, visible: Tensor) -> None:
        expected = (self.batch, self.heads, self.query_length, self.key_length)
        fits = all(
            size == 1 or want is None or size == want
            for size, want in zip(visible.shape, expected, strict=True)
        )
        if not fits:
            want = ", ".join(
                name if size is None else str(size)
                for name, size in zip("BH", expected[:2], strict=True)
            )
            by_sample = tuple(visible.shape) == (1, 1, self.batch, self.key_length)
            raise MaskError(
                f"mask must broadcast to [{want}, {self.query_length}, {self.key_length}] "
                f"([B, H, Lq, Lk]); got {list(visible.shape)}."
                + (" One row of keys for each sample is KeyPadding(mask)." if by_sample else "")
            )
        self._same_device(visible, "mask")
        self.dense = visible if self.dense is None else self.dense & visible

    def show_ranges(self, ranges: Tensor) -> None:
        batch, heads, rows, _, _ = ranges.shape
        if (
            rows != self.query_length
            or (self.batch is not None and batch not in (1, self.batch))
            or (self.heads is not None and heads not in (1, self.heads))
            or self.ranges is not None
        ):
            raise MaskError(
                "One mask of ranges fits a call, [B|1, H|1, Lq, R, 2]; got a second one, or "
                f"{list(ranges.shape)} for {self.query_length} queries."
            )
        self.ranges = self._same_device(ranges, "ranges").to(torch.int32).contiguous()

    def match_ids(
        self, query_ids: Tensor, key_ids: Tensor | None, *, sets_frame: bool = True
    ) -> None:
        query_ids, key_ids = _small_ids(query_ids, key_ids)
        query = self._two_dims(query_ids, self.query_length, "Documents.query_ids", "query")
        if key_ids is None:
            if self.query_length != self.key_length:
                raise MaskError(
                    "Documents without key_ids needs as many queries as keys; got "
                    f"{self.query_length} queries and {self.key_length} keys. Pass key_ids."
                )
            key = query
        else:
            key = self._two_dims(key_ids, self.key_length, "Documents.key_ids", "key")
            if sets_frame:
                self._set_frame("Documents with key_ids", (_last_to_last(query, key), None))
        self.ids = (query, key) if self.ids is None else _joint_ids(self.ids, (query, key))

    def bound_lengths(self, lengths: Tensor, query_lengths: Tensor | None) -> None:
        lengths = self._vector(lengths, self.batch, "KeyLengths.lengths", "batch")
        _check_range(lengths, "KeyLengths.lengths", 0, self.key_length, "keys")
        if query_lengths is None:
            self._check_newest(lengths)
            self._set_frame("KeyLengths", lengths - self.query_length)
        else:
            rows = self._vector(query_lengths, self.batch, "KeyLengths.query_lengths", "batch")
            _check_range(rows, "KeyLengths.query_lengths", 0, self.query_length, "queries")
            self._set_frame("KeyLengths", lengths - rows)
            self.query_lengths = _smaller(self.query_lengths, rows)
        self.key_lengths = _smaller(self.key_lengths, lengths)

    def set_start(self, start: _Integer, name: str) -> None:
        self._set_frame(name, self._per_batch(start, name, -_FAR, _FAR))

    def set_positions(self, query: Tensor, key: Tensor) -> None:
        _check_range(query, "Positions.query", -_FAR, _FAR)
        _check_range(key, "Positions.key", -_FAR, _FAR)
        query = self._two_dims(query, self.query_length, "Positions.query", "query")
        key = self._two_dims(key, self.key_length, "Positions.key", "key")
        self._set_frame("Positions", (query, key))

    def finish(self) -> MaskParts:
        """The merged parts. Two windows without a common closed form become ranges."""
        lefts = self.lefts if len(self.lefts) <= 1 else _tightest_lefts(self.lefts)
        rights = self.rights if len(self.rights) <= 1 else _tightest_rights(self.rights)
        closed_form = self._closed_form(lefts, rights)
        if closed_form is not None:
            return _closed_parts(self.device, *closed_form)
        start: _Integer = self.key_length - self.query_length
        query_positions = key_positions = None
        if self.frame is not None:
            frame = self.frame[1]
            if isinstance(frame, tuple):
                start, (query_positions, key_positions) = 0, frame
            else:
                start = frame
        first: _Integer = 0
        if self.key_visible is not None and self.key_length > 0:
            first = self.key_visible.to(torch.uint8).argmax(-1).to(torch.int32)
        ids = self.ids or (None, None)

        def parts(
            left: tuple[_Integer, int] | None,
            right: tuple[_Integer, _Integer] | None,
            ranges: Tensor | None = None,
            dense: Tensor | None = self.dense,
        ) -> MaskParts:
            return MaskParts(
                query_length=self.query_length,
                key_length=self.key_length,
                device=self.device,
                start=start,
                first=first,
                left=left[0] if left else None,
                keep_first=left[1] if left else 0,
                right=right[0] if right else None,
                prefix=right[1] if right else 0,
                key_lengths=self.key_lengths,
                query_lengths=self.query_lengths,
                key_visible=self.key_visible,
                query_ids=ids[0],
                key_ids=ids[1],
                query_positions=query_positions,
                key_positions=key_positions,
                ranges=ranges,
                dense=dense,
            )

        if self.ranges is None and len(lefts) <= 1 and len(rights) <= 1:
            return parts(lefts[0] if lefts else None, rights[0] if rights else None)
        pairs = itertools.zip_longest(lefts, rights)
        windows = [parts(left, right, dense=None) for left, right in pairs]
        if self.ranges is not None:
            if not windows:
                return parts(None, None, ranges=self.ranges)
            if key_positions is not None:
                raise MaskError("A mask of ranges counts columns; it does not go with Positions.")
            windows.append(parts(None, None, ranges=self.ranges, dense=None))
        if key_positions is not None:
            # Explicit key positions have no intervals; such a call pays for its booleans.
            visible = windows[0].visible()
            for window in windows[1:]:
                visible = visible & window.visible()
            return parts(None, None, dense=visible if self.dense is None else visible & self.dense)
        return parts(None, None, ranges=_common_ranges(windows))

    def _closed_form(self, lefts: _Lefts, rights: _Rights) -> tuple[Any, ...] | None:
        """The arguments of `_closed_parts` after the first, if they are the whole mask."""
        if (
            not self.eager
            or len(lefts) > 1
            or len(rights) > 1
            or self.key_lengths is not None
            or self.key_visible is not None
            or self.ids is not None
            or self.dense is not None
            or self.ranges is not None
        ):
            return None
        start = self.key_length - self.query_length if self.frame is None else self.frame[1]
        left, keep_first = lefts[0] if lefts else (None, 0)
        right, prefix = rights[0] if rights else (None, 0)
        numbers = (self.query_length, self.key_length, start, left, keep_first, right, prefix)
        return numbers if _INTEGERS.issuperset(map(type, numbers)) else None

    def _set_frame(self, name: str, frame: _Integer | tuple[Tensor, Tensor | None]) -> None:
        if self.frame is not None and not _same_frame(self.frame[1], frame):
            raise MaskError(
                f"{self.frame[0]} and {name} place the queries of one call at different "
                "positions; a call has one frame. Keep one of them."
            )
        self.frame = (name, frame)

    def _check_newest(self, lengths: Tensor) -> None:
        if not _readable(lengths):
            return
        for sample, length in enumerate(lengths.tolist()):
            if 0 < length < self.query_length:
                raise MaskError(
                    f"KeyLengths counts this call's {self.query_length} queries among the keys, "
                    f"but sample {sample} has only {length}. For a right-padded batch pass "
                    "query_lengths too: KeyLengths(lengths, query_lengths=lengths)."
                )

    def _per_batch(
        self, value: _Integer, name: str, least: int, most: int | None = None
    ) -> _Integer:
        if self.eager and type(value) is int and least <= value <= _FAR:
            return value
        _check_range(value, name, least, most)
        if isinstance(value, Tensor):
            return self._vector(value, self.batch, name, "batch")
        return max(-_FAR, min(value, _FAR))

    def _per_head(self, value: _Integer, name: str) -> _Integer:
        if self.eager and type(value) is int and 0 <= value <= _FAR:
            return value
        _check_range(value, name, 0)
        if isinstance(value, Tensor):
            return self._vector(value, self.heads, name, "number of heads")
        return max(-_FAR, min(value, _FAR))

    def _vector(self, value: Tensor, size: int | None, name: str, what: str) -> Tensor:
        if size is not None and value.shape[0] != size:
            raise MaskError(f"{name} has {value.shape[0]} entries, but the {what} is {size}.")
        value = self._same_device(value, name).clamp(-_FAR, _FAR)
        return value.to(torch.int32).contiguous()

    def _two_dims(self, value: Tensor, length: int, name: str, what: str) -> Tensor:
        value = value[None] if value.ndim == 1 else value
        batch, covered = value.shape
        if covered != length:
            raise MaskError(f"{name} covers {covered} positions, but {what} has {length}.")
        if self.batch is not None and batch not in (1, self.batch):
            raise MaskError(f"{name} has {batch} samples, but the batch is {self.batch}.")
        dtype = torch.bool if value.dtype == torch.bool else torch.int32
        return self._same_device(value, name).to(dtype).contiguous()

    def _same_device(self, value: Tensor, name: str) -> Tensor:
        if value.device != self.device:
            raise DeviceError(
                f"{name} is on {value.device}, but the call is on {self.device}. "
                f"Move it with .to({str(self.device)!r})."
            )
        return value


@lru_cache(maxsize=1024)
def _closed_parts(
    device: torch.device,
    query_length: int,
    key_length: int,
    start: int,
    left: int | None,
    keep_first: int,
    right: int | None,
    prefix: int,
) -> MaskParts:
    """A mask without tensors, which calls of one shape share: to build it takes longer than a
    small call's kernel."""
    return MaskParts(
        query_length=query_length,
        key_length=key_length,
        device=device,
        start=start,
        left=left,
        keep_first=keep_first,
        right=right,
        prefix=prefix,
    )


def _same_frame(
    one: _Integer | tuple[Tensor, Tensor | None], other: _Integer | tuple[Tensor, Tensor | None]
) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return all(
            mine is yours or (mine is not None and yours is not None and torch.equal(mine, yours))
            for mine, yours in zip(one, other, strict=True)
        )
    if isinstance(one, tuple) or isinstance(other, tuple):
        return False
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other or bool((torch.as_tensor(one) == torch.as_tensor(other)).all())
    return one == other


def _smaller(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else torch.minimum(one, other)


def _readable(value: Tensor) -> bool:
    """Whether values may be looked at: in eager mode on the CPU."""
    return not torch.compiler.is_compiling() and value.device.type == "cpu" and value.numel() > 0


def _check_range(
    value: _Integer, name: str, least: int, most: int | None = None, what: str = ""
) -> None:
    """Refuse numbers outside of [least, most], tensors among them where they may be read."""
    if isinstance(value, Tensor):
        if not _readable(value):
            return
        if value.ndim == 1 and len(value) <= _FEW:
            each = value.tolist()
            low, high = min(each), max(each)
        else:
            low, high = int(value.min()), int(value.max())
    elif torch.compiler.is_compiling():
        return
    else:
        low = high = value
    if low < least or (most is not None and high > most):
        wrong = low if low < least else high
        if most is None:
            raise MaskError(f"{name} must be at least {least}; got {wrong}.")
        end = f"the {most} {what}" if what else "2**30"
        begin = "-2**30" if least == -_FAR else str(least)
        raise MaskError(f"{name} must lie between {begin} and {end}; got {wrong}.")


def _small_ids(query_ids: Tensor, key_ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Ids that fit 32 bits and are equal, or negative, where the given ones are."""
    every = [ids for ids in (query_ids, key_ids) if ids is not None and ids.numel()]
    if not every or not _readable(every[0]):
        return query_ids, key_ids
    if max(int(ids.abs().max()) for ids in every) <= _FAR:
        return query_ids, key_ids
    given = torch.cat([ids.flatten().long() for ids in every])
    numbers = torch.unique(given, return_inverse=True)[1].masked_fill(given < 0, -1)
    sizes = [ids.numel() for ids in every]
    renumbered = iter(
        part.view(ids.shape) for part, ids in zip(numbers.split(sizes), every, strict=True)
    )
    query_ids = next(renumbered) if query_ids.numel() else query_ids
    if key_ids is not None and key_ids.numel():
        key_ids = next(renumbered)
    return query_ids, key_ids


def _tightest_lefts(lefts: _Lefts) -> _Lefts:
    """Merge left bounds with one `keep_first`; drop those that a tighter one implies."""
    merged: dict[int, _Integer] = {}
    for left, keep in lefts:
        merged[keep] = _minimum(merged[keep], left) if keep in merged else left
    return [
        (left, keep)
        for keep, left in merged.items()
        if not any(
            other_keep < keep and _surely_at_most(other_left, left)
            for other_keep, other_left in merged.items()
        )
    ]


def _tightest_rights(rights: _Rights) -> _Rights:
    """Merge right bounds without a prefix; drop prefixed ones that the merged one implies."""
    plain: _Integer | None = None
    prefixed: list[tuple[_Integer, _Integer]] = []
    for right, prefix in rights:
        if isinstance(prefix, Tensor) or prefix != 0:
            prefixed.append((right, prefix))
        else:
            plain = right if plain is None else _minimum(plain, right)
    if plain is None:
        return prefixed
    return [(plain, 0), *(it for it in prefixed if not _surely_at_most(plain, it[0]))]


def _minimum(one: _Integer, other: _Integer) -> _Integer:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return torch.minimum(torch.as_tensor(one), torch.as_tensor(other)).to(torch.int32)
    return min(one, other)


def _surely_at_most(one: _Integer, other: _Integer) -> bool:
    """Whether `one <= other` is known without reading tensor values."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    return one <= other


def _common_ranges(windows: list[MaskParts]) -> Tensor:
    """What all windows let in, as int32 [B|1, H|1, Lq, R, 2], disjoint and ascending."""
    rows = slice(0, windows[0].query_length)
    common = windows[0].intervals(rows)
    for window in windows[1:]:
        common = [
            (torch.maximum(begin, other_begin), torch.minimum(end, other_end))
            for begin, end in common
            for other_begin, other_end in window.intervals(rows)
        ]
    bounds = torch.stack(torch.broadcast_tensors(*itertools.chain.from_iterable(common)), dim=-1)
    begin, end = bounds[..., 0::2], bounds[..., 1::2]
    end = torch.maximum(begin, end)
    order = torch.argsort(begin, dim=-1, stable=True)
    ranges = torch.stack((begin.gather(-1, order), end.gather(-1, order)), dim=-1)
    return ranges.to(torch.int32).contiguous()


def _last_to_last(query_ids: Tensor, key_ids: Tensor) -> Tensor:
    """The column of the r-th last key with the id of each r-th last query; [B, Lq] int32.

    A query beyond its document's keys stands before column 0.
    """
    batch = common_size(query_ids.shape[0], key_ids.shape[0])
    query_ids = query_ids.expand(batch, -1).contiguous()
    key_ids = key_ids.expand(batch, -1).contiguous()
    sorted_queries, query_order = torch.sort(query_ids, dim=-1, stable=True)
    sorted_keys, key_order = torch.sort(key_ids, dim=-1, stable=True)
    from_last = torch.searchsorted(sorted_queries, query_ids, right=True) - query_order.argsort(-1)
    begin = torch.searchsorted(sorted_keys, query_ids)
    end = torch.searchsorted(sorted_keys, query_ids, right=True)
    slot = end - from_last
    if key_ids.shape[1] == 0:
        return torch.full_like(query_ids, -1)
    column = key_order.gather(-1, slot.clamp(0, key_ids.shape[1] - 1))
    return torch.where(slot >= begin, column, -1).to(torch.int32).contiguous()


def _joint_ids(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Ids that are equal exactly where both pairs of ids are; negative where either is."""
    batch = common_size(*(ids.shape[0] for ids in (*one, *other)))
    both = [
        torch.stack((a.expand(batch, -1), b.expand(batch, -1)), dim=-1)
        for a, b in zip(one, other, strict=True)
    ]
    pairs = torch.cat(both, dim=1).reshape(-1, 2)
    numbers = torch.unique(pairs, dim=0, return_inverse=True)[1]
    numbers = torch.where((pairs < 0).any(-1), -1, numbers).to(torch.int32)
    query_length, key_length = one[0].shape[1], one[1].shape[1]
    numbers = numbers.reshape(batch, query_length + key_length)
    return numbers[:, :query_length].contiguous(), numbers[:, query_length:].contiguous()
