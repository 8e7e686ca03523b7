"""The rank of one head matters when the match itself is of high rank.

Which of 8 points is nearest to a query, in 16 dimensions: a product of all 16 coordinates decides.
One head of 16 can form it; several smaller heads hold the same number of coordinates in total, but
a softmax lies between their partial products, and their rankings do not add up to the ranking.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from claim import Claim, Figures, Outcome, Table, Verdict, main
from multihead import MultiHeadAttention
from training import half_range, mean, overlap, spread_out, told, train

CLAIM = Claim(
    name="head_rank",
    title="The rank of a head, and where more heads hurt",
    text="More heads are better, for each head finds something of its own.",
    method="Nearest of 8 points in 16 dimensions, by one cross-attention whose heads' keys have "
    "16 dimensions in all, as 1, 2, 4 or 16 heads. Every head has values of 8, enough to name the "
    "point alone, so that more heads have more parameters. Guessing gives 0.125.",
    seconds=90,
    quick_seconds=12,
)
POINTS, DIM, BATCH, QUERIES = 8, 16, 64, 8
# Points of this length, so that the softmax need not start flat.
LENGTH = 4.0
# (heads, dimensions of each one's queries and keys); the last has half of the rank and one head.
SHAPES = ((1, 16), (2, 8), (4, 4), (16, 1), (1, 8))


def measure(quick: bool) -> Verdict:
    """Train every split of the 16 dimensions, several times."""
    seeds, steps = (2, 300) if quick else (4, 2000)
    jobs = [(*shape, seed, steps) for shape in SHAPES for seed in range(seeds)]
    results = spread_out(accuracy, jobs)
    found = {shape: results[i * seeds : (i + 1) * seeds] for i, shape in enumerate(SHAPES)}
    one, split, half = found[1, 16], [found[shape] for shape in SHAPES[1:4]], found[1, 8]
    hurts = not any(overlap(values, one) for values in (*split, half))
    return Verdict(
        outcome=Outcome.FAILS if hurts else Outcome.LIMITS,
        finding=f"One head of 16 dimensions finds the nearest point in {mean(one):.3f} of all "
        f"cases; the same dimensions as 2, 4 or 16 heads in "
        f"{', '.join(f'{mean(values):.3f}' for values in split)}, though those have more "
        f"parameters, and one head of 8 in {mean(half):.3f}. Where a match needs all dimensions "
        "at once, more heads hurt.",
        table=Table(
            ("heads", "width of keys", "parameters", "accuracy"),
            tuple(
                (str(h), str(width), f"{_parameters(h, width):,}", told(values))
                for (h, width), values in found.items()
            ),
        ),
        figures={"shapes": SHAPES, "accuracies": list(found.values()), "guess": 1 / POINTS},
        n=f"{len(SHAPES)} shapes, {steps} steps of {BATCH * QUERIES} queries each; accuracy on "
        "32,768 new queries",
        seeds=seeds,
        spread="half ranges over seeds stand beside the means; the largest is "
        f"{max(map(half_range, found.values())):.3f}",
    )


def accuracy(job: tuple[int, int, int, int]) -> float:
    """How often a trained layer finds the nearest point."""
    heads, width, seed, steps = job
    torch.manual_seed(seed)
    attention, read = _layers(heads, width)

    def loss() -> Tensor:
        queries, points, nearest = _sample(BATCH)
        return F.cross_entropy(read(attention(queries, points)).flatten(0, 1), nearest.flatten())

    parameters = [*attention.parameters(), *read.parameters()]
    train(parameters, loss, steps, rate=3e-2 if steps < 500 else 2e-2)
    with torch.no_grad():
        queries, points, nearest = _sample(4096)
        return float((read(attention(queries, points)).argmax(-1) == nearest).float().mean())


def _layers(heads: int, width: int) -> tuple[MultiHeadAttention, nn.Linear]:
    attention = MultiHeadAttention(
        DIM, heads, head_dim=width, value_dim=POINTS, context_dim=DIM + POINTS
    )
    return attention, nn.Linear(DIM, POINTS)


def _sample(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, Q, DIM]; points, each with its number as one-hot; the nearest one's number."""
    points = F.normalize(torch.randn(batch, POINTS, DIM), dim=-1)
    queries = F.normalize(torch.randn(batch, QUERIES, DIM), dim=-1)
    nearest = (queries @ points.transpose(1, 2)).argmax(-1)
    numbers = torch.eye(POINTS).expand(batch, POINTS, POINTS)
    return LENGTH * queries, torch.cat([LENGTH * points, numbers], -1), nearest


def _parameters(heads: int, width: int) -> int:
    return sum(weight.numel() for part in _layers(heads, width) for weight in part.parameters())


def draw(figure: Any, figures: Figures) -> None:
    """Accuracy of every shape, a mark for each seed."""
    axes = figure.subplots()
    names = [f"{h} x {width}" for h, width in figures["shapes"]]
    for i, values in enumerate(figures["accuracies"]):
        axes.bar(i, mean(values), 0.6, color="C0" if i < len(names) - 1 else "C7", alpha=0.5)
        axes.plot([i] * len(values), values, "k.", markersize=4)
    axes.axhline(figures["guess"], color="k", linestyle=":", linewidth=1)
    axes.text(len(names) - 0.5, figures["guess"], "guessing", ha="right", va="bottom")
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("heads x width of their queries and keys")
    axes.set_ylabel("nearest of 8 points found")
    axes.set_title("16 dimensions of matching, in one head and in several (grey: half of them)")


if __name__ == "__main__":
    main(CLAIM, measure, draw)
