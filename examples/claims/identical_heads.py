"""Identical projections, concatenation against summing, and what W_O does.

Shape suffixes: b batch, n token, h head, d width of a head, c all heads' widths together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from claim import Claim, Outcome, Table, Verdict, main

CLAIM = Claim(
    name="identical_heads",
    title="Identical heads, concatenation and W_O",
    text="Heads with identical projections compute the same, and training would keep them so. "
    "Heads are concatenated, since summing them would lose what each found; W_O then mixes them.",
    method="Give all heads the projections of one and train with gradient descent towards a "
    "random teacher, with W_O random, zero, or made of identical blocks. Write the concatenation "
    "as a sum over W_O's blocks; fit the best single block to the plain sum of the heads; switch "
    "off one head and count the output coordinates that change. All in float64.",
    seconds=60,
    quick_seconds=10,
)

WIDTH, HEADS, TOKENS, BATCH = 32, 4, 12, 16
HEAD_DIM = WIDTH // HEADS
STARTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "random W_O": lambda weight_cc: weight_cc,
    "zero W_O": torch.zeros_like,
    "identical blocks of W_O": lambda weight_cc: weight_cc[:, :HEAD_DIM].repeat(1, HEADS),
}


def measure(quick: bool) -> Verdict:
    """Train from identical heads; then take concatenation and W_O apart."""
    seeds, steps = (2, 30) if quick else (5, 200)
    apart = {
        name: [_distances(start, seed, steps) for seed in range(seeds)]
        for name, start in STARTS.items()
    }
    last = {name: [run[-1] for run in runs] for name, runs in apart.items()}
    start_equal = max(run[0] for runs in apart.values() for run in runs) == 0
    parts = [_concatenation(seed) for seed in range(seeds)]
    sums, unexplained, with_w_o, without = zip(*parts, strict=True)
    stay = max(last["zero W_O"] + last["identical blocks of W_O"]) < 1e-9
    leave = min(last["random W_O"]) > 1e-3
    as_said = start_equal and stay and leave and max(sums) < 1e-12 and min(unexplained) > 0.2
    finding = (
        f"Identical projections give the same heads to the bit, but after {steps} steps they are "
        f"still the same only where W_O treats them alike (zero or identical blocks: apart by "
        f"{max(last['zero W_O'] + last['identical blocks of W_O']):.0e}); a random W_O sends each "
        f"head another gradient and drives them {min(last['random W_O']):.2f} or more apart. "
        f"Concatenation and W_O are a sum, over heads each with its own block (equal within "
        f"{max(sums):.0e}); it is the sum with one block for all that loses "
        f"{min(unexplained):.0%} or more of the output. One head reaches {min(with_w_o):.0%} of "
        f"the output coordinates through W_O, {max(without):.0%} without it."
    )
    rows = (
        *(
            (f"heads apart after {steps} steps, {name}", f"{min(v):.1e}", f"{max(v):.1e}")
            for name, v in last.items()
        ),
        ("concatenation minus sum over blocks", f"{min(sums):.1e}", f"{max(sums):.1e}"),
        ("lost by one block for all heads", f"{min(unexplained):.0%}", f"{max(unexplained):.0%}"),
        ("coordinates that a head reaches, W_O", f"{min(with_w_o):.0%}", f"{max(with_w_o):.0%}"),
        ("coordinates that a head reaches, none", f"{min(without):.0%}", f"{max(without):.0%}"),
    )
    return Verdict(
        outcome=Outcome.LIMITS if as_said else Outcome.FAILS,
        finding=finding,
        table=Table(("what is measured", "lowest", "highest"), rows),
        figures={"apart": apart},
        n=f"{len(STARTS)} starts, {HEADS} heads of {HEAD_DIM}, {steps} steps; apart: largest "
        "distance of a head's projections from head 0's, over their norm",
        seeds=seeds,
        spread="lowest and highest over seeds",
    )


def _distances(start: Callable[[Tensor], Tensor], seed: int, steps: int) -> list[float]:
    """How far the heads' projections are apart before each step, and after the last."""
    torch.manual_seed(seed)
    teacher, layer = _layer(), _layer()
    with torch.no_grad():
        heads_hdc = _projections(layer)
        heads_hdc.copy_(heads_hdc[:, :1].expand_as(heads_hdc))
        layer.out_proj.weight.copy_(start(layer.out_proj.weight))
    x_bnc = 2 * torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)
    target_bnc = teacher(x_bnc).detach()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    found = [_apart(layer)]
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(layer(x_bnc), target_bnc).backward()
        optimizer.step()
        found.append(_apart(layer))
    return found


