"""What a small head can match, and what small heads cost.

Three looks at the width d of a head: how many keys it can tell apart when it learns to, how many
different keys the heads of an untrained layer of width 512 rank first, and what attention takes in
time when only the split of the width into heads changes.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from claim import Claim, Figures, Outcome, Table, Verdict, main
from multihead import MultiHeadAttention, attention
from multihead.cost import AttentionCost
from training import mean, spread_out, told, train

CLAIM = Claim(
    name="head_size",
    title="How small a head may be",
    text="A head below 32 dimensions is too small to match anything; 512 heads of size 1 are "
    "useless.",
    method="One query and one key vector for each of 64 (full: also 512) things, trained so that "
    "each query puts its weight on its own key, for heads of 1 to 32 dimensions; then the keys "
    "ranked first by heads of an untrained layer of width 512, and the time of attention, with "
    "width and products the same throughout.",
    seconds=75,
    quick_seconds=10,
)
SIZES = (1, 2, 4, 8, 16, 32)
WIDTH, TOKENS = 512, 128
LAYER_SIZES = (1, 4, 16, 32, 64, 128)


def measure(quick: bool) -> Verdict:
    """Match, rank and time."""
    things, seeds, steps = ((64,), 2, 300) if quick else ((64, 512), 3, 1000)
    cases = [(count, size) for count in things for size in SIZES]
    jobs = [(*case, seed, steps) for case in cases for seed in range(seeds)]
    results = spread_out(recall, jobs)
    found = {case: results[i * seeds : (i + 1) * seeds] for i, case in enumerate(cases)}
    firsts = {size: _first_keys(size) for size in LAYER_SIZES}
    seconds = _seconds(256 if quick else 1024, rounds=3 if quick else 15)
    pairs = {size: _exponentials(size) for size in LAYER_SIZES}
    small = [size for size in SIZES if all(mean(found[c, size]) > 0.95 for c in things)]
    blind = max(firsts[1]) <= 2 and mean(found[64, 1]) < 0.1
    refuted = bool(small) and small[0] < 32 and blind
    return Verdict(
        outcome=Outcome.LIMITS if refuted else Outcome.HOLDS,
        finding=f"A head of {small[0]} finds {mean(found[things[-1], small[0]]):.3f} of "
        f"{things[-1]} learned things, so that 32 is no limit; where new vectors must be compared "
        "in all their dimensions, head_rank shows one. A head of size 1 is different: its scores "
        "are q times k, so it ranks the largest key first or the smallest and finds "
        f"{mean(found[64, 1]):.3f} of 64; of {TOKENS} tokens the 512 heads of size 1 rank at "
        f"most {max(firsts[1])} first. For the same products they take {pairs[1] // pairs[64]} "
        f"times the exponentials of 8 heads of 64, and {seconds[1] / seconds[64]:.0f} times as "
        "long here.",
        table=Table(
            ("head size", *(f"found of {c}" for c in things), "top keys a head", "time to 8 x 64"),
            tuple(
                (
                    str(size),
                    *(told(found[c, size]) if size in SIZES else "-" for c in things),
                    f"{median(firsts[size]):.0f}" if size in firsts else "-",
                    f"{seconds[size] / seconds[64]:.2f}" if size in seconds else "-",
                )
                for size in sorted({*SIZES, *LAYER_SIZES})
            ),
        ),
        figures={
            "sizes": SIZES,
            "things": things,
            "found": [[mean(found[c, size]) for size in SIZES] for c in things],
            "layer_sizes": LAYER_SIZES,
            "seconds": [seconds[size] / seconds[64] for size in LAYER_SIZES],
        },
        n=f"{len(cases)} cases of {steps} steps on all things; all heads of a layer of width "
        f"{WIDTH} on {TOKENS} tokens; each time the median of {3 if quick else 15} rounds in turn",
        seeds=seeds,
        spread="half ranges over seeds stand beside the means; the layer's heads are its spread: "
        f"{min(firsts[64])} to {max(firsts[64])} top keys at size 64",
    )


def recall(job: tuple[int, int, int, int]) -> float:
    """The share of things whose query gives its own key more than half of its weight."""
    things, size, seed, steps = job
    torch.manual_seed(seed)
    query, key = (nn.Parameter(torch.randn(things, size)) for _ in range(2))
    own = torch.arange(things)

    def loss() -> Tensor:
        return F.cross_entropy(query @ key.T, own)

    train([query, key], loss, steps, rate=0.1)
    with torch.no_grad():
        weights = attention(
            query[None, None], key[None, None], torch.eye(things)[None, None], scale=1
        )
    return float((weights[0, 0].diagonal() > 0.5).float().mean())


def _first_keys(size: int) -> list[int]:
    """How many different keys each head of an untrained layer ranks first."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(WIDTH, WIDTH // size)
    with torch.no_grad():
        _, result = layer.forward_with_stats(torch.randn(1, TOKENS, WIDTH), stats=("argmax",))
    return [len(row.unique()) for row in result.argmax[0]]


def _seconds(length: int, rounds: int) -> dict[int, float]:
    """The median time of attention for each head size, taken in turn."""
    calls = {}
    for size in LAYER_SIZES:
        shape = (1, WIDTH // size, length, size)
        calls[size] = partial(attention, *(torch.randn(shape) for _ in range(3)))
        calls[size]()
    times: dict[int, list[float]] = {size: [] for size in LAYER_SIZES}
    for _ in range(rounds):
        for size, call in calls.items():
            start = time.perf_counter()
            call()
            times[size].append(time.perf_counter() - start)
    return {size: median(taken) for size, taken in times.items()}


def _exponentials(size: int) -> int:
    return AttentionCost.of_call(
        batch=1,
        heads=WIDTH // size,
        kv_heads=WIDTH // size,
        query_length=TOKENS,
        key_length=TOKENS,
        head_dim=size,
        value_dim=size,
        visible_pairs=WIDTH // size * TOKENS**2,
        dtype=torch.float32,
    ).exponentials


def draw(figure: Any, figures: Figures) -> None:
    """What is found, and the time, over the size of a head."""
    left, right = figure.subplots(1, 2)
    for things, values in zip(figures["things"], figures["found"], strict=True):
        left.plot(figures["sizes"], values, marker="o", label=f"{things} things")
    left.axvline(32, color="k", linestyle=":", linewidth=1)
    left.text(31, 0.5, "the textbook's limit", rotation=90, ha="right", va="center")
    left.set_ylabel("share found")
    left.set_title("Learned things that one head finds")
    left.legend(loc="center")
    right.plot(figures["layer_sizes"], figures["seconds"], marker="o", color="C3")
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter("{x:g}")
    right.set_ylabel("time (8 heads of 64 = 1)")
    right.set_title(f"Time at width {WIDTH} and equal products")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("size of a head")


if __name__ == "__main__":
    main(CLAIM, measure, draw)
