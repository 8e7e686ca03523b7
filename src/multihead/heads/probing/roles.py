"""What heads are for, as far as controlled probes can tell: their roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from ...errors import ArgumentError
from .first_numbers import by_first_numbers
from .probe_scores import ROLES, Progress, Score, measure
from .probes import DEFAULT_SEEDS, Frame, Probes
from .role_thresholds import SHIPPED, RoleThresholds

_STRONGEST = 2
_LEFT_OUT = {
    "second_sink": "it needs texts, hence a tokenizer",
    "special_token": "no tokenizer names special tokens that stand around a text",
}


@dataclass(frozen=True)
class Role:
    """One role that one head has.

    Attributes:
        name: of `multihead.heads.ROLES`.
        score: from 0 to 1; `multihead.heads.probing.probe_scores` defines each.
        control: the same measured where the role predicts nothing.
        n: queries that both are means over.
        offset: for "positional", where the key stands: -1 is the one before the query's own.
    """

    name: str
    score: float
    control: float
    n: int
    offset: int | None = None

    def __str__(self) -> str:
        place = "" if self.offset is None else f" at {self.offset:+d}"
        return f"{self.name.replace('_', ' ')}{place} {self.score:.2f} against {self.control:.2f}"


@dataclass(frozen=True, eq=False)
class Roles:
    """The roles of every head of a model; a head may have several, or none.

    Attributes:
        layers: the attention modules by name, in the order in which they run.
        heads: by layer and head, the roles that it has. Heads that were pruned are there by their
            first numbers, with no role and NaN for scores.
        scores: by role, score and control of every head, also of those that do not have it.
        thresholds: what a role asks, and how many heads of random weights pass.
        probes, seeds: what was run.
        tokens: how many the model read for it.
        left_out: roles that could not be asked, with the reason.
    """

    layers: tuple[str, ...]
    heads: tuple[tuple[tuple[Role, ...], ...], ...]
    scores: Mapping[str, Score]
    thresholds: RoleThresholds
    probes: Probes
    seeds: tuple[int, ...]
    tokens: int
    left_out: Mapping[str, str] = field(default_factory=dict)

    def of(self, layer: int, head: int) -> tuple[Role, ...]:
        """The roles of one head; raises ArgumentError for a head that there is not."""
        if not (0 <= layer < len(self.heads) and 0 <= head < len(self.heads[layer])):
            counts = sorted({len(layer) for layer in self.heads})
            raise ArgumentError(
                f"There is no head ({layer}, {head}): the model has {len(self.heads)} layers of "
                f"{' or '.join(map(str, counts))} heads, counted from 0."
            )
        return self.heads[layer][head]

    def having(self, name: str) -> list[tuple[int, int, Role]]:
        """Layer, head and role of those that have the role `name`, the highest score first.

        Raises ArgumentError for a role that there is not.
        """
        if name not in ROLES:
            raise ArgumentError(f"Unknown role {name!r}; there are {', '.join(ROLES)}.")
        found = [
            (layer, head, role)
            for layer, heads in enumerate(self.heads)
            for head, roles in enumerate(heads)
            for role in roles
            if role.name == name
        ]
        return sorted(found, key=lambda it: -it[2].score)

    def table(self) -> str:
        """A line for each role: how many heads, the strongest, and what passes by chance."""
        rows = [("role", "heads", "strongest: score/control", "n", "asks", "chance")]
        for name, score in self.scores.items():
            found = self.having(name)
            strongest = "  ".join(
                f"L{layer}H{head} {role.score:.2f}/{role.control:.2f}"
                for layer, head, role in found[:_STRONGEST]
            )
            rows.append(
                (
                    name.replace("_", " "),
                    str(len(found)),
                    strongest or "-",
                    str(score.n),
                    self.asks(name),
                    self.by_chance(name),
                )
            )
        return "\n".join([*_columns(rows), *self.notes()])

    def notes(self) -> list[str]:
        """What stands below the table: what was probed, and what its columns mean."""
        some = next(iter(self.scores.values()))
        total = int(np.isfinite(some.score).sum())
        without = total - sum(1 for heads in self.heads for roles in heads if roles)
        periods = ", ".join(map(str, self.probes.periods))
        seeds = len(self.seeds)
        return [
            f"{total} heads, {without} of them without a role. A head may have several.",
            f"Probes: random sequences of {self.probes.length} tokens, repeats of {periods}; "
            f"{seeds} {'seed' if seeds == 1 else 'seeds'}, {self.tokens:,} tokens.",
            "asks: at least this score, and this much above the control (uniform: of both).",
            f"chance: share of {_random_heads(self.thresholds)} heads with random weights that "
            f"pass ({self.thresholds.source}).",
            *(f"{name.replace('_', ' ')}: {why}." for name, why in self.left_out.items()),
        ]

    def asks(self, name: str) -> str:
        """What a role asks of a head: least score, and least margin over its control."""
        if name == "uniform":
            return f"{self.thresholds.score[name]:.2f}"
        return f"{self.thresholds.score[name]:.2f}/{self.thresholds.margin[name]:.2f}"

    def by_chance(self, name: str) -> str:
        """The share of heads with random weights that have a role."""
        rate = self.thresholds.rate(name)
        return "-" if rate is None else f"{rate:.1%}"

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values, numbers to six digits."""
        return {
            "layers": list(self.layers),
            "heads": [[[_role_json(role) for role in head] for head in it] for it in self.heads],
            "scores": {
                name: {
                    "score": _rounded(score.score),
                    "control": _rounded(score.control),
                    "n": score.n,
                    **({} if score.offset is None else {"offset": score.offset.tolist()}),
                }
                for name, score in self.scores.items()
            },
            "thresholds": {
                "score": {name: _six(value) for name, value in self.thresholds.score.items()},
                "margin": {name: _six(value) for name, value in self.thresholds.margin.items()},
                "false_positives": dict(self.thresholds.false_positives),
                "random_heads": dict(self.thresholds.heads),
                "source": self.thresholds.source,
            },
            "probes": {
                "length": self.probes.length,
                "periods": list(self.probes.periods),
                "reach": self.probes.reach,
                "seeds": list(self.seeds),
                "tokens": self.tokens,
            },
            "left_out": dict(self.left_out),
        }


