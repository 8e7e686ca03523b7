"""Who may see whom: one class a rule, joined with `&`.

One call has one frame: key column j stands at position j, query row i at position `start + i`,
where `start` is `Lk - Lq` unless a mask says otherwise, so that decoding continues prefill.
Every rule reads this frame. In the formulas p is the position of the query, j that of the key.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import DtypeError, MaskError
from .lowering import Lowering
from .parts import MaskParts


class Mask:
    """A rule that says which keys a query may attend to. Join rules with `&`."""

    def __and__(self, other: Mask) -> Mask:
        """Keys that both masks let in."""
        if not isinstance(other, Mask):
            return NotImplemented
        return Intersection((*_flat(self), *_flat(other)))

    def add_to(self, lowering: Lowering) -> None:
        """Contribute this rule to the lowering of one call."""
        raise NotImplementedError

    def numbers(self) -> tuple[object, ...] | None:
        """The rule as a value: its class and its integers; None if there is more to it."""
        return None

    def within(self, columns: Tensor | None) -> Mask:
        """The rule for a call whose frame another mask sets: a cache's.

        `columns`, integers [Lk], are the columns that this rule has for those of the call; None
        where they are the same. The newest of all columns is among them.
        """
        return self

    def lower(
        self,
        query_length: int,
        key_length: int,
        *,
        batch: int | None = None,
        heads: int | None = None,
        device: torch.device | str = "cpu",
    ) -> MaskParts:
        """The mask as the parts that kernels read, for one call.

        `batch` and `heads`, where given, are what per-sample and per-head tensors must fit.
        Raises MaskError when the mask does not fit the lengths or contradicts itself.
        """
        if not isinstance(device, torch.device):
            device = torch.device(device)
        lowering = Lowering(query_length, key_length, batch, heads, device)
        self.add_to(lowering)
        return lowering.finish()

    def to_dense(self, query_length: int, key_length: int) -> Tensor:
        """The whole mask as booleans, [B|1, H|1, Lq, Lk]; True = may be attended. O(Lq Lk)."""
        visible = self.lower(query_length, key_length).visible()
        return visible.expand(*visible.shape[:2], query_length, key_length)

    def visible_pairs(self, query_length: int, key_length: int) -> int:
        """The exact number of visible (query, key) pairs.

        Summed over the batch rows and heads that the mask itself tells apart, so a mask without
        per-sample or per-head tensors counts one head of one sample. O(L) for rules with a
        closed form, otherwise O(Lq Lk) time in O(L) memory.
        """
        return self.lower(query_length, key_length).count()

    def picture(self, query_length: int, key_length: int) -> str:
        """The mask as text, one line a query: `■` visible, `·` hidden.

        >>> print(Causal().picture(2, 3))
          0 1 2
        0 ■ ■ ·
        1 ■ ■ ■
        """
        from .picture import picture

        return picture(self.to_dense(query_length, key_length))


@dataclass(frozen=True, eq=False)
class Intersection(Mask):
    """Several masks joined by `&`: a key is visible if every one of them lets it in."""

    masks: tuple[Mask, ...]

    def add_to(self, lowering: Lowering) -> None:
        for mask in self.masks:
            mask.add_to(lowering)

    def numbers(self) -> tuple[object, ...] | None:
        each = tuple([mask.numbers() for mask in self.masks])
        return None if type(self) is not Intersection or None in each else (Intersection, *each)

    def within(self, columns: Tensor | None) -> Mask:
        return Intersection(tuple([mask.within(columns) for mask in self.masks]))


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """A query sees itself and what came before: `j <= p`."""

    def add_to(self, lowering: Lowering) -> None:
        lowering.limit_right(0)

    def numbers(self) -> tuple[object, ...] | None:
        return _numbers(self, Causal)


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """`(j >= p - left or j < keep_first) and j <= p + right`; None is unbounded.

    `left` and `right` are ints or integer tensors [H], a window per head. With `KeyPadding`,
    `keep_first` counts from the row's first visible column.
    """

    left: int | Tensor | None
    right: int | Tensor | None = 0
    keep_first: int = 0

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            _set(self, name, _bound(getattr(self, name), f"Window.{name}"))
        _set(self, "keep_first", _size(self.keep_first, "Window.keep_first", least=0))

    def add_to(self, lowering: Lowering) -> None:
        if self.left is not None:
            lowering.limit_left(self.left, self.keep_first)
        if self.right is not None:
            lowering.limit_right(self.right)

    def numbers(self) -> tuple[object, ...] | None:
        return _numbers(self, Window, self.left, self.right, self.keep_first)


def SlidingWindow(size: int) -> Window:
    """A causal window of `size` keys, the query's own included, as Hugging Face configs count."""
    return Window(_size(size, "SlidingWindow's size", least=1) - 1, 0)


