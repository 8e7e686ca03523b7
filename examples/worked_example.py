"""A forward pass of multi-head attention by hand: 3 tokens, width 4, 2 heads, every number.

    python examples/worked_example.py

prints what docs/worked-example.md shows. The weights are small round numbers, so that anybody can
follow with a pencil; the last step is the library's own layer on the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill

import torch
from torch import Tensor

import multihead as mh

TOKENS, WIDTH, HEADS = 3, 4, 2
HEAD_DIM = WIDTH // HEADS
WORDS = ("cat", "sat", "mat")

X = torch.tensor([[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 0, 0]]).double()
W_Q = torch.tensor([[0, 1, 1, 0], [0, 0, 0, -1], [0, 0, 0, 0], [-1, -1, 0, 0]]).double()
W_K = torch.tensor([[1, 0, 1, 0], [0, 1, 2, 0], [0, 0, 0, 1], [0, 1, 0, 2]]).double()
W_V = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 2], [0, 0, 1, 0], [0, 0, 0, 0]]).double()
W_O = torch.tensor([[1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 1, -1], [1, 0, 1, 0]]).double()


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what is done, and the lines of figures that come of it."""

    title: str
    text: str
    lines: tuple[str, ...]


def steps() -> list[Step]:
    """The whole pass, from the tokens to the library's output."""
    q, k, v = X @ W_Q, X @ W_K, X @ W_V
    found = [_inputs(), _projections(q, k, v), _split(q, k, v)]
    heads = []
    for h in range(HEADS):
        of_head = [_head(x, h) for x in (q, k, v)]
        found += _attend(h, *of_head)
        heads.append(_softmax(_scores(*of_head[:2])) @ of_head[2])
    concatenated = torch.cat(heads, dim=-1)
    out = concatenated @ W_O
    return [*found, _join(concatenated), _out(concatenated, out), _library(out), _causal(q, k)]


def layer() -> mh.MultiHeadAttention:
    """The library's layer with these weights; torch keeps the transpose of a textbook's W."""
    made = mh.MultiHeadAttention(WIDTH, HEADS).double()
    with torch.no_grad():
        made.qkv_proj.weight.copy_(torch.cat((W_Q, W_K, W_V), dim=1).mT)
        made.out_proj.weight.copy_(W_O.mT)
    return made


def _head(x: Tensor, h: int) -> Tensor:
    """Columns of head h: what reshape(N, H, d).transpose(0, 1)[h] gives."""
    return x.reshape(TOKENS, HEADS, HEAD_DIM).transpose(0, 1)[h]


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(HEAD_DIM)


def _softmax(scores: Tensor) -> Tensor:
    exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
    return exponentials / exponentials.sum(-1, keepdim=True)


def _inputs() -> Step:
    return Step(
        "Tokens and weights",
        f"{TOKENS} tokens of width {WIDTH}, one a row, and four {WIDTH} x {WIDTH} matrices: "
        f"{4 * WIDTH**2} weights, whatever the number of heads.",
        (
            *_matrix("X", X, WORDS),
            *_side_by_side(("W_Q", "W_K"), (W_Q, W_K)),
            *_side_by_side(("W_V", "W_O"), (W_V, W_O)),
        ),
    )


def _projections(q: Tensor, k: Tensor, v: Tensor) -> Step:
    first = _sum(X[0], W_Q[:, 0], q[0, 0])
    return Step(
        "Project",
        "Q = X W_Q, K = X W_K, V = X W_V, for all heads at once. The first entry of Q in full, "
        "then all three.",
        (
            f"Q[0, 0] = {first}",
            "",
            *_matrix("Q", q, WORDS),
            *_matrix("K", k, WORDS),
            *_matrix("V", v, WORDS),
        ),
    )


def _split(q: Tensor, k: Tensor, v: Tensor) -> Step:
    lines: list[str] = []
    for h in range(HEADS):
        names = [f"{name}{h}" for name in "QKV"]
        lines += _side_by_side(names, [_head(x, h) for x in (q, k, v)])
    return Step(
        "Split into heads",
        f"Head h has columns {HEAD_DIM} h to {HEAD_DIM} h + {HEAD_DIM - 1} of Q, K and V: "
        f"`Q.reshape({TOKENS}, {HEADS}, {HEAD_DIM}).transpose(0, 1)[h]`. Nothing is computed. The "
        "transpose is needed: without it, [h] is token h.",
        tuple(lines),
    )


