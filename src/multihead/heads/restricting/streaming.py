"""Heads that read only what is near: found by their far mass, tried on other text, restricted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ArgumentError, InputError, ModelError
from ..loss import Loss, mean_loss, next_token_loss
from .far_mass import FarMass, far_mass
from .windows import HeadWindows, restricted

Unit = Literal["kv", "head"]
Progress = Callable[[str], Any]

_STEPS = 20  # counts are tried in steps of a twentieth of all units


@dataclass(frozen=True, eq=False)
class StreamingHeads:
    """What `streaming` found; print it. Apply it with `restrict(model, found.windows)`.

    Attributes:
        windows: which heads are restricted to what; for the model, its caches and its cost.
        far_mass: for each attention module by name the mean share of its heads' weight beyond the
            window, float64 [H].
        unit: "kv" (all query heads of a KV head together) or "head".
        units, chosen: how many there are, and how many are restricted.
        tried: numbers of units that were tried and the change of the loss, on the second third of
            the text, by which the number was chosen.
        max_loss: the change that was allowed there.
        loss: of the unrestricted model on the last third, nats a token.
        change: what restricting the chosen units adds to it.
        random_changes: what as many units drawn at random add, for each seed.
        length, rows: the last third is so many rows of so many tokens.
    """

    windows: HeadWindows
    far_mass: dict[str, np.ndarray[Any, np.dtype[np.float64]]]
    unit: Unit
    units: int
    chosen: int
    tried: tuple[tuple[int, float], ...]
    max_loss: float
    loss: float
    change: float
    random_changes: tuple[float, ...]
    length: int
    rows: int

    @property
    def kept_share(self) -> float:
        """The share of keys that caches still hold at the length that was checked.

        Counted in KV heads for unit "kv", in query heads for unit "head", whose keys a cache holds
        as long as another head of the group needs them.
        """
        held = min(self.length, self.windows.window + self.windows.keep_first)
        return (self.chosen * held + (self.units - self.chosen) * self.length) / (
            self.units * self.length
        )

    def __str__(self) -> str:
        what = "KV heads" if self.unit == "kv" else "heads"
        lines = [
            f"{self.chosen} of {self.units} {what} ({self.windows.count} of {self.windows.total} "
            f"query heads) see the newest {self.windows.window} keys and the first "
            f"{self.windows.keep_first}",
            f"loss {self.loss:.4f} on {self.rows} x {self.length} held-out tokens, restricted "
            f"{self.change:+.4f} (allowed {self.max_loss:g}, where the number was chosen)",
        ]
        if self.random_changes:
            changes = ", ".join(f"{change:+.4f}" for change in self.random_changes)
            lines.append(f"as many drawn at random: {changes}")
        if self.unit == "kv":
            lines.append(f"keys held at {self.length} tokens: {100 * self.kept_share:.1f} %")
        return "\n".join(lines)


def streaming(
    model: nn.Module,
    tokens: Sequence[int] | Tensor,
    *,
    window: int = 256,
    keep_first: int = 4,
    max_loss: float = 0.01,
    length: int = 2048,
    unit: Unit = "kv",
    controls: int = 2,
    seed: int = 0,
    count: int | None = None,
    loss: Loss = next_token_loss,
    progress: Progress | None = None,
) -> StreamingHeads:
    """Find the heads of a causal language model that a window costs least.

    The text is cut in three. On the first part each head's far mass is measured: the share of the
    weight that a query gives to keys beyond the window, exactly. Units are then restricted from the
    least mass on. On the second part the largest number is sought, by bisection, whose restriction
    adds at most `max_loss` to the loss; the last part tells what it adds on text that had no say,
    beside as many units drawn at random.

    "Streaming" is said here by weights: far mass is a proxy of what the output loses, which is why
    the loss is measured.

    Args:
        model: a `LanguageModel`, or a causal language model of transformers, which computes its
            attention by multihead meanwhile.
        tokens: the ids of a text, at least three rows of `length`; what is over is left out.
        window: how many of the newest keys a restricted head sees, its query's own included.
        keep_first: how many of the first keys it sees besides.
        max_loss: what the restriction may add to the loss, in nats a token.
        length: tokens of a row. Heads are not seen to need what no row is long enough to have.
        unit: "kv" restricts all query heads of a KV head together, so that caches can drop its
            keys; "head" any query head.
        controls: how many random draws of the same number of units are tried.
        seed: of the first draw.
        count: restrict so many units, whatever they cost; nothing is sought then.
        loss: of a batch of rows [B, length]: the loss of each row.
        progress: called with a line of text before each run.

    Raises:
        ArgumentError: numbers out of range.
        InputError: a text that is too short, or rows in which nothing lies beyond the window.
        ModelError: a model whose attention is not causal or cannot be watched, or all of whose
            layers have windows of their own.

    Source: Xiao et al. 2023 (kept first keys); Xiao et al. 2024 (heads that may stream).
    """
    _check(window, keep_first, max_loss, unit, controls, count)
    measured, tuned, checked = _thirds(tokens, length, window + keep_first)
    tell = progress or (lambda line: None)
    tell(f"measuring far mass on {len(measured)} x {length} tokens")
    far = far_mass(model, measured, loss, window=window, keep_first=keep_first)
    units = ranked_units(far, unit)
    if not units:
        raise ModelError(
            f"{type(model).__name__} has no head to restrict: all its layers have windows already."
        )
    if count is not None and not 0 <= count <= len(units):
        raise ArgumentError(f"count must lie between 0 and {len(units)}; got {count}.")

    def changed(chosen: Sequence[HeadUnit], rows: Tensor, plain: float) -> float:
        windows = windows_of(far, chosen, window, keep_first)
        with restricted(model, windows):
            return mean_loss(model, _batches(rows), loss) - plain

    def plainly(rows: Tensor) -> float:
        with restricted(model, windows_of(far, (), window, keep_first)):
            return mean_loss(model, _batches(rows), loss)

    tried: list[tuple[int, float]] = []
    if count is None:
        tell(f"measuring the loss on {len(tuned)} x {length} tokens")
        plain = plainly(tuned)

        def fits(number: int) -> bool:
            tell(f"trying {number} of {len(units)}")
            tried.append((number, changed(units[:number], tuned, plain)))
            return tried[-1][1] <= max_loss

        count = _largest(fits, len(units))
    tell(f"checking {count} of {len(units)} on {len(checked)} x {length} held-out tokens")
    plain = plainly(checked)
    change = changed(units[:count], checked, plain) if count else 0.0
    random_changes = []
    for draw in range(controls if 0 < count < len(units) else 0):
        tell(f"checking {count} drawn at random")
        generator = torch.Generator().manual_seed(seed + draw)
        drawn = torch.randperm(len(units), generator=generator)[:count].tolist()
        random_changes.append(changed([units[place] for place in drawn], checked, plain))
    return StreamingHeads(
        windows=windows_of(far, units[:count], window, keep_first),
        far_mass=dict(far.mass),
        unit=unit,
        units=len(units),
        chosen=count,
        tried=tuple(sorted(tried)),
        max_loss=max_loss,
        loss=plain,
        change=change,
        random_changes=tuple(random_changes),
        length=length,
        rows=len(checked),
    )


HeadUnit = tuple[str, tuple[int, ...]]
"""An attention module by name, and the query heads that are restricted together."""


def ranked_units(far: FarMass, unit: Unit = "kv") -> list[HeadUnit]:
    """All units, the least far mass first; of several heads the mean."""
    found: list[tuple[float, HeadUnit]] = []
    for name, mass_h in far.mass.items():
        size = 1 if unit == "head" else len(mass_h) // far.kv_heads[name]
        for begin in range(0, len(mass_h), size):
            heads = tuple(range(begin, begin + size))
            found.append((float(mass_h[begin : begin + size].mean()), (name, heads)))
    return [it for _, it in sorted(found, key=lambda pair: pair[0])]


def windows_of(
    far: FarMass, units: Sequence[HeadUnit], window: int, keep_first: int
) -> HeadWindows:
    """The windows that restrict these units of a model that was measured."""
    chosen: dict[str, list[int]] = {}
    for name, heads in units:
        chosen.setdefault(name, []).extend(heads)
    heads_of = {name: len(mass) for name, mass in far.mass.items()}
    sorted_heads = {name: tuple(sorted(chosen[name])) for name in far.mass if name in chosen}
    return HeadWindows(window, keep_first, heads_of, sorted_heads)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number in steps of a twentieth that fits, as if more never cost less."""
    step = max(1, most // _STEPS)
    numbers = [*range(step, most, step), most]
    low, high = 0, len(numbers)  # numbers[:low] fit, numbers[high:] do not
    while low < high:
        middle = (low + high) // 2
        if fits(numbers[middle]):
            low = middle + 1
        else:
            high = middle
    return numbers[low - 1] if low else 0


def _thirds(tokens: Sequence[int] | Tensor, length: int, near: int) -> tuple[Tensor, ...]:
    """Rows of three parts of a text."""
    ids = torch.as_tensor(tokens)
    if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ArgumentError(
            f"tokens must be the ids of one text, integers [N]; got {list(ids.shape)} in "
            f"{str(ids.dtype).removeprefix('torch.')}."
        )
    if length <= near:
        raise InputError(
            f"length must be above window + keep_first = {near}, or nothing lies beyond; got "
            f"{length}."
        )
    rows = len(ids) // length
    if rows < 3:
        raise InputError(
            f"The text has {len(ids):,} tokens, but three parts of at least one row of {length:,} "
            f"are needed. Give a longer text, or rows of length={len(ids) // 3} or less."
        )
    each = rows // 3
    return ids[: 3 * each * length].long().view(3, each, length).unbind()


def _batches(rows: Tensor) -> list[Tensor]:
    """One row at a time: the logits of a vocabulary are not small."""
    return [row[None] for row in rows]


def _check(
    window: int, keep_first: int, max_loss: float, unit: str, controls: int, count: object
) -> None:
    for name, number, least in (
        ("window", window, 1),
        ("keep_first", keep_first, 0),
        ("controls", controls, 0),
    ):
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ArgumentError(f"{name} must be a whole number from {least} on; got {number!r}.")
    if not isinstance(max_loss, int | float) or not max_loss >= 0:
        raise ArgumentError(f"max_loss must be a number from 0 on; got {max_loss!r}.")
    if unit not in get_args(Unit):
        raise ArgumentError(f"unit must be 'kv' or 'head'; got {unit!r}.")
    if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
        raise ArgumentError(f"count must be a whole number or None; got {count!r}.")
