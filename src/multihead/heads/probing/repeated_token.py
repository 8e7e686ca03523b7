"""One token repeated: does the first key draw attention for its place, or for being different?

Gu et al. 2024 found that Mistral-7B and LLaMA3-8B, in which 97 % and 99 % of heads are sinks on
texts, have none when a text is one token over and over. A model without absolute positions cannot
tell such tokens apart: each layer sees the same vector everywhere, so that no key can be chosen for
what it is. One that knows absolute positions can.

Shape suffixes: b sequence, h head, q query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ArgumentError
from ...ops.diagonal import weights_along
from ...ops.problem import Problem
from ..forward import LayerObserver, check_positions, run
from ..watching.histogram import Table
from .probes import DEFAULT_SEEDS, Frame, random_tokens, words

SINK_HEAD = 0.3


@dataclass(frozen=True, eq=False)
class RepeatedToken:
    """The mean weight of the first key in every head, float64 [L, H]: Gu et al.'s alpha.

    Attributes:
        repeated: where every token of a sequence is the same.
        random: where they are random.
        uniform: what a head without preferences would give in a causal model.
        length: tokens of a sequence.
        n: sequences of each kind.
    """

    repeated: Table
    random: Table
    uniform: float
    length: int
    n: int

    @property
    def share_repeated(self) -> float:
        """Share of heads that give the first key more than 0.3 where one token is repeated."""
        return _share(self.repeated)

    @property
    def share_random(self) -> float:
        """Share of heads that give the first key more than 0.3 of random tokens."""
        return _share(self.random)

    def __str__(self) -> str:
        return (
            f"First key over {self.length} tokens (sequences of each kind: {self.n}): mean weight "
            f"{np.nanmean(self.random):.3f} of random tokens, {np.nanmean(self.repeated):.3f} of "
            f"one token repeated, {self.uniform:.3f} if all keys were alike. Heads above "
            f"{SINK_HEAD}: {self.share_random:.0%} and {self.share_repeated:.0%}."
        )


def probe_repeated_token(
    model: nn.Module,
    *,
    tokenizer: Any = None,
    seeds: Sequence[int] = DEFAULT_SEEDS,
    length: int = 64,
) -> RepeatedToken:
    """Compare the first key's weight in one token repeated and in random tokens.

    No special token is put in front: it would be the one that differs. `tokenizer` names special
    tokens, which are not drawn; each seed draws a token to repeat and a random sequence.

    Raises:
        ArgumentError: no seeds, a length below 2 or beyond the model's positions.
        ModelError: a model that cannot be run on tokens.
    """
    if length < 2:
        raise ArgumentError(f"length must be at least 2; got {length}.")
    if not seeds:
        raise ArgumentError("seeds must be at least one number; got none.")
    check_positions(model, length, "Give a smaller length.")
    known = words(model, Frame.of(tokenizer))
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(int(seed))
        rows.append(random_tokens(known, length, generator))
    random_bl = torch.stack(rows).to(next(model.parameters()).device)
    repeated_bl = random_bl[:, :1].expand(-1, length).contiguous()
    return RepeatedToken(
        repeated=_first_key(model, repeated_bl),
        random=_first_key(model, random_bl),
        uniform=sum(1 / row for row in range(1, length + 1)) / length,
        length=length,
        n=len(rows),
    )


class _FirstKey(LayerObserver):
    """Keeps the mean weight of the first key, [H] a layer."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__((shape[0], shape[1]))
        self.means: list[Tensor] = []

    def wants(self, problem: Problem) -> tuple[str, ...]:
        return ("lse",)

    def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
        self.next_layer(problem)
        column_1q1 = torch.zeros((1, problem.query_length, 1), dtype=torch.long, device=out.device)
        weights_bhq1, _ = weights_along(problem, stats["lse"], column_1q1)
        self.means.append(weights_bhq1.double().mean((0, 2, 3)).cpu())


def _first_key(model: nn.Module, token_ids: Tensor) -> Table:
    observer = _FirstKey(token_ids.shape)
    run(model, token_ids, observer)
    table = np.full((len(observer.means), max(map(len, observer.means))), np.nan)
    for place, mean in enumerate(observer.means):
        table[place, : len(mean)] = mean.numpy()
    return table


def _share(alpha: Table) -> float:
    return float((alpha[np.isfinite(alpha)] > SINK_HEAD).mean())
