"""The textbook's line of code for splitting heads, run as it is printed, then right.

N tokens, 8 heads of 64, so a width of 512: the names are the textbook's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from claim import Claim, Outcome, Table, Verdict, check_equal, main

CLAIM = Claim(
    name="reshape",
    title="Splitting heads by a reshape",
    text="Heads are split by `Q = (X @ W_Q).reshape(N, 8, 64)`; then `Q[h]`, `K[h]` and `V[h]` "
    "are the queries, keys and values of head h.",
    method="Run that line as printed for several N, and two mended versions; compare each with "
    "MultiHeadAttention of the same weights in float64, and change all other tokens to see whom "
    "`Q[0]` attends to.",
    seconds=20,
    quick_seconds=3,
)

HEADS, HEAD_DIM = 8, 64
WIDTH = HEADS * HEAD_DIM

Split = Callable[[Tensor], Tensor]
SPLITS: Mapping[str, Split] = {
    "as printed: reshape(N, 8, 64)": lambda x: x.reshape(-1, HEADS, HEAD_DIM),
    "wrong mend: reshape(8, N, 64)": lambda x: x.reshape(HEADS, -1, HEAD_DIM),
    "right: reshape(N, 8, 64).transpose(0, 1)": lambda x: x.reshape(-1, HEADS, HEAD_DIM).transpose(
        0, 1
    ),
}


def measure(quick: bool) -> Verdict:
    """Run each split for N below, at and above the number of heads."""
    lengths, seeds = ([5, 8, 32], 2) if quick else ([5, 8, 32, 512], 5)
    errors = {
        name: {n: [_error(split, n, seed) for seed in range(seeds)] for n in lengths}
        for name, split in SPLITS.items()
    }
    printed, mended, right = errors.values()
    weights_shape, ignores_tokens = _what_printed_attends_to(32)
    check_equal("weights of Q[0]", weights_shape, (HEADS, HEADS))
    silent = [e for e in printed[HEADS] + mended[32] if isinstance(e, float)]
    correct = [e for es in right.values() for e in es if isinstance(e, float)]
    agrees = all(isinstance(e, float) and e < 1e-12 for es in printed.values() for e in es)
    finding = (
        f"`Q[h]` of the printed line is token h, not head h: Q[0] K[0]^T is {HEADS} x {HEADS}, "
        f"heads against heads of token 0 alone, and "
        f"{'does not change' if ignores_tokens else 'changes'} when every other token does. Fewer "
        f"than {HEADS} tokens raise IndexError, more give a result of {HEADS} rows; at N = {HEADS} "
        f"the shape is right by chance and the numbers are wrong by {min(silent):.0%} or more of "
        f"the output. With transpose(0, 1) behind the reshape the error is at most "
        f"{max(correct):.0e}."
    )
    return Verdict(
        outcome=Outcome.HOLDS if agrees else Outcome.FAILS,
        finding=finding,
        table=Table(
            ("split", *(f"N = {n}" for n in lengths)),
            tuple((name, *(_cell(of[n]) for n in lengths)) for name, of in errors.items()),
        ),
        figures={
            "lengths": lengths,
            "errors": {name: [_worst(of[n]) for n in lengths] for name, of in errors.items()},
            "weights": _weights_of_both(),
        },
        n=f"{len(SPLITS)} splits x {len(lengths)} lengths; error: norm of the difference over norm "
        "of the right output",
        seeds=seeds,
        spread="lowest to highest over seeds, in each cell",
    )


def textbook(x: Tensor, layer: mh.MultiHeadAttention, split: Split) -> Tensor:
    """The textbook's forward pass: split, attend in each head, concatenate, multiply by W_O."""
    w_q, w_k, w_v = (w.mT for w in layer.qkv_proj.weight.chunk(3))
    q, k, v = split(x @ w_q), split(x @ w_k), split(x @ w_v)
    heads = [_attend(q[h], k[h], v[h]) for h in range(HEADS)]
    return torch.cat(heads, dim=-1) @ layer.out_proj.weight.mT


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _weights(q, k) @ v


def _weights(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1)


def _setting(tokens: int, seed: int) -> tuple[mh.MultiHeadAttention, Tensor]:
    torch.manual_seed(seed)
    return mh.MultiHeadAttention(WIDTH, HEADS).double(), 3 * torch.randn(tokens, WIDTH).double()


@torch.no_grad()
def _error(split: Split, tokens: int, seed: int) -> float | str:
    """Relative error, the exception's name, or the wrong shape."""
    layer, x = _setting(tokens, seed)
    expected = layer(x[None])[0]
    try:
        out = textbook(x, layer, split)
    except IndexError as error:
        return type(error).__name__
    if out.shape != expected.shape:
        return f"{out.shape[0]} rows"
    return float((out - expected).norm() / expected.norm())


@torch.no_grad()
def _what_printed_attends_to(tokens: int) -> tuple[tuple[int, ...], bool]:
    """Shape of the weights of `Q[0]` as printed, and whether no other token matters to it."""
    layer, x = _setting(tokens, 0)
    w_q, w_k, _ = (w.mT for w in layer.qkv_proj.weight.chunk(3))
    split = SPLITS["as printed: reshape(N, 8, 64)"]
    others = torch.cat((x[:1], torch.randn_like(x[1:])))
    before, after = (_weights(split(y @ w_q)[0], split(y @ w_k)[0]) for y in (x, others))
    return tuple(before.shape), bool(torch.allclose(before, after, rtol=0, atol=1e-12))


@torch.no_grad()
def _weights_of_both() -> dict[str, list[list[float]]]:
    layer, x = _setting(12, 0)
    w_q, w_k, _ = (w.mT for w in layer.qkv_proj.weight.chunk(3))
    first, _, last = SPLITS.values()
    weights = (_weights(split(x @ w_q)[0], split(x @ w_k)[0]) for split in (first, last))
    return dict(zip(("printed", "right"), (w.tolist() for w in weights), strict=True))


def _cell(found: list[float | str]) -> str:
    numbers = [e for e in found if isinstance(e, float)]
    if not numbers:
        return str(found[0])
    low, high = min(numbers), max(numbers)
    return f"{low:.2f} to {high:.2f}" if high > 1e-3 else f"{low:.0e} to {high:.0e}"


def _worst(found: list[float | str]) -> float | str:
    numbers = [e for e in found if isinstance(e, float)]
    return max(numbers) if numbers else str(found[0])


def draw(figure: Any, figures: Mapping[str, Any]) -> None:
    """The weights that `Q[0]` leads to, as printed and right."""
    titles = {
        "printed": "As printed, Q[0]: token 0's heads read one another",
        "right": "Transposed, Q[0]: head 0's tokens read one another",
    }
    for axes, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        axes.imshow(figures["weights"][name], cmap="viridis")
        axes.set_title(title, fontsize=8)
        what = "head" if name == "printed" else "token"
        axes.set_xlabel(f"{what} that is read")
        axes.set_ylabel(f"{what} that reads")
        axes.grid(False)


if __name__ == "__main__":
    main(CLAIM, measure, draw)
