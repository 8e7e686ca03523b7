"""Attention takes O(N^2 d) products, and does not need O(N^2) memory.

Shape suffixes: b batch, h head, n token that reads, m token that is read, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import multihead as mh
from claim import Claim, Outcome, Table, Verdict, check_equal, main
from multihead import cost
from multihead.bench.fresh import run_fresh
from multihead.bench.timing import Timing, alternate

CLAIM = Claim(
    name="linear_memory",
    title="Quadratic time, linear memory",
    text="Attention takes O(N^2 d) time and O(N^2) memory: twice the context is four times the "
    "work, and one head's scores in fp16 take 2 MB at 1K tokens and 32 GB at 128K.",
    method="Compute the scores' bytes to the digit; count products; time the dense path and "
    "multihead.attention at doubled lengths, in turns; measure the peak resident size of each in "
    "fresh processes, less that of a process with few tokens.",
    seconds=120,
    quick_seconds=15,
)

HEADS, HEAD_DIM, FEW = 4, 64, 128
MIB, GIB = 2**20, 2**30
# What the textbook tabulates: 1K to 128K tokens, 2 bytes a score, one head of 128.
TABULATED = (1024, 8192, 32768, 131072)

_PROBE = """
import sys, torch, multihead as mh
path, n, h, d = sys.argv[1], *map(int, sys.argv[2:])
q, k, v = torch.randn(3, 1, h, n, d)
if path == "dense":
    scores = q @ k.mT
    out = scores.mul_(d ** -0.5).softmax(-1) @ v
else:
    out = mh.attention(q, k, v)
"""


def measure(quick: bool) -> Verdict:
    """Bytes on paper, products, times and peaks."""
    paper = [(n, *_tabulated(n)) for n in TABULATED]
    lengths = [2048, 4096] if quick else [1024, 2048, 4096, 8192, 16384, 32768]
    products = [_products(n) for n in lengths[:2]]
    check_equal("products at twice the context", products[1], 4 * products[0])
    times = _times([512, 1024] if quick else [512, 1024, 2048, 4096, 8192], 3 if quick else 9)
    peaks = _peaks(lengths[-1:] if quick else lengths[:4], lengths)

    dense, ours = peaks.values()
    at = max(dense)
    tables = dense[at] / cost.score_table_bytes(at, at, "float32", HEADS)
    first, last = lengths[0], lengths[-1]
    linear = (ours[last] - ours[first]) / _tensor_bytes(last - first)
    time_ratio = _last_ratio(times["multihead"])
    quadratic = quick or 3 < time_ratio < 5  # a quick run's times are too short to judge by
    as_said = quadratic and 1.5 < tables < 3.5 and linear < 2
    finding = (
        f"Twice the context is 4 times the products exactly, and {time_ratio:.1f} times the time "
        f"at {max(times['multihead'])} tokens. O(N^2) memory is the dense path's alone: at {at} "
        f"tokens it grew by {dense[at] / MIB:,.0f} MiB ({tables:.1f} score tables), "
        f"multihead.attention by {ours[at] / MIB:,.0f} MiB, and by {linear:.1f} times the bytes of "
        f"query, key, value and output for each token from {first:,} to {last:,}. The tabulated "
        f"sizes are MiB and GiB: {paper[0][1]:,} bytes at 1K (2 MiB, "
        f"{paper[0][1] / 1e6:.2f} MB) and {paper[-1][1]:,} at 128K (32 GiB, "
        f"{paper[-1][1] / 1e9:.2f} GB)."
    )
    return Verdict(
        outcome=Outcome.LIMITS if as_said else Outcome.FAILS,
        finding=finding,
        table=Table(
            ("what", "tokens", "dense", "multihead"),
            (
                *(("scores, fp16", f"{n:,}", _bytes(table), "not built") for n, table, _ in paper),
                *(("products, Q K^T", f"{n:,}", f"{count:,}", "the same") for n, _, count in paper),
                *_rows("time", times, _time),
                *_rows("peak memory", peaks, lambda peak: f"{peak / MIB:,.1f} MiB"),
            ),
        ),
        figures={
            "peaks": {path: [[n, peak] for n, peak in of.items()] for path, of in peaks.items()},
            "times": {
                path: [[n, timing.median] for n, timing in of.items()] for path, of in times.items()
            },
        },
        n=f"1 process a peak, {min(t.n for t in times['multihead'].values())} or more calls a "
        f"time; measured with {HEADS} heads of {HEAD_DIM} in float32, tabulated for one of 128",
        seeds=0,
        spread="quartiles behind each time; each peak was measured once",
    )


def dense(query_bhnd: Tensor, key_bhmd: Tensor, value_bhmd: Tensor) -> Tensor:
    """The textbook's attention, which builds the scores."""
    scores_bhnm = query_bhnd @ key_bhmd.mT
    return scores_bhnm.mul_(query_bhnd.shape[-1] ** -0.5).softmax(-1) @ value_bhmd