def _attend(h: int, q: Tensor, k: Tensor, v: Tensor) -> list[Step]:
    scores, root = _scores(q, k), math.sqrt(HEAD_DIM)
    weights, row = _softmax(scores), 0
    exponentials = torch.exp(scores[row] - scores[row].max())
    result = weights @ v
    shown = " + ".join(_number(e) for e in exponentials)
    return [
        Step(
            f"Head {h}: scores",
            f"S{h} = Q{h} K{h}^T / sqrt({HEAD_DIM}): one number for each query (row) and key.",
            (
                f"S{h}[0, 1] = ({_sum(q[0], k[1], (q @ k.mT)[0, 1])}) / {root:.4f} "
                f"= {_number(scores[0, 1])}",
                "",
                *_matrix(f"S{h}", scores, WORDS),
            ),
        ),
        Step(
            f"Head {h}: softmax",
            "Each row by itself: subtract its largest score, take exponentials, divide by their "
            "sum. The first row in full.",
            (
                f"exp(S{h}[0] - {_number(scores[row].max())}) = {_row(exponentials)}",
                f"sum = {shown} = {_number(exponentials.sum())}",
                f"P{h}[0] = {_row(weights[row])}, which sums to {_number(weights[row].sum())}",
                "",
                *_matrix(f"P{h}", weights, WORDS),
            ),
        ),
        Step(
            f"Head {h}: values",
            f"Z{h} = P{h} V{h}: each row is a mean of the values, by the weights of its query.",
            (
                f"Z{h}[0, 0] = {_sum(weights[0], v[:, 0], result[0, 0])}",
                "",
                *_matrix(f"Z{h}", result, WORDS),
            ),
        ),
    ]


def _join(concatenated: Tensor) -> Step:
    return Step(
        "Concatenate",
        "Z = [Z0, Z1], side by side: width 4 again.",
        tuple(_matrix("Z", concatenated, WORDS)),
    )


def _out(concatenated: Tensor, out: Tensor) -> Step:
    first = concatenated[:, :HEAD_DIM] @ W_O[:HEAD_DIM]
    second = concatenated[:, HEAD_DIM:] @ W_O[HEAD_DIM:]
    return Step(
        "Mix with W_O",
        "Y = Z W_O. It is the same as a sum over heads, each with its own rows of W_O: that is how "
        "concatenated heads come together.",
        (
            f"Y[0, 0] = {_sum(concatenated[0], W_O[:, 0], out[0, 0])}",
            "",
            *_matrix("Y", out, WORDS),
            *_side_by_side(("Z0 W_O[0:2]", "Z1 W_O[2:4]"), (first, second)),
        ),
    )


def _library(out: Tensor) -> Step:
    with torch.no_grad():
        ours = layer()(X[None])[0]
    difference = float((ours - out).abs().max())
    agrees = "less than 1e-14" if difference < 1e-14 else f"{difference:.1e}"
    return Step(
        "The library",
        "`multihead.MultiHeadAttention(4, 2)` with these weights, in float64.",
        (
            *_matrix("layer(X)", ours, WORDS),
            f"largest difference from Y: {agrees}",
        ),
    )


def _causal(q: Tensor, k: Tensor) -> Step:
    lines: list[str] = []
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    for h in range(HEADS):
        scores = _scores(_head(q, h), _head(k, h)).masked_fill(hidden, -torch.inf)
        lines += _matrix(f"P{h}, causal", _softmax(scores), WORDS)
    with torch.no_grad():
        ours = layer()(X[None], mask=mh.Causal())[0]
    return Step(
        "Under a causal mask",
        "A score above the diagonal becomes minus infinity before the softmax, so its weight is "
        "exactly 0 and each row still sums to 1. `layer(X, mask=multihead.Causal())`.",
        (*lines, *_matrix("Y, causal", ours, WORDS)),
    )


def _sum(a: Tensor, b: Tensor, expected: Tensor) -> str:
    terms = " + ".join(f"{_short(x)}*{_short(y)}" for x, y in zip(a, b, strict=True))
    return f"{terms} = {_number(expected)}"


def _number(x: Tensor) -> str:
    return f"{float(x) + 0.0:.4f}"  # 0.0 is added so that no zero is shown as -0


def _short(x: Tensor) -> str:
    return f"{float(x):.0f}" if float(x).is_integer() else _number(x)


def _row(x: Tensor) -> str:
    return "[" + ", ".join(map(_number, x)) + "]"


def _matrix(name: str, x: Tensor, rows: Sequence[str]) -> list[str]:
    widest = max(map(len, rows))
    lines = [
        f"  {row.ljust(widest)}  " + " ".join(f"{_number(cell):>8}" for cell in cells)
        for row, cells in zip(rows, x, strict=True)
    ]
    return [name, *lines, ""]


def _side_by_side(names: Sequence[str], matrices: Sequence[Tensor]) -> list[str]:
    width = 9 * matrices[0].shape[1]
    lines = ["   ".join(name.ljust(width) for name in names)]
    for rows in zip(*matrices, strict=True):
        lines.append("   ".join("".join(f"{_number(c):>9}" for c in row) for row in rows))
    return [line.rstrip() for line in (*lines, "")]


def markdown() -> str:
    """The steps as sections of a page."""
    return "\n".join(
        f"## {number}. {step.title}\n\n{step.text}\n\n```text\n" + _block(step) + "\n```\n"
        for number, step in enumerate(steps(), start=1)
    )


def _block(step: Step) -> str:
    return "\n".join(step.lines).strip("\n")


if __name__ == "__main__":
    for number, step in enumerate(steps(), start=1):
        print(f"{number}. {step.title}\n{fill(step.text, 80)}\n\n{_block(step)}\n")
