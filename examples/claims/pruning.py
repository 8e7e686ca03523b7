"""Heads can be pruned: a real model's loss against the share of its heads that is removed.

Heads of SmolLM2-135M are ordered by their gate gradient on one part of a text and removed, the
least important first, while the loss is measured on another part; random orders are the control.
"""

from __future__ import annotations

from typing import Any

from claim import Claim, Figures, Outcome, Table, Verdict, main
from multihead.heads import (
    gate_gradient,
    head_units,
    mean_loss,
    random_importance,
    removal_curve,
    token_rows,
)
from multihead.heads.text import built_in
from multihead.integrations import load_language_model
from training import half_range, mean, overlap, told

CLAIM = Claim(
    name="pruning",
    title="Heads can be pruned",
    text="Many heads can be removed from a trained model with little loss; which ones, matters.",
    method="SmolLM2-135M without training afterwards: heads in the order of their gate gradient on "
    "one part of a text, or in random orders, set to zero; loss on another part, for up to half "
    "(quick: a fifth) of the heads. Little is at most 0.1 nats a token more; many are 40 %, as "
    "Michel et al. 2019 removed from BERT.",
    seconds=120,
    quick_seconds=20,
)
LITTLE = 0.1
# What Michel et al. 2019 could remove from BERT.
MANY = 0.4


def measure(quick: bool) -> Verdict:
    """Order the heads, remove them, and measure."""
    length, scored, tested = (128, 2, 2) if quick else (256, 8, 8)
    shares = (0.1, 0.2) if quick else (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    seeds = 2 if quick else 3
    loaded = load_language_model("smollm2")
    characters = 8 * length * (scored + tested)  # of which every four or so are a token
    ids = loaded.tokenizer.encode(built_in().content[:characters])
    rows = token_rows(ids, length, scored + tested)
    model, learned, held_out = loaded.model, rows[:scored], rows[scored:]
    heads = len(head_units(model))
    counts = [round(share * heads) for share in shares]
    whole = mean_loss(model, held_out)

    def rises(importance: Any) -> list[float]:
        return [loss - whole for loss in removal_curve(model, held_out, importance, counts)]

    chosen = rises(gate_gradient(model, learned))
    drawn = [rises(random_importance(model, seed)) for seed in range(seeds)]
    by_chance = [list(values) for values in zip(*drawn, strict=True)]
    cheap = [share for share, rise in zip(shares, chosen, strict=True) if rise <= LITTLE]
    matters = not any(overlap([c], r) for c, r in zip(chosen, by_chance, strict=True))
    many = bool(cheap) and cheap[-1] >= MANY
    outcome = Outcome.HOLDS if many and matters else Outcome.LIMITS
    most = shares.index(cheap[-1]) if cheap else 0
    return Verdict(
        outcome=outcome if cheap else Outcome.FAILS,
        finding=f"Of {heads} heads {shares[most]:.0%} can go for a rise of {chosen[most]:+.3f} "
        f"nats a token when gate gradients choose them, at random for "
        f"{told(by_chance[most])}; {shares[-1]:.0%} cost {chosen[-1]:+.3f} and "
        f"{told(by_chance[-1])}. Nothing is trained afterwards.",
        table=Table(
            ("heads removed", "share", "rise, by gate gradient", "rise, at random"),
            tuple(
                (str(count), f"{share:.0%}", f"{rise:+.3f}", told(chance))
                for count, share, rise, chance in zip(
                    counts, shares, chosen, by_chance, strict=True
                )
            ),
        ),
        figures={"shares": shares, "chosen": chosen, "random": by_chance, "whole": whole},
        n=f"{heads} heads, scored on {learned.numel():,} tokens and tried on {held_out.numel():,} "
        f"others, whose loss is {whole:.3f} with all heads",
        seeds=seeds,
        spread="half ranges over random orders stand beside the means; the largest is "
        f"{max(map(half_range, by_chance)):.3f}",
    )


def draw(figure: Any, figures: Figures) -> None:
    """The rise of the loss over the share of heads removed."""
    axes = figure.subplots()
    shares = [100 * share for share in figures["shares"]]
    axes.plot(shares, figures["chosen"], marker="o", label="least gate gradient first")
    middle = [mean(values) for values in figures["random"]]
    bars = [half_range(values) for values in figures["random"]]
    axes.errorbar(shares, middle, bars, marker="o", color="C7", label="at random")
    axes.axhline(LITTLE, color="k", linestyle=":", linewidth=1)
    axes.set_xlabel("heads removed (%)")
    axes.set_ylabel("rise of the loss (nats a token)")
    axes.set_title(f"SmolLM2-135M, {figures['whole']:.2f} nats with all heads")
    axes.legend()


if __name__ == "__main__":
    main(CLAIM, measure, draw)
