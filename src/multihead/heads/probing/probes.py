"""Controlled probes: sequences of tokens that only one kind of head can tell from their control.

Random tokens carry no meaning, so what a head does with them it does by position or by equality
alone. Each probe has a control that differs in one thing: a sequence that repeats itself against
one whose second half has the same tokens in another order; special tokens at the ends against
ordinary ones there.

Shape suffixes: b sequence, l token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, InputError
from ..forward import check_positions, vocabulary_size
from ..text import built_in

DEFAULT_SEEDS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Probes:
    """How long the probes are.

    Attributes:
        length: tokens of a random sequence. Its first quarter is read, but its queries are not
            counted: where few keys are visible, each gets much.
        periods: tokens after which a repeated sequence repeats. Several, so that no fixed offset
            can pass for finding the token again.
        reach: keys that count as near: at distances 0 to `reach - 1`.

    Raises:
        ArgumentError: a length below 8 reaches, fewer than two periods, or one below 4.
    """

    length: int = 128
    periods: tuple[int, ...] = (24, 40, 64)
    reach: int = 8

    def __post_init__(self) -> None:
        if self.reach < 2:
            raise ArgumentError(f"reach must be at least 2; got {self.reach}.")
        if self.length < 8 * self.reach:
            raise ArgumentError(
                f"length must be at least 8 * reach = {8 * self.reach}, so that far keys can be "
                f"told from near ones; got {self.length}."
            )
        periods = tuple(self.periods)
        if len(set(periods)) < 2 or min(periods) < 4:
            raise ArgumentError(
                "periods must be at least two different numbers of 4 or more tokens, so that "
                f"finding a token again is told from a fixed offset; got {periods}."
            )

    @property
    def counted_from(self) -> int:
        """The first query of a random sequence that is counted."""
        return self.length // 4

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, without special ones around repeated sequences."""
        return max(self.length, 2 * max(self.periods))


