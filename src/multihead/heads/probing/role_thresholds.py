"""From which score on a head is said to have a role, and how often random weights reach it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import ArgumentError
from ...nn.prepack import unpack
from .probe_scores import ROLES, Progress, Score, Scores, measure
from .probes import DEFAULT_SEEDS, Frame, Probes

FALSE_POSITIVES = 0.01
# Margins are set for half of that, since other random weights reach a little more.
_SETTING = 0.5 * FALSE_POSITIVES

# The least score that the word means, whatever random weights do: Gu et al. 2024 call a head with
# more than 0.3 on the first key a sink head, Voita et al. 2019 one that looks to a fixed place in
# 90 % of its queries positional. "Most" is a half; a key that everyone may pass over is one that
# takes a twentieth from all. The others are where the scores of trained heads part from the rest.
LEAST_SCORES: Mapping[str, float] = {
    "previous_token": 0.3,
    "induction": 0.2,
    "duplicate_token": 0.2,
    "first_key": 0.3,
    "second_sink": 0.05,
    "local": 0.5,
    "positional": 0.9,
    "uniform": 0.95,
    "special_token": 0.1,
}
# A score that its control reaches half of has another cause.
_LEAST_MARGIN_SHARE = 0.5


@dataclass(frozen=True)
class RoleThresholds:
    """What a role asks of a head, and what heads of random weights do.

    A head has a role where its score is at least `score` and its score less its control at least
    `margin`. For "uniform", where control and score both say how even the head is, both must reach
    `score`.

    Attributes:
        score, margin: by role.
        false_positives: by role, how many heads of random weights have it, of `heads` that were not
            used to set the thresholds. Heads of random weights may well be uniform in truth: those
            are counted, but not in error.
        source: the models whose weights were drawn anew, and how.
    """

    score: Mapping[str, float]
    margin: Mapping[str, float]
    false_positives: Mapping[str, int]
    heads: Mapping[str, int]
    source: str

    def rate(self, role: str) -> float | None:
        """Share of random heads that have a role; None where none could be asked."""
        heads = self.heads.get(role, 0)
        return self.false_positives[role] / heads if heads else None

    def held(self, role: str, score: Score) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which heads have a role: bool [L, H]."""
        if role == "uniform":
            held = np.minimum(score.score, score.control) >= self.score[role]
        else:
            margin = score.score - score.control
            held = (score.score >= self.score[role]) & (margin >= self.margin[role])
        return np.asarray(held)  # NaN, where a layer has no such head, compares as False


# Made by `from_random` of shuffled copies of SmolLM2-135M and MiniLM-L6 (4 each) and 24 decoders of
# 4 layers x 8 heads with weights of standard deviation 1.5 / sqrt(width), a third each with rotary,
# learned and sinusoidal positions; half of all set the margins, half were counted.
# `tests/random_heads.py` builds them, and a test makes these numbers again.
SHIPPED = RoleThresholds(
    score=LEAST_SCORES,
    margin={
        "previous_token": 0.15,
        "induction": 0.1,
        "duplicate_token": 0.1,
        "first_key": 0.15,
        "second_sink": 0.0871,
        "local": 0.25,
        "positional": 0.45,
        "uniform": 0.475,
        "special_token": 0.05,
    },
    false_positives={
        "previous_token": 0,
        "induction": 0,
        "duplicate_token": 0,
        "first_key": 0,
        "second_sink": 0,
        "local": 0,
        "positional": 0,
        "uniform": 124,
        "special_token": 0,
    },
    heads={**dict.fromkeys(ROLES, 1068), "second_sink": 684, "special_token": 144},
    source="shuffled SmolLM2 and MiniLM, and small decoders",
)


def calibrate_roles(
    model: nn.Module,
    *,
    tokenizer: Any = None,
    probes: Probes | None = None,
    seeds: Sequence[int] = DEFAULT_SEEDS,
    copies: int = 2,
    progress: Progress | None = None,
) -> RoleThresholds:
    """RoleThresholds for one model from copies of it with random weights.

    In a copy the entries of every parameter are in a random order: weights are as large as the
    trained ones, so that heads are as sharp, and mean nothing. The first half of the copies sets
    the margins, so that fewer than 1 % of heads have a role by chance, but none below half of the
    least score; the others count the false positives. Memory is that of one copy more.

    Raises:
        ArgumentError: fewer than two copies, or an odd number.
    """
    if copies < 2 or copies % 2:
        raise ArgumentError(
            "copies must be 2 or another even number: half of them set the thresholds, half count "
            f"what passes them by chance; got {copies}."
        )
    probes, frame = probes or Probes(), Frame.of(tokenizer)
    found = []
    for number in range(copies):
        scores = measure(random_copy(model, number), probes, seeds, frame)
        found.append(scores)
        if progress is not None:
            progress(number + 1, copies)
    setting, counting = found[: copies // 2], found[copies // 2 :]
    return from_random(setting, counting, f"{copies} copies of {type(model).__name__}")


def from_random(
    setting: Sequence[Scores], counting: Sequence[Scores], source: str
) -> RoleThresholds:
    """Margins from the scores of random heads, false positives from those of others."""
    margins = {}
    for role in ROLES:
        least = _LEAST_MARGIN_SHARE * LEAST_SCORES[role]
        chance = [it.by_role[role] for it in setting if role in it.by_role]
        margins[role] = max(least, _exceeded_by_few(chance, LEAST_SCORES[role]))
    drawn = RoleThresholds(LEAST_SCORES, margins, {}, {}, source)
    positives, heads = {}, {}
    for role in ROLES:
        scores = [it.by_role[role] for it in counting if role in it.by_role]
        if scores:
            positives[role] = sum(int(drawn.held(role, score).sum()) for score in scores)
            heads[role] = sum(int(np.isfinite(score.score).sum()) for score in scores)
    return RoleThresholds(LEAST_SCORES, margins, positives, heads, source)


def _exceeded_by_few(chance: Sequence[Score], least: float) -> float:
    """The least margin that few random heads reach together with the least score."""
    scores = np.concatenate([it.score[np.isfinite(it.score)] for it in chance] or [np.empty(0)])
    controls = np.concatenate([it.control[np.isfinite(it.score)] for it in chance] or [scores])
    margins = np.sort((scores - controls)[scores >= least])
    allowed = int(np.ceil(_SETTING * len(scores))) - 1
    if len(margins) <= max(allowed, 0):
        return -np.inf
    return float(np.nextafter(margins[-1 - max(allowed, 0)], np.inf))


def random_copy(model: nn.Module, seed: int) -> nn.Module:
    """A copy of a model with the entries of each parameter in a random order."""
    other = copy.deepcopy(model)
    unpack(other)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            order = torch.randperm(parameter.numel(), generator=generator).to(parameter.device)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    return other