def find_roles(
    model: nn.Module,
    *,
    tokenizer: Any = None,
    probes: Probes | None = None,
    seeds: Sequence[int] = DEFAULT_SEEDS,
    thresholds: RoleThresholds | None = None,
    progress: Progress | None = None,
) -> Roles:
    """Find previous-token, induction, duplicate-token, first-key and other heads by probes.

    The model reads random and repeated random tokens: what a head does there has no cause in their
    meaning. For sinks, which meaning may make, it reads excerpts of texts. Each score stands beside
    a control. Scores, controls and their
    sources are in `multihead.heads.probing.probe_scores`. A role says what a head reads; not
    what it writes, nor what would be lost without it.

    Args:
        model: a language model or an encoder, of transformers or ours, or another module that
            takes token ids [B, L] and can be watched.
        tokenizer: its tokenizer. It names special tokens: they are kept out of random sequences,
            put around repeated ones, and asked for "special_token". "second_sink" needs its texts.
        probes: their lengths.
        seeds: one sequence of each kind a seed.
        thresholds: from which scores on a head has a role; by default those that come with the
            package. `calibrate_roles` makes them for one model.
        progress: called with the number of batches done and that of all.

    Raises:
        ArgumentError: probes that do not fit the model, or no seeds.
        InputError: a tokenizer of another kind.
        ModelError: a model that cannot be run so.

    Source: Olsson et al. 2022 (induction); Voita et al. 2019 (positional); Clark et al. 2019
    (special tokens); Gu et al. 2024 (first key).
    """
    probes = probes or Probes()
    thresholds = thresholds or SHIPPED
    seeds = tuple(seeds)
    scores = measure(model, probes, seeds, Frame.of(tokenizer), progress)
    scores = by_first_numbers(scores, model)
    held = {name: thresholds.held(name, score) for name, score in scores.by_role.items()}
    heads = tuple(
        tuple(
            tuple(
                _role(name, scores.by_role[name], layer, head)
                for name in scores.by_role
                if held[name][layer, head]
            )
            for head in range(count)
        )
        for layer, count in enumerate(scores.heads)
    )
    left_out = {name: why for name, why in _LEFT_OUT.items() if name not in held}
    return Roles(
        layers=scores.layers,
        heads=heads,
        scores=scores.by_role,
        thresholds=thresholds,
        probes=probes,
        seeds=seeds,
        tokens=scores.tokens,
        left_out=left_out,
    )


def _role(name: str, score: Score, layer: int, head: int) -> Role:
    offset = None if score.offset is None else int(score.offset[layer, head])
    found, control = float(score.score[layer, head]), float(score.control[layer, head])
    return Role(name, found, control, score.n, offset)


def _random_heads(thresholds: RoleThresholds) -> str:
    """How many heads of random weights were asked: fewest and most, over roles."""
    counts = sorted(thresholds.heads.values())
    ends = dict.fromkeys([*counts[:1], *counts[-1:]])
    return " to ".join(f"{count:,}" for count in ends) or "no"


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _role_json(role: Role) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": role.name,
        "score": _six(role.score),
        "control": _six(role.control),
        "n": role.n,
    }
    return document if role.offset is None else {**document, "offset": role.offset}


def _rounded(table: Any) -> list[list[float | None]]:
    return [[_six(value) if np.isfinite(value) else None for value in row] for row in table]


def _six(value: float) -> float:
    return float(f"{value:.6g}")