@dataclass(frozen=True)
class Frame:
    """The special tokens of a model: those put around a text, and all that are no text.

    `encode` turns a text into tokens, without special ones.
    """

    front: tuple[int, ...] = ()
    back: tuple[int, ...] = ()
    special: tuple[int, ...] = ()
    encode: Callable[[str], Sequence[int]] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, tokenizer: Any) -> Frame:
        """What a tokenizer, of transformers or ours, puts around a text."""
        if tokenizer is None:
            return cls()
        if hasattr(tokenizer, "all_special_ids"):
            framed = tokenizer("a")["input_ids"]
            special = tokenizer.all_special_ids

            def encode(text: str) -> Sequence[int]:
                ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
                return ids

        elif hasattr(tokenizer, "encode") and hasattr(tokenizer, "backend"):
            framed = tokenizer.encode("a")
            added = tokenizer.backend.get_added_tokens_decoder()
            special = [token for token, known in added.items() if known.special]

            def encode(text: str) -> Sequence[int]:
                ids: Sequence[int] = tokenizer.backend.encode(text, add_special_tokens=False).ids
                return ids

        else:
            raise InputError(
                "tokenizer must be one of transformers or of multihead.integrations; got "
                f"{type(tokenizer).__name__}."
            )
        plain = encode("a")
        for start in range(len(framed) - len(plain) + 1):
            stop = start + len(plain)
            if list(framed[start:stop]) == list(plain):
                front, back = tuple(framed[:start]), tuple(framed[stop:])
                return cls(front, back, tuple(sorted({*special, *front, *back})), encode)
        return cls(special=tuple(sorted(special)), encode=encode)


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of all seeds for one model: int64 [B, L] each.

    `plain` are random tokens. `framed` are the same, but special tokens stand in the places that
    they would have in two texts one after the other, those between the texts in `middle` (None
    where the model has none). `repeated` and `shuffled` have a pair for each period, with the
    special tokens around. `texts` are excerpts of Python's documentation, special tokens in front
    (None without a tokenizer).
    """

    plain: Tensor
    framed: Tensor | None
    middle: slice
    repeated: dict[int, Tensor]
    shuffled: dict[int, Tensor]
    texts: Tensor | None


def draw(model: nn.Module, probes: Probes, seeds: Sequence[int], frame: Frame) -> Sequences:
    """Draw the probes' sequences: each seed gives one of each kind, the same on every machine.

    Tokens of a sequence differ from one another where the vocabulary allows, those of a period
    always.

    Raises:
        ArgumentError: no seeds, or too few tokens or positions in the model for these probes.
    """
    if not seeds:
        raise ArgumentError("seeds must be at least one number; got none.")
    around = len(frame.front) + len(frame.back)
    longest = max(probes.length, 2 * max(probes.periods) + around)
    check_positions(model, longest, "Give shorter ones: probes=Probes(length=..., periods=...).")
    known = words(model, frame)
    if len(known) < max(probes.periods):
        raise ArgumentError(
            f"A period of {max(probes.periods)} needs as many different tokens, but the model has "
            f"{len(known)}. Give shorter ones: probes=Probes(periods=...)."
        )
    device = next(model.parameters()).device
    plain: list[Tensor] = []
    repeated: dict[int, list[Tensor]] = {period: [] for period in probes.periods}
    shuffled: dict[int, list[Tensor]] = {period: [] for period in probes.periods}
    for seed in seeds:
        generator = torch.Generator().manual_seed(int(seed))
        plain.append(random_tokens(known, probes.length, generator))
        for period in probes.periods:
            once = random_tokens(known, period, generator)
            repeated[period].append(_framed(torch.cat([once, once]), frame))
            other = once[_cycle(period, generator)]
            shuffled[period].append(_framed(torch.cat([once, other]), frame))
    plain_bl = torch.stack(plain).to(device)
    middle = slice((probes.length - around) // 2, (probes.length - around) // 2 + around)
    return Sequences(
        plain=plain_bl,
        framed=_two_texts(plain_bl, frame, middle) if around else None,
        middle=middle,
        repeated={T: torch.stack(it).to(device) for T, it in repeated.items()},
        shuffled={T: torch.stack(it).to(device) for T, it in shuffled.items()},
        texts=None if frame.encode is None else _excerpts(frame, probes.length, seeds).to(device),
    )


def _excerpts(frame: Frame, length: int, seeds: Sequence[int]) -> Tensor:
    """`length` tokens for each seed from a random place of the built-in prose."""
    assert frame.encode is not None
    prose = built_in().content
    excerpts = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(int(seed))
        place = int(torch.randint(len(prose) // 2, (1,), generator=generator))
        place = prose.index(" ", place)
        characters, ids = 8 * length, list(frame.front)
        while len(ids) < length and place + characters < len(prose):
            ids = [*frame.front, *frame.encode(prose[place : place + characters])]
            characters *= 2
        excerpts.append(torch.tensor(ids[:length]))
    return torch.stack(excerpts)


def words(model: nn.Module, frame: Frame) -> Tensor:
    """The ids of ordinary tokens."""
    ids = torch.arange(vocabulary_size(model))
    return ids[~torch.isin(ids, torch.tensor(frame.special, dtype=torch.long))]


def random_tokens(words: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Random tokens of `words`, all different where there are enough."""
    if len(words) >= length:
        return words[torch.randperm(len(words), generator=generator)[:length]]
    return words[torch.randint(len(words), (length,), generator=generator)]


def _cycle(length: int, generator: torch.Generator) -> Tensor:
    """A random order in which nothing stays in its place: one cycle through all places."""
    order = torch.randperm(length, generator=generator)
    places = torch.empty(length, dtype=torch.long)
    places[order] = order.roll(1)
    return places


def _framed(tokens: Tensor, frame: Frame) -> Tensor:
    return torch.cat([torch.tensor(frame.front).long(), tokens, torch.tensor(frame.back).long()])


def _two_texts(plain_bl: Tensor, frame: Frame, middle: slice) -> Tensor:
    """Special tokens in the places that they would have in two texts one after the other."""
    framed_bl = plain_bl.clone()
    for start, tokens in (
        (0, frame.front),
        (middle.start, frame.back + frame.front),
        (plain_bl.shape[1] - len(frame.back), frame.back),
    ):
        if tokens:
            there = torch.tensor(tokens, device=plain_bl.device)
            framed_bl[:, start : start + len(tokens)] = there
    return framed_bl