@dataclass(frozen=True, eq=False)
class PrefixCausal(Mask):
    """Causal, but the first `length` keys are visible to all: `j <= p or j < length`.

    `length` is an int or an integer tensor [B]. With `KeyPadding` it counts from the row's
    first visible column.
    """

    length: int | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.length, Tensor):
            _set(self, "length", _integers(self.length, "PrefixCausal.length", dims=(1,)))
        else:
            _set(self, "length", _size(self.length, "PrefixCausal.length", least=0))

    def add_to(self, lowering: Lowering) -> None:
        lowering.limit_right(0, prefix=self.length)

    def numbers(self) -> tuple[object, ...] | None:
        return _numbers(self, PrefixCausal, self.length)


@dataclass(frozen=True, eq=False)
class KeyPadding(Mask):
    """`visible` [B, Lk], True = may be attended, as Hugging Face's attention_mask.

    torch's `key_padding_mask` is its inverse. It moves nothing: left, right and inner padding
    keep their columns; `keep_first` and `PrefixCausal` then count from the row's first visible
    column.
    """

    visible: Tensor

    def __post_init__(self) -> None:
        visible = _from_array(self.visible)
        if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
            raise DtypeError(
                f"KeyPadding takes a bool tensor [B, Lk], True = may be attended; got "
                f"{_kind(visible)}. Write KeyPadding(x.bool()) if 1 means 'may be attended'."
            )
        if visible.ndim != 2:
            raise MaskError(f"KeyPadding takes [B, Lk]; got {tuple(visible.shape)}.")
        _set(self, "visible", visible)

    def add_to(self, lowering: Lowering) -> None:
        lowering.show_keys(self.visible)

    def within(self, columns: Tensor | None) -> Mask:
        return KeyPadding(_at(columns, self.visible, "KeyPadding"))


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Packed documents: a query sees the keys whose id equals its own; a negative id sees none.

    `query_ids` is an integer tensor [Lq] or [B, Lq]. Without `key_ids` the ids are those of the
    keys too, and Lq must equal Lk. With `key_ids` ([Lk] or [B, Lk]) the r-th last query of a
    document stands at that document's r-th last key.
    """

    query_ids: Tensor
    key_ids: Tensor | None = None

    def __post_init__(self) -> None:
        _set(self, "query_ids", _integers(self.query_ids, "Documents.query_ids", dims=(1, 2)))
        if self.key_ids is not None:
            _set(self, "key_ids", _integers(self.key_ids, "Documents.key_ids", dims=(1, 2)))

    def add_to(self, lowering: Lowering) -> None:
        lowering.match_ids(self.query_ids, self.key_ids)

    def within(self, columns: Tensor | None) -> Mask:
        if self.key_ids is None:
            return self
        return _SameIds(self.query_ids, _at(columns, self.key_ids, "Documents.key_ids"))


@dataclass(frozen=True, eq=False)
class _SameIds(Mask):
    """`Documents` in a frame that is set already: it hides what it hides, and moves nothing."""

    query_ids: Tensor
    key_ids: Tensor

    def add_to(self, lowering: Lowering) -> None:
        lowering.match_ids(self.query_ids, self.key_ids, sets_frame=False)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """Any mask at all, as booleans [Lq, Lk] or [B|1, H|1, Lq|1, Lk|1]; True = may be attended."""

    visible: Tensor

    def __post_init__(self) -> None:
        visible = _from_array(self.visible)
        if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
            raise DtypeError(
                f"Dense takes a bool tensor, True = may be attended; got {_kind(visible)}. A float "
                "tensor that is added to the scores is `bias`, not a mask."
            )
        _set(self, "visible", four_dims(visible, "mask"))

    def add_to(self, lowering: Lowering) -> None:
        lowering.show_pairs(self.visible)

    def within(self, columns: Tensor | None) -> Mask:
        return Dense(_at(columns, self.visible, "mask"))


@dataclass(frozen=True, eq=False)
class KeyLengths(Mask):
    """`j < lengths[b]`, the rows being the newest tokens: row i stands at `lengths[b] - Lq + i`.

    `lengths` [B] is what a cache holds of each sample, this call's tokens included, so
    `0 < lengths[b] < Lq` is refused; 0 sees nothing. `KeyLengths(n, query_lengths=n)` is a
    right-padded batch instead: row i stands at `lengths[b] - query_lengths[b] + i`, and rows
    from `query_lengths[b]` on see nothing.
    """

    lengths: Tensor
    query_lengths: Tensor | None = None

    def __post_init__(self) -> None:
        _set(self, "lengths", _integers(self.lengths, "KeyLengths.lengths", dims=(1,)))
        if self.query_lengths is not None:
            lengths = _integers(self.query_lengths, "KeyLengths.query_lengths", dims=(1,))
            _set(self, "query_lengths", lengths)

    def add_to(self, lowering: Lowering) -> None:
        lowering.bound_lengths(self.lengths, self.query_lengths)


@dataclass(frozen=True, eq=False)
class QueryStart(Mask):
    """Hides nothing; sets the frame: row i stands at `start + i`. An int or a tensor [B].

    `Causal() & QueryStart(0)` is the top-left triangle of torch's `is_causal`.
    """

    start: int | Tensor

    def __post_init__(self) -> None:
        if isinstance(self.start, Tensor) and self.start.ndim:
            _set(self, "start", _integers(self.start, "QueryStart.start", dims=(1,)))
        else:
            _set(self, "start", _size(self.start, "QueryStart.start", least=None))

    def add_to(self, lowering: Lowering) -> None:
        lowering.set_start(self.start, "QueryStart")

    def numbers(self) -> tuple[object, ...] | None:
        return _numbers(self, QueryStart, self.start)


@dataclass(frozen=True, eq=False)
class Positions(Mask):
    """Hides nothing; sets the frame by explicit integer positions, [L] or [B, L].

    For rolling caches, zigzag order and packed restarts. Rules then compare these positions;
    `keep_first` and prefixes let in the keys whose position is below them, wherever they stand.
    """

    query: Tensor
    key: Tensor

    def __post_init__(self) -> None:
        _set(self, "query", _integers(self.query, "Positions.query", dims=(1, 2)))
        _set(self, "key", _integers(self.key, "Positions.key", dims=(1, 2)))

    def add_to(self, lowering: Lowering) -> None:
        lowering.set_positions(self.query, self.key)


def four_dims(tensor: Tensor, name: str) -> Tensor:
    """A mask or bias as [B|1, H|1, Lq|1, Lk|1]; one and three dimensions are refused."""
    if tensor.ndim == 4:
        return tensor
    if tensor.ndim == 2:
        return tensor[None, None]
    shape = tuple(tensor.shape)
    if tensor.ndim == 3:
        remedy = (
            f"If its first axis is the sample, pass {name}[:, None]; if it is the head, pass "
            f"{name}[None]."
        )
    elif tensor.ndim == 1:
        remedy = (
            f"Pass {name}[None, :] for one value per key; to hide keys per sample use "
            "KeyPadding(visible) with a bool tensor [B, Lk]."
        )
    else:
        remedy = f"{tensor.ndim} dimensions have no meaning here."
    raise MaskError(f"{name} must be [Lq, Lk] or [B, H, Lq, Lk]; got {shape}. {remedy}")


def _at(columns: Tensor | None, tensor: Tensor, name: str) -> Tensor:
    """These columns of a tensor that has all of them, or one for all."""
    if columns is None or tensor.shape[-1] == 1:
        return tensor
    if not torch.compiler.is_compiling() and columns.numel():
        count = int(columns.max()) + 1
        if tensor.shape[-1] != count:
            raise MaskError(
                f"{name} covers {tensor.shape[-1]} positions, but {count} tokens came so far. A "
                "cache that dropped some still takes masks for all of them."
            )
    return tensor.index_select(-1, columns)


def _numbers(
    mask: Mask, rule: type[Mask], *numbers: int | Tensor | None
) -> tuple[object, ...] | None:
    """`rule` and `numbers` if these are the mask: a subclass may have more to it."""
    if type(mask) is not rule:
        return None
    for number in numbers:
        if number is not None and type(number) is not int:
            return None
    return rule, *numbers


def _flat(mask: Mask) -> tuple[Mask, ...]:
    return mask.masks if isinstance(mask, Intersection) else (mask,)


def _set(mask: Mask, name: str, value: object) -> None:
    object.__setattr__(mask, name, value)


def _bound(value: int | Tensor | None, name: str) -> int | Tensor | None:
    if value is None:
        return None
    if isinstance(value, Tensor):
        return _integers(value, name, dims=(1,))
    return _size(value, name, least=0)


def _size(value: object, name: str, *, least: int | None) -> int:
    try:
        number: Any = value if isinstance(value, torch.SymInt) else operator.index(cast(Any, value))
    except TypeError:
        raise DtypeError(f"{name} must be an integer; got {_kind(value)}.") from None
    if least is not None and number < least:
        hint = " None means unbounded." if name.startswith("Window.") else ""
        raise MaskError(f"{name} must be at least {least}; got {number}.{hint}")
    return cast(int, number)


def _integers(value: object, name: str, *, dims: tuple[int, ...]) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise DtypeError(f"{name} must hold integers; got {_kind(tensor)}.")
    if tensor.ndim not in dims:
        expected = " or ".join("[L]" if n == 1 else "[B, L]" for n in dims)
        raise MaskError(f"{name} must be {expected}; got shape {tuple(tensor.shape)}.")
    return tensor


def _from_array(value: Any) -> Any:
    """A NumPy array as a tensor; anything else as it is."""
    return torch.as_tensor(value) if isinstance(value, np.ndarray) else value


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor"
    shown = repr(value)
    return f"{type(value).__name__} {shown}" if len(shown) < 40 else f"a {type(value).__name__}"


# Masks may be inputs of torch.export.
for _rule in Mask.__subclasses__():
    torch.export.register_dataclass(_rule, serialized_type_name=f"multihead.{_rule.__name__}")
del _rule
