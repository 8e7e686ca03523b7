"""Quality against the size of the KV cache: MHA, GQA, MQA and MLA on the same small model.

Language models of characters, two layers of width 64 with 8 query heads. What sharing keys and
values saves in parameters goes to the feed-forward networks, so that all models are of one size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from claim import Claim, Figures, Outcome, Table, Verdict, check_equal, main
from multihead import (
    BlockConfig,
    Causal,
    KVCache,
    LanguageModel,
    LanguageModelConfig,
    LatentAttention,
    LatentKVCache,
    RoPE,
    TransformerBlock,
)
from tiny_language import CONTEXT, VOCABULARY, learn
from training import half_range, mean, spread_out, told

CLAIM = Claim(
    name="kv_sharing",
    title="Quality against cache: MHA, GQA, MQA, MLA",
    text="Sharing keys and values among heads (GQA, MQA), or making them from a latent (MLA), "
    "shrinks the KV cache several times and costs little quality.",
    method="Language models of characters, two layers of width 64 with 8 heads and the same number "
    "of parameters in all (what sharing saves goes to the feed-forward network); held-out loss "
    "beside the bytes that their caches hold. Little is a rise of at most 3 % over MHA.",
    seconds=450,
    quick_seconds=16,
)
WIDTH, HEADS, LAYERS = 64, 8, 2
LITTLE = 0.03


@dataclass(frozen=True)
class Kind:
    """A way to have keys and values: KV heads, or the widths of a latent and its rotated key."""

    name: str
    kv_heads: int | None = None
    latent: tuple[int, int] | None = None

    @property
    def cached(self) -> int:
        """Numbers that a token leaves in the cache of a layer."""
        return sum(self.latent) if self.latent else 2 * (self.kv_heads or 0) * WIDTH // HEADS


KINDS = (
    Kind("MHA", 8),
    Kind("GQA, 4 KV heads", 4),
    Kind("GQA, 2 KV heads", 2),
    Kind("MLA, latent 24 + 8", latent=(24, 8)),
    Kind("MQA", 1),
    Kind("MLA, latent 12 + 4", latent=(12, 4)),
)


def measure(quick: bool) -> Verdict:
    """Train every kind with every seed, and fill its caches."""
    kinds = (KINDS[0], *KINDS[3:5]) if quick else KINDS
    seeds, steps = (1, 100) if quick else (3, 1200)
    jobs = [(kind, seed, steps) for kind in kinds for seed in range(seeds)]
    results = spread_out(loss, jobs)
    found = {kind: results[i * seeds : (i + 1) * seeds] for i, kind in enumerate(kinds)}
    full = mean(found[kinds[0]])
    rises = {kind: mean(values) / full - 1 for kind, values in found.items()}
    size = {kind: cache_bytes(kind) for kind in kinds}
    little = [kind for kind in kinds[1:] if rises[kind] <= LITTLE]
    outcome = Outcome.LIMITS if little else Outcome.FAILS
    if len(little) == len(kinds) - 1:
        outcome = Outcome.HOLDS
    told_kinds = "; ".join(
        f"{kind.name} has {size[kinds[0]] / size[kind]:.0f} times less cache and "
        f"{rises[kind]:+.1%} of loss"
        for kind in kinds[1:]
    )
    return Verdict(
        outcome=outcome,
        finding=f"Against MHA's {full:.3f} nats a character at "
        f"{size[kinds[0]] // CONTEXT:,} bytes a token: {told_kinds}.",
        table=Table(
            ("kind", "bytes a token", "parameters", "held-out loss", "against MHA"),
            tuple(
                (
                    kind.name,
                    f"{size[kind] // CONTEXT:,}",
                    f"{parameters(model(kind)):,}",
                    told(found[kind]),
                    f"{rises[kind]:+.1%}",
                )
                for kind in kinds
            ),
        ),
        figures={
            "names": [kind.name for kind in kinds],
            "bytes": [size[kind] // CONTEXT for kind in kinds],
            "losses": list(found.values()),
        },
        n=f"{len(kinds)} kinds, {steps:,} steps of 4 windows of {CONTEXT} characters; loss on 96 "
        "windows held out",
        seeds=seeds,
        spread="none: one seed"
        if seeds == 1
        else "half ranges over seeds stand beside the means; the largest is "
        f"{max(map(half_range, found.values())):.3f}",
    )


def model(kind: Kind) -> LanguageModel:
    """The model of a kind, its feed-forward networks as wide as MHA's parameters allow."""
    spare = parameters(_model(KINDS[0], 4 * WIDTH)) - parameters(_model(kind, 4 * WIDTH))
    return _model(kind, 4 * WIDTH + round(spare / (2 * WIDTH * LAYERS)))


def _model(kind: Kind, ffn_dim: int) -> LanguageModel:
    shared = None if kind.latent else RoPE()
    block = BlockConfig(
        WIDTH,
        HEADS,
        ffn_dim,
        num_kv_heads=kind.kv_heads,
        rope=shared,
        gated=False,
        activation="gelu",
    )
    made = LanguageModel(LanguageModelConfig(VOCABULARY, (block,) * LAYERS))
    if kind.latent:
        width = WIDTH // HEADS
        for layer in made.blocks:
            layer.attention = LatentAttention(
                WIDTH,
                HEADS,
                latent_dim=kind.latent[0],
                nope_dim=width,
                rope_dim=kind.latent[1],
                value_dim=width,
            )
    return made


def parameters(made: LanguageModel) -> int:
    """How many numbers a model learns."""
    return sum(weight.numel() for weight in made.parameters())


def loss(job: tuple[Kind, int, int]) -> float:
    """The held-out loss of a trained model, in nats a character."""
    kind, seed, steps = job
    torch.manual_seed(seed)
    return learn(model(kind), seed=seed, steps=steps, every=steps, batch=4)[-1]


def cache_bytes(kind: Kind) -> int:
    """What the caches of all layers hold of one window, in bytes, in float32."""
    held = 0
    with torch.no_grad():
        for layer in model(kind).blocks:
            assert isinstance(layer, TransformerBlock)
            cache = LatentKVCache(kind.latent[0]) if kind.latent else KVCache()
            layer(torch.randn(1, CONTEXT, WIDTH), mask=Causal(), cache=cache)
            held += cache.filled_nbytes
    check_equal(f"bytes of {kind.name}", held, 4 * LAYERS * CONTEXT * kind.cached)
    return held


def draw(figure: Any, figures: Figures) -> None:
    """Held-out loss over the bytes that a token leaves in the caches."""
    axes, sizes = figure.subplots(), sorted(set(figures["bytes"]))
    for i, (name, size, losses) in enumerate(
        zip(*(figures[key] for key in ("names", "bytes", "losses")), strict=True)
    ):
        marker, size = ("s", 1.03 * size) if "MLA" in name else ("o", size)  # side by side
        axes.errorbar(
            size, mean(losses), half_range(losses), marker=marker, color=f"C{i}", label=name
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, map(str, sizes))
    axes.set_xlabel("bytes of KV cache a token (two layers, float32)")
    axes.set_ylabel("held-out loss (nats a character)")
    axes.set_title("Loss against cache, at equal parameters")
    figure.legend(loc="outside right center", fontsize=8)


if __name__ == "__main__":
    main(CLAIM, measure, draw)
