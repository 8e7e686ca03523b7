"""Parameters and products for any number of heads, and what does grow with them.

Shape suffixes: b batch, n token, m token that is read, h head, d width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import multihead as mh
from claim import Claim, Outcome, Table, Verdict, check_equal, main
from multihead import cost

CLAIM = Claim(
    name="parameters",
    title="What the number of heads costs",
    text="Attention of width d has 4 d^2 parameters and the same products whatever the number of "
    "heads; more heads make the KV cache larger.",
    method="For every h that divides d: count a real layer's weights, of self- and of "
    "cross-attention; let torch count the products of the dense attention; count the elements of "
    "its score tensor; fill a real KV cache. Compare each with multihead.cost.",
    seconds=30,
    quick_seconds=5,
)

HEAD_DIM = 64


def measure(quick: bool) -> Verdict:
    """Count everything for each number of heads at one width."""
    width, tokens = (128, 64) if quick else (1024, 256)
    heads = [2**i for i in range(width.bit_length()) if width % 2**i == 0]
    counts = [_counts(width, h, tokens) for h in heads]
    first, last = counts[0], counts[-1]
    same = ("parameters", "products", "cache")
    constant = all(c[key] == first[key] for c in counts for key in same)
    grows = all(c["exponentials"] == h * tokens**2 for h, c in zip(heads, counts, strict=True))
    check_equal("parameters", first["parameters"], 4 * width**2)
    finding = (
        f"Parameters ({first['parameters']:,} = 4 x {width}^2), products ({first['products']:,}) "
        f"and KV cache ({first['cache']:,} bytes of float32) are the same for all {len(heads)} "
        f"numbers of heads: the part about the cache is wrong, which depends on KV heads x "
        f"head_dim and so not on h at one width. What grows is h N^2: from "
        f"{first['exponentials']:,} exponentials, and as many stored scores, with 1 head to "
        f"{last['exponentials']:,} with {heads[-1]}."
    )
    return Verdict(
        outcome=Outcome.LIMITS if constant and grows else Outcome.FAILS,
        finding=finding,
        table=Table(
            (
                "heads",
                "head_dim",
                "parameters",
                "products",
                "exponentials",
                "KV cache",
                f"cache at head_dim {HEAD_DIM}",
            ),
            tuple(
                (
                    str(h),
                    str(width // h),
                    *(f"{c[key]:,}" for key in (*same[:2], "exponentials")),
                    f"{c['cache']:,} B",
                    f"{c['cache_fixed_head_dim']:,} B",
                )
                for h, c in zip(heads, counts, strict=True)
            ),
        ),
        figures={"heads": heads, "width": width, "tokens": tokens, "counts": counts},
        n=f"{len(heads)} layers of width {width} on {tokens} tokens",
        seeds=0,
        spread="none: counts are exact, and equal to those of multihead.cost",
    )


def _counts(width: int, heads: int, tokens: int) -> dict[str, int]:
    layer = mh.MultiHeadAttention(width, heads)
    x = torch.randn(1, tokens, width)
    q_bhnd, k_bhmd, v_bhmd = torch.randn(3, 1, heads, tokens, width // heads)
    with FlopCounterMode(display=False) as counter:
        scores_bhnm = q_bhnd @ k_bhmd.mT
        scores_bhnm.softmax(-1) @ v_bhmd
    counts = {
        "parameters": sum(weight.numel() for weight in layer.parameters()),
        "products": counter.get_total_flops() // 2,
        "exponentials": scores_bhnm.numel(),
        "score_bytes": scores_bhnm.nbytes,
        "cache": _cache_bytes(layer, x),
        "cache_fixed_head_dim": _held(heads, tokens, HEAD_DIM),
    }
    _compare_with_cost(counts, width, heads, tokens)
    return counts


def _cache_bytes(layer: mh.MultiHeadAttention, x: torch.Tensor) -> int:
    cache = mh.KVCache()
    with torch.no_grad():
        layer(x, mask=mh.Causal(), cache=cache)
    return cache.filled_nbytes


def _held(heads: int, tokens: int, head_dim: int) -> int:
    cache = mh.KVCache()
    keys_bhmd, values_bhmd = torch.zeros(2, 1, heads, tokens, head_dim)
    cache.update(keys_bhmd, values_bhmd)
    return cache.filled_nbytes


def _compare_with_cost(counts: Mapping[str, int], width: int, heads: int, tokens: int) -> None:
    pairs, head_dim = heads * tokens**2, width // heads
    predicted = {
        "parameters": cost.attention_parameters(width, heads),
        "products": cost.score_products(pairs, head_dim) + cost.value_products(pairs, head_dim),
        "score_bytes": cost.score_table_bytes(tokens, tokens, "float32", heads),
    }
    cross = mh.MultiHeadAttention(width, heads, context_dim=width)
    counted = sum(weight.numel() for weight in cross.parameters())
    check_equal(f"parameters of cross-attention with {heads} heads", counted, 4 * width**2)
    for name, value in predicted.items():
        check_equal(f"{name} with {heads} heads", counts[name], value)


def draw(figure: Any, figures: Mapping[str, Any]) -> None:
    """Each count, as a multiple of what one head has."""
    axes = figure.subplots()
    heads, counts = figures["heads"], figures["counts"]
    series = {
        "parameters, products, KV cache": ("parameters", "o-", "#0b5fa5"),
        "exponentials, stored scores": ("exponentials", "s--", "#b3500b"),
        f"KV cache at head_dim {HEAD_DIM}": ("cache_fixed_head_dim", "^:", "#4f7a28"),
    }
    for label, (key, style, color) in series.items():
        ratios = [c[key] / counts[0][key] for c in counts]
        axes.plot(heads, ratios, style, color=color, label=label, markerfacecolor="none")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(heads, [str(h) for h in heads])
    axes.set_xlabel(f"heads, at width {figures['width']} (third line: width {HEAD_DIM} x heads)")
    axes.set_ylabel("times one head's")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.legend(fontsize=8)


if __name__ == "__main__":
    main(CLAIM, measure, draw)
