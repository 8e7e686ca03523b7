"""From which length on attention outweighs the projections: counted, then timed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch

import multihead as mh
from claim import Claim, Outcome, Table, Verdict, check_equal, main
from multihead import cost
from multihead.bench.timing import Timing, alternate

CLAIM = Claim(
    name="crossover",
    title="Where attention overtakes the projections",
    text="For short inputs the four projections are most of the work; for long ones attention is, "
    "since it grows with N^2 and they grow with N.",
    method="Count at which N the products of attention (2 N^2 d, or half of it where causal) reach "
    "those of the projections (4 N d^2); then time a layer's projections and its attention, in "
    "turns, and find where the times cross.",
    seconds=150,
    quick_seconds=5,
)

HEAD_DIM = 64
MASKS: Mapping[str, mh.Mask | None] = {"full": None, "causal": mh.Causal()}


def measure(quick: bool) -> Verdict:
    """Both crossings of every width and mask."""
    widths, rounds = ([128], 3) if quick else ([256, 512, 1024], 9)
    crossings = [_crossing(width, kind, rounds) for width in widths for kind in MASKS]
    for found in crossings:
        # A causal mask leaves N (N + 1) / 2 pairs, hence the token less.
        expected = 2 * found["width"] if found["kind"] == "full" else 4 * found["width"] - 1
        check_equal("length where the products are equal", found["counted"], expected)
    ratios = [found["timed"] / found["counted"] for found in crossings if found["timed"]]
    # How far times follow counts depends on the processor; a quick run is too short to judge it.
    follows = len(ratios) == len(crossings) and all(0.5 < ratio < 2 for ratio in ratios)
    timed = (
        f"Timed, it did so between {min(ratios):.2f} and {max(ratios):.2f} times those lengths"
        if ratios
        else "Timed, it did so at none of the lengths tried"
    )
    return Verdict(
        outcome=Outcome.HOLDS if quick or follows else Outcome.LIMITS,
        finding="Counted in products, attention reaches the projections at N = 2 d, and under a "
        f"causal mask at N = 4 d - 1, for every width. {timed} ({len(ratios)} of "
        f"{len(crossings)} crossings found): its products run at another rate than those of a "
        "large matrix product, and its exponentials are in no count of products.",
        table=Table(
            (
                "width",
                "mask",
                "counted N",
                "timed N",
                "timed / counted",
                "attention at counted N",
                "projections",
            ),
            tuple(_row(found) for found in crossings),
        ),
        figures={"crossings": crossings},
        n=f"{len(crossings)} layers with heads of {HEAD_DIM} in float32, 5 lengths each, up to "
        f"{rounds} calls a time",
        seeds=0,
        spread="quartiles of the times, in brackets",
    )


def _crossing(width: int, kind: str, rounds: int) -> dict[str, Any]:
    """Where products and times are equal, and the times by length."""
    counted = next(n for n in count(1) if _attention(n, width, kind) >= _projections(n, width))
    lengths = [round(counted * 2.0**power) for power in (-3, -2, -1, 0, 1)]
    times = [_times(n, width, kind, rounds) for n in lengths]
    return {
        "width": width,
        "kind": kind,
        "counted": counted,
        "timed": _where_equal(lengths, times),
        "lengths": lengths,
        "times": [{name: timing.to_json() for name, timing in of.items()} for of in times],
    }


def _attention(tokens: int, width: int, kind: str) -> int:
    pairs = tokens**2 if kind == "full" else mh.Causal().visible_pairs(tokens, tokens)
    heads = width // HEAD_DIM
    return heads * (cost.score_products(pairs, HEAD_DIM) + cost.value_products(pairs, HEAD_DIM))


def _projections(tokens: int, width: int) -> int:
    return tokens * cost.attention_parameters(width, width // HEAD_DIM)


@torch.no_grad()
def _times(tokens: int, width: int, kind: str, rounds: int) -> dict[str, Timing]:
    layer = mh.MultiHeadAttention(width, width // HEAD_DIM)
    x = torch.randn(1, tokens, width)
    query, key, value = torch.randn(3, 1, width // HEAD_DIM, tokens, HEAD_DIM)

    def project() -> None:
        with torch.no_grad():
            layer.qkv_proj(x)
            layer.out_proj(x)

    attend = partial(mh.attention, query, key, value, mask=MASKS[kind])
    return alternate({"attention": attend, "projections": project}, seconds=4, least=3, most=rounds)


def _where_equal(lengths: Sequence[int], times: Sequence[Mapping[str, Timing]]) -> float | None:
    """The last length at which both take as long, between timed ones; None if they never do."""
    logs = [math.log(of["attention"].median / of["projections"].median) for of in times]
    found = None
    for (n, log_n), (m, log_m) in pairwise(zip(lengths, logs, strict=True)):
        if log_n <= 0 < log_m:
            found = float(n * (m / n) ** (log_n / (log_n - log_m)))
    return found


def _row(found: Mapping[str, Any]) -> tuple[str, ...]:
    at = found["times"][found["lengths"].index(found["counted"])]
    timed = found["timed"]
    return (
        str(found["width"]),
        found["kind"],
        f"{found['counted']:,}",
        f"{timed:,.0f}" if timed else "not found",
        f"{timed / found['counted']:.2f}" if timed else "",
        *(
            f"{1e3 * t['median']:.2f} ms ({1e3 * t['low']:.2f}-{1e3 * t['high']:.2f})"
            for t in (at["attention"], at["projections"])
        ),
    )


def draw(figure: Any, figures: Mapping[str, Any]) -> None:
    """Attention's share of the time by length over width, with the counted share beside it."""
    axes = figure.subplots()
    styles = {"full": ("o-", "#0b5fa5", 2), "causal": ("s--", "#b3500b", 4)}
    for found in figures["crossings"]:
        style, color, per_width = styles[found["kind"]]
        lengths = [n / (per_width * found["width"]) for n in found["lengths"]]
        shares = [
            t["attention"]["median"] / (t["attention"]["median"] + t["projections"]["median"])
            for t in found["times"]
        ]
        label = f"{found['kind']}, d = {found['width']}"
        size = 3 + 2 * math.log2(found["width"] / 128)
        axes.plot(lengths, shares, style, color=color, markersize=size, linewidth=1, label=label)
    counted = [2.0**power for power in (-3, -2, -1, 0, 1)]
    axes.plot(counted, [x / (1 + x) for x in counted], color="#555555", label="counted in products")
    axes.axhline(0.5, color="#555555", linewidth=0.7, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(counted, [f"{x:g}" for x in counted])
    axes.set_xlabel("N as a multiple of the counted crossing (2 d full, 4 d causal)")
    axes.set_ylabel("attention's share of the time")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main(CLAIM, measure, draw)