@torch.no_grad()
def _apart(layer: mh.MultiHeadAttention) -> float:
    heads = _projections(layer)
    return float((heads - heads[:, :1]).square().sum((0, 2, 3)).max().sqrt() / heads[:, 0].norm())


def _projections(layer: mh.MultiHeadAttention) -> Tensor:
    """W_Q, W_K and W_V by head: [3, H, D, width]."""
    return layer.qkv_proj.weight.view(3, HEADS, HEAD_DIM, WIDTH)


@torch.no_grad()
def _concatenation(seed: int) -> tuple[float, float, float, float]:
    """Error of the sum over blocks, share lost by one block, coordinates with and without W_O."""
    torch.manual_seed(seed)
    layer = _layer()
    x_bnc = 2 * torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)
    heads_bhnd = _heads(layer, x_bnc)
    concatenated_bnc = heads_bhnd.transpose(1, 2).flatten(2)
    expected_bnc = layer(x_bnc)
    blocks_hdc = layer.out_proj.weight.mT.reshape(HEADS, HEAD_DIM, WIDTH)
    summed_bnc = (heads_bhnd @ blocks_hdc).sum(1)

    plain_sum = heads_bhnd.sum(1).reshape(-1, HEAD_DIM)
    output = expected_bnc.reshape(-1, WIDTH)
    left = output - plain_sum @ torch.linalg.lstsq(plain_sum, output).solution

    without_first = concatenated_bnc.clone()
    without_first[..., :HEAD_DIM] = 0
    mixed = layer.out_proj(without_first) != layer.out_proj(concatenated_bnc)
    unmixed = without_first != concatenated_bnc
    return (
        float((summed_bnc - expected_bnc).abs().max()),
        float(left.norm() ** 2 / output.norm() ** 2),
        float(mixed.double().mean()),
        float(unmixed.double().mean()),
    )


def _heads(layer: mh.MultiHeadAttention, x_bnc: Tensor) -> Tensor:
    """What each head gives, before W_O: [B, H, N, D]."""
    result: mh.AttentionResult = layer.forward_with_stats(x_bnc)[1]
    heads_bhnd: Tensor = result.out
    return heads_bhnd


def _layer() -> mh.MultiHeadAttention:
    return mh.MultiHeadAttention(WIDTH, HEADS).double()


def draw(figure: Any, figures: Mapping[str, Any]) -> None:
    """How far heads that start identical come apart, by step."""
    axes = figure.subplots()
    styles = zip(figures["apart"].items(), ("-", "--", ":"), strict=True)
    for color, ((name, runs), style) in zip(("#b3500b", "#0b5fa5", "#4f7a28"), styles, strict=True):
        for i, run in enumerate(runs):
            label = name if i == 0 else None
            axes.plot([max(y, 1e-17) for y in run], style, color=color, label=label, linewidth=1.5)
    axes.set_yscale("log")
    axes.set_ylim(5e-18, 10)
    axes.set_xlabel("step; one line a seed, no difference drawn at 1e-17")
    axes.set_ylabel("distance of heads that start identical")
    axes.legend(fontsize=8, loc="center right")


if __name__ == "__main__":
    main(CLAIM, measure, draw)
