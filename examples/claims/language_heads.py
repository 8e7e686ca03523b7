"""Several heads against one on a real text, at the same number of parameters.

Language models of characters, two layers of width 64 with rotary positions, which differ in nothing
but the number of heads that the width is split into: the same start by seed, the same windows in
the same order, the same number of parameters.
"""

from __future__ import annotations

from typing import Any

import torch

from claim import Claim, Figures, Outcome, Table, Verdict, main
from multihead import BlockConfig, LanguageModel, LanguageModelConfig, RoPE
from tiny_language import CONTEXT, VOCABULARY, learn
from training import half_range, mean, overlap, spread_out, told

CLAIM = Claim(
    name="language_heads",
    title="One head against several on a real text",
    text="Multi-head attention converges better than a single head, at the same number of "
    "parameters.",
    method="Language models of characters, two layers of width 64 split into 1, 2, 4, "
    "8 and 16 heads (quick: 1 and 4), trained on Python's documentation; loss on its last tenth, "
    "which none has seen.",
    seconds=330,
    quick_seconds=30,
)
WIDTH = 64


def measure(quick: bool) -> Verdict:
    """Train every number of heads with every seed."""
    heads = (1, 4) if quick else (1, 2, 4, 8, 16)
    seeds, steps, layers = (2, 400, 2) if quick else (3, 1500, 2)
    jobs = [(h, seed, steps, layers) for h in heads for seed in range(seeds)]
    curves = spread_out(curve, jobs)
    found = {h: curves[i * seeds : (i + 1) * seeds] for i, h in enumerate(heads)}
    last = {h: [losses[-1] for losses in found[h]] for h in heads}
    best = min(heads, key=lambda h: mean(last[h]))
    parameters = {sum(w.numel() for w in model(h, layers).parameters()) for h in heads}
    better = [h for h in heads[1:] if not overlap(last[h], last[1])]
    outcome = (
        Outcome.HOLDS
        if len(better) == len(heads) - 1
        else Outcome.LIMITS
        if better
        else Outcome.FAILS
    )
    catches = _catches_up(found[best], mean(last[1]))
    return Verdict(
        outcome=outcome,
        finding=f"After {steps:,} steps one head is at {told(last[1])} nats a character and {best} "
        f"heads at {told(last[best])}, with {parameters.pop():,} parameters each. {best} heads are "
        f"where one head ends after {catches:.0%} of its steps. More heads than one end lower with "
        f"every seed for {', '.join(map(str, better)) or 'no number'} of "
        f"{', '.join(map(str, heads[1:]))}.",
        table=Table(
            ("heads", "size of a head", "halfway", "at the end", "perplexity"),
            tuple(
                (
                    str(h),
                    str(WIDTH // h),
                    told([losses[len(losses) // 2 - 1] for losses in found[h]]),
                    told(last[h]),
                    f"{torch.tensor(mean(last[h])).exp():.2f}",
                )
                for h in heads
            ),
        ),
        figures={
            "heads": heads,
            "steps": [(i + 1) * steps // 8 for i in range(8)],
            "curves": [[mean(losses) for losses in zip(*found[h], strict=True)] for h in heads],
            "last": [last[h] for h in heads],
        },
        n=f"{len(heads)} numbers of heads, {steps:,} steps of 4 windows of {CONTEXT} characters; "
        "loss on 96 windows held out",
        seeds=seeds,
        spread="half ranges over seeds stand beside the means; the largest at the end is "
        f"{max(map(half_range, last.values())):.3f}",
    )


def model(heads: int, layers: int) -> LanguageModel:
    """A model that differs from the others in its heads alone."""
    block = BlockConfig(WIDTH, heads, 4 * WIDTH, rope=RoPE(), gated=False, activation="gelu")
    return LanguageModel(LanguageModelConfig(VOCABULARY, (block,) * layers))


def curve(job: tuple[int, int, int, int]) -> list[float]:
    """The held-out loss at eight times of the training."""
    heads, seed, steps, layers = job
    torch.manual_seed(seed)
    return learn(model(heads, layers), seed=seed, steps=steps, every=steps // 8, batch=4)


def _catches_up(curves: list[list[float]], target: float) -> float:
    """The share of the training after which the mean curve is at a loss."""
    losses = [mean(values) for values in zip(*curves, strict=True)]
    return next((i + 1 for i, loss in enumerate(losses) if loss <= target), len(losses)) / len(
        losses
    )


def draw(figure: Any, figures: Figures) -> None:
    """The held-out loss over the steps, and where it ends."""
    left, right = figure.subplots(1, 2)
    for heads, losses in zip(figures["heads"], figures["curves"], strict=True):
        left.plot(figures["steps"], losses, marker=".", label=f"{heads} heads")
    left.set_xlabel("steps")
    left.set_ylabel("held-out loss (nats a character)")
    left.set_title("While training")
    left.legend()
    for place, values in enumerate(figures["last"]):
        right.plot([place] * len(values), values, "k.", markersize=4)
        right.plot([place - 0.2, place + 0.2], [mean(values)] * 2, color=f"C{place}")
    right.set_xticks(range(len(figures["heads"])), [str(h) for h in figures["heads"]])
    right.set_xlabel("heads of a width of 64")
    right.set_title("At the end, by seed")


if __name__ == "__main__":
    main(CLAIM, measure, draw)