def _tabulated(tokens: int) -> tuple[int, int]:
    """Bytes of one head's scores in fp16, and products of one Q K^T of a head of 128."""
    return (
        cost.score_table_bytes(tokens, tokens, "float16"),
        cost.score_products(tokens**2, 128),
    )


def _products(tokens: int) -> int:
    query, key, value = torch.empty(3, 1, HEADS, tokens, HEAD_DIM, device="meta")
    with FlopCounterMode(display=False) as counter:
        dense(query, key, value)
    return int(counter.get_total_flops()) // 2


def _times(lengths: list[int], rounds: int) -> dict[str, dict[int, Timing]]:
    contestants: dict[str, Callable[[], object]] = {}
    for n in lengths:
        tensors = torch.randn(3, 1, HEADS, n, HEAD_DIM).unbind()
        contestants[f"dense {n}"] = partial(dense, *tensors)
        contestants[f"multihead {n}"] = partial(mh.attention, *tensors)
    found = alternate(contestants, seconds=20, least=3, most=rounds)
    return {path: {n: found[f"{path} {n}"] for n in lengths} for path in ("dense", "multihead")}


def _peaks(dense_lengths: list[int], lengths: list[int]) -> dict[str, dict[int, int]]:
    """Grown bytes by length; the dense path only where it fits an ordinary machine."""
    few = _peak("multihead", FEW)
    fitting = {"dense": dense_lengths, "multihead": lengths}
    return {path: {n: _peak(path, n) - few for n in of} for path, of in fitting.items()}


def _peak(path: str, tokens: int) -> int:
    arguments = ["-c", _PROBE, path, *map(str, (tokens, HEADS, HEAD_DIM))]
    return run_fresh(arguments, threads=torch.get_num_threads()).peak_rss_bytes


def _tensor_bytes(tokens: int) -> int:
    return 4 * 4 * HEADS * tokens * HEAD_DIM


def _last_ratio(times: Mapping[int, Timing]) -> float:
    *_, before, last = times.values()
    return last.median / before.median


def _rows(
    what: str, of: Mapping[str, Mapping[int, Any]], show: Callable[[Any], str]
) -> list[tuple[str, ...]]:
    lengths = sorted({n for by_length in of.values() for n in by_length})
    cells = {n: [show(by[n]) if n in by else "not run" for by in of.values()] for n in lengths}
    return [(what, f"{n:,}", *cells[n]) for n in lengths]


def _time(t: Timing) -> str:
    return f"{1e3 * t.median:.1f} ms ({1e3 * t.low:.1f}-{1e3 * t.high:.1f})"


def _bytes(count: int) -> str:
    return f"{count:,} B = " + (f"{count // GIB} GiB" if count >= GIB else f"{count // MIB} MiB")


def draw(figure: Any, figures: Mapping[str, Any]) -> None:
    """Peak memory and time by length, for both paths."""
    memory, time = figure.subplots(1, 2)
    styles = {"dense": ("s--", "#b3500b"), "multihead": ("o-", "#0b5fa5")}
    for path, (style, color) in styles.items():
        for axes, points, unit in (
            (memory, figures["peaks"][path], MIB),
            (time, figures["times"][path], 1e-3),
        ):
            lengths, values = zip(*points, strict=True)
            axes.plot(lengths, [y / unit for y in values], style, color=color, label=path)
    for axes, title, label in (
        (memory, "peak memory, beyond few tokens", "MiB"),
        (time, "time of a call", "ms"),
    ):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:g}K")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.set_title(title)
        axes.set_xlabel("tokens")
        axes.set_ylabel(label)
    memory.legend(fontsize=8)


if __name__ == "__main__":
    main(CLAIM, measure, draw)
