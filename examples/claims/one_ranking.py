"""One softmax is one ranking of the keys: independent selections need a head each.

A sequence of 32 random points; the task is its maximum along each of D directions. One learned
query reads the points through a cross-attention of width 64, split into 1, 2, 4 or 8 heads.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from claim import Claim, Figures, Outcome, Table, Verdict, main
from multihead import MultiHeadAttention
from training import half_range, mean, overlap, spread_out, told, train

CLAIM = Claim(
    name="one_ranking",
    title="One softmax gives one ranking",
    text="A single head has one softmax per query and so one ranking of the tokens; what needs D "
    "independent selections needs D heads, at the same number of parameters.",
    method="D maxima of 32 points along D directions, learned by one attention layer of width 64 "
    "split into 1 to 8 heads; error as a share of the targets' variance (1 is a constant guess), "
    "beside 1 - h/D, which h heads would leave that make one selection each and nothing else.",
    seconds=150,
    quick_seconds=14,
)
POINTS, DIM, WIDTH, BATCH = 32, 16, 64, 64


class Selector(nn.Module):
    """A learned query, one attention layer over the points, and a linear reading of it."""

    def __init__(self, heads: int, selections: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.attention = MultiHeadAttention(WIDTH, heads, context_dim=DIM)
        self.read = nn.Linear(WIDTH, selections)

    def forward(self, points: Tensor) -> Tensor:
        """[B, selections] of points [B, POINTS, DIM]."""
        query = self.query.expand(len(points), 1, WIDTH)
        selected: Tensor = self.read(self.attention(query, points))[:, 0]
        return selected


def measure(quick: bool) -> Verdict:
    """Train every number of heads on every number of selections, several times."""
    selections = (4,) if quick else (2, 4, 8)
    heads = (1, 2, 4) if quick else (1, 2, 4, 8)
    seeds, steps = (2, 300) if quick else (3, 1000)
    pairs = list(product(selections, heads))
    jobs = [(d, h, seed, steps) for d, h in pairs for seed in range(seeds)]
    errors = spread_out(error, jobs)
    found = {pair: errors[i * seeds : (i + 1) * seeds] for i, pair in enumerate(pairs)}
    few = {pair: values for pair, values in found.items() if pair[1] < pair[0]}
    enough = {pair: values for pair, values in found.items() if pair[1] >= pair[0]}
    holds = all(
        overlap(found[d, d], found[d, h]) is False and mean(found[d, h]) > 2 * mean(found[d, d])
        for d, h in few
    )
    return Verdict(
        outcome=Outcome.HOLDS if holds else Outcome.LIMITS,
        finding=_finding(found),
        table=Table(
            ("selections", "heads", "width of a head", "parameters", "error", "1 - h/D"),
            tuple(
                (
                    str(d),
                    str(h),
                    str(WIDTH // h),
                    f"{_parameters(h, d):,}",
                    told(values),
                    f"{max(0.0, 1 - h / d):.3f}",
                )
                for (d, h), values in found.items()
            ),
        ),
        figures={
            "selections": selections,
            "heads": heads,
            "errors": [[found[d, h] for h in heads] for d in selections],
        },
        n=f"{len(pairs)} pairs of selections and heads, {steps} steps of {BATCH} sequences each; "
        "errors on 4,096 new sequences",
        seeds=seeds,
        spread=f"half ranges over seeds stand beside the means; the largest is "
        f"{max(map(half_range, few.values())):.3f} with too few heads, "
        f"{max(map(half_range, enough.values())):.3f} with enough",
    )


def error(job: tuple[int, int, int, int]) -> float:
    """The share of the variance that a trained layer leaves."""
    selections, heads, seed, steps = job
    torch.manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(DIM, selections))[0]
    model = Selector(heads, selections)

    def loss(batch: int = BATCH) -> Tensor:
        points = torch.randn(batch, POINTS, DIM)
        error: Tensor = (model(points) - _standard((points @ directions).amax(1))).square().mean()
        return error

    train(model.parameters(), loss, steps, rate=2e-2 if steps < 500 else 1e-2)
    with torch.no_grad():
        return float(loss(4096))


def _standard(maxima: Tensor) -> Tensor:
    """With mean 0 and variance 1, so that the error of a constant guess is 1."""
    center, width = _moments()
    return (maxima - center) / width


@cache
def _moments() -> tuple[float, float]:
    maxima = torch.randn(200_000, POINTS, generator=torch.Generator().manual_seed(0)).amax(1)
    return float(maxima.mean()), float(maxima.std())


def _parameters(heads: int, selections: int) -> int:
    return sum(weight.numel() for weight in Selector(heads, selections).parameters())


def _finding(found: dict[tuple[int, int], list[float]]) -> str:
    errors = {h: mean(values) for (d, h), values in found.items() if d == 4}
    return (
        f"Four selections leave {errors[1]:.2f} of the variance with one head, {errors[2]:.2f} "
        f"with two and {errors[4]:.3f} with four of the same {_parameters(4, 4):,} parameters: "
        "each head settles one selection, and what is left over stays unsettled."
    )


def draw(figure: Any, figures: Figures) -> None:
    """Error over the number of heads, a line for each number of selections."""
    axes = figure.subplots()
    heads = figures["heads"]
    for i, (selections, errors) in enumerate(
        zip(figures["selections"], figures["errors"], strict=True)
    ):
        color = f"C{i}"
        middle = [mean(values) for values in errors]
        bars = [half_range(values) for values in errors]
        axes.errorbar(
            heads, middle, bars, color=color, marker="o", label=f"{selections} selections"
        )
        left = [max(0.0, 1 - h / selections) for h in heads]
        axes.plot(heads, left, color=color, linestyle=":", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(heads, [str(h) for h in heads])
    axes.set_xlabel(f"heads of a layer of width {WIDTH}")
    axes.set_ylabel("share of variance left")
    axes.set_title("The error falls until every selection has a head (dotted: 1 - h/D)")
    axes.legend()


if __name__ == "__main__":
    main(CLAIM, measure, draw)
