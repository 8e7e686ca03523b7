"""Rows sum to 1, tokens without positions have no order, and a causal token sees no future.

Shape suffixes: b batch, h head, n token that reads, m token that is read, d width of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from claim import Claim, Outcome, Table, Verdict, main

CLAIM = Claim(
    name="softmax_rows",
    title="What softmax, masks and positions guarantee",
    text="The attention weights of each token sum to 1. Without positions, permuting the tokens "
    "permutes the outputs and changes nothing else. Under a causal mask no token sees the future.",
    method="Sum every row of the exact weights under several masks; permute a layer's input and "
    "undo it at the output, without and with rotary positions; replace all tokens behind a cut, "
    "by other tokens and by NaN, and compare the rows before it bit by bit.",
    seconds=30,
    quick_seconds=4,
)

WIDTH, HEADS = 128, 8
DTYPES = (torch.float32, torch.bfloat16)
FUTURES = {"other": "other tokens", "nan": "NaN"}


def measure(quick: bool) -> Verdict:
    """All three parts, in both dtypes; the second with and without positions."""
    tokens, seeds = (130, 3) if quick else (515, 10)
    sums = {dtype: [_row_sums(tokens, seed, dtype) for seed in range(seeds)] for dtype in DTYPES}
    empty = _weights_of_a_row_without_keys()
    moved = {
        name: [_permuted(tokens, seed, rope) for seed in range(seeds)]
        for name, rope in (("none", None), ("rotary", mh.RoPE()))
    }
    same = {
        (dtype, kind): [_future_changed(tokens, seed, dtype, kind) for seed in range(seeds)]
        for dtype in DTYPES
        for kind in FUTURES
    }
    worst_sum = {dtype: max(values) for dtype, values in sums.items()}
    rows_hold = worst_sum[torch.float32] < 1e-5
    order_holds = max(moved["none"]) < 1e-5 < 1e-2 < min(moved["rotary"])
    future_holds = all(all(values) for values in same.values())
    finding = (
        f"Rows sum to 1 within {worst_sum[torch.float32]:.0e} (float32) under every mask that "
        f"leaves a key, and a row without keys sums to {empty:.0f}: the one exception. Permuted "
        f"tokens give permuted outputs within {max(moved['none']):.0e} without positions, and "
        f"outputs that differ by {min(moved['rotary']):.0%} or more with rotary ones. Another "
        f"future, NaN included, leaves the past the same in "
        f"{sum(map(sum, same.values()))} of {sum(map(len, same.values()))} runs, bit for bit."
    )
    rows = (
        *(_row(f"sum - 1 of a row, {_name(d)}", values) for d, values in sums.items()),
        *(_row(f"permuted, positions: {name}", values) for name, values in moved.items()),
        *(
            (f"future of {FUTURES[kind]}, {_name(d)}", f"{sum(v)} of {len(v)}", "the same bits")
            for (d, kind), v in same.items()
        ),
    )
    return Verdict(
        outcome=Outcome.HOLDS if rows_hold and order_holds and future_holds else Outcome.FAILS,
        finding=finding,
        table=Table(("what is compared", "lowest", "highest"), rows),
        figures={"full": _influence(24, None), "causal": _influence(24, mh.Causal())},
        n=f"{seeds} inputs of {tokens} tokens, {HEADS} heads; cuts at a third of the tokens",
        seeds=seeds,
        spread="lowest and highest over seeds, each the largest of its input",
    )


def _row_sums(tokens: int, seed: int, dtype: torch.dtype) -> float:
    """The largest distance from 1 of a row's sum, over masks that leave each query a key."""
    torch.manual_seed(seed)
    q_bhnd, k_bhmd, v_bhmd = torch.randn(3, 1, HEADS, tokens, WIDTH // HEADS).to(dtype)
    masks = (None, mh.Causal(), mh.SlidingWindow(16), mh.PrefixCausal(40))
    worst = 0.0
    for mask in masks:
        result = mh.attention_with_stats(q_bhnd, k_bhmd, v_bhmd, mask=mask, stats=("lse",))
        weights_bhnm = result.weights(slice(None), slice(None))
        worst = max(worst, float((weights_bhnm.double().sum(-1) - 1).abs().max()))
    return worst


def _weights_of_a_row_without_keys() -> float:
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    hidden = mh.KeyPadding(torch.zeros(1, 4, dtype=torch.bool))
    result = mh.attention_with_stats(q, k, v, mask=hidden, stats=("lse",))
    return float(result.weights(slice(None), slice(None)).sum())


@torch.no_grad()
def _permuted(tokens: int, seed: int, rope: mh.RoPE | None) -> float:
    """Relative difference between outputs of permuted tokens and permuted outputs."""
    layer, x = _setting(tokens, seed, rope=rope)
    order = torch.randperm(tokens)
    expected = layer(x)[:, order]
    return float((layer(x[:, order]) - expected).norm() / expected.norm())


@torch.no_grad()
def _future_changed(tokens: int, seed: int, dtype: torch.dtype, kind: str) -> bool:
    """Whether the rows before a cut keep their bits when everything behind it is replaced."""
    layer, x = _setting(tokens, seed)
    layer, x = layer.to(dtype), x.to(dtype)
    cut = tokens // 3
    other = x.clone()
    other[:, cut:] = torch.nan if kind == "nan" else 9 * torch.randn_like(x[:, cut:])
    before, after = (layer(y, mask=mh.Causal())[:, :cut] for y in (x, other))
    return torch.equal(before, after)


def _influence(tokens: int, mask: mh.Mask | None) -> list[list[float]]:
    """Norm of the gradient of one direction of each output token, by each input token."""
    layer, x_bnc = _setting(tokens, 0)
    x_bnc.requires_grad_()
    direction_n = layer(x_bnc, mask=mask)[0] @ torch.randn(WIDTH)
    gradients = [torch.autograd.grad(y, x_bnc, retain_graph=True)[0][0] for y in direction_n]
    return [gradient.norm(dim=-1).tolist() for gradient in gradients]


def _setting(
    tokens: int, seed: int, rope: mh.RoPE | None = None
) -> tuple[mh.MultiHeadAttention, Tensor]:
    torch.manual_seed(seed)
    layer = mh.MultiHeadAttention(WIDTH, HEADS, rope=rope)
    return layer, 3 * torch.randn(1, tokens, WIDTH)


def _row(what: str, values: list[float]) -> tuple[str, str, str]:
    return what, f"{min(values):.1e}", f"{max(values):.1e}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def draw(figure: Any, figures: Mapping[str, Any]) -> None:
    """What each output depends on: under a causal mask nothing above the diagonal."""
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name in zip(panels, ("full", "causal"), strict=True):
        norms = [[value or float("nan") for value in row] for row in figures[name]]
        image = axes.pcolormesh(norms, cmap="viridis", vmin=0)
        axes.set_aspect("equal")
        axes.set_xlabel("input token")
        axes.set_title("no mask" if name == "full" else "causal: white is exactly 0")
        axes.grid(False)
    panels[0].set_ylabel("output token")
    panels[0].invert_yaxis()
    figure.colorbar(image, ax=panels, label="norm of the gradient")


if __name__ == "__main__":
    main(CLAIM, measure, draw)
