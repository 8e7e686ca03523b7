"""README's plot: rates by length, ours, torch and the best other, under the limit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from cells import best_peer, measured
from multihead.bench.contest import OURS, TORCH
from multihead.bench.results import Document
from multihead.bench.results import file_name as result_name

CAPTION = "GF/s by length: multihead, torch's SDPA, the best other; the processor's limit as a line"

Panel = dict[str, Any]

_WIDTH = 64
_KINDS, _DTYPES = ("full", "causal"), ("float32", "bfloat16")

# Told apart without colour too: by marker and by dash.
_STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "#0b5fa5", "marker": "o", "linewidth": 2.2},
    TORCH: {"color": "#b3500b", "marker": "s", "linestyle": "--"},
    "best other": {"color": "#4f7a28", "marker": "^", "linestyle": ":"},
}
_LIMIT: dict[str, Any] = {"color": "#555555", "linewidth": 1.0}


def file_name(document: Document) -> str:
    """The picture's name: the document's, as an SVG."""
    return result_name(document).replace(".json", ".svg")


def panels(document: Document) -> list[Panel]:
    """The numbers of each panel: kind, dtype, lengths, rates by series, names, limit."""
    found = []
    for kind in _KINDS:
        for dtype in _DTYPES:
            rows = sorted(
                (
                    row
                    for row in measured(document)
                    if (row["kind"], row["dtype"], row["width"]) == (kind, dtype, _WIDTH)
                ),
                key=lambda row: int(row["keys"]),
            )
            if rows:
                found.append(_panel(kind, dtype, rows, document["limits"]))
    return found


def _panel(kind: str, dtype: str, rows: list[dict[str, Any]], limits: dict[str, Any]) -> Panel:
    others = [best_peer(row) for row in rows]
    return {
        "kind": kind,
        "dtype": dtype,
        "lengths": [row["keys"] for row in rows],
        "rates": {
            OURS: [row["gflops"] for row in rows],
            TORCH: [row["gflops"] / row["ratios"][TORCH] for row in rows],
            "best other": [
                None if name is None else row["gflops"] / row["ratios"][name]
                for row, name in zip(rows, others, strict=True)
            ],
        },
        "others": others,
        "limit": [rows[0]["limit"], limits[rows[0]["limit"]]],
    }


def digest(document: Document) -> str:
    """What a picture of these numbers carries in its description."""
    return hashlib.sha256(json.dumps(panels(document)).encode()).hexdigest()[:16]


def draw(document: Document, folder: Path) -> str:
    """Draw the plot into `folder`; say what was done, or why not."""
    try:
        import matplotlib
    except ImportError:
        return "Plot: left as it is, since matplotlib is not installed"
    matplotlib.use("svg")
    from matplotlib import pyplot

    # The same numbers give the same file: ids from a constant, no date, text as text.
    style = {"svg.hashsalt": "multihead", "svg.fonttype": "none", "font.size": 9}
    found = panels(document)
    if not found:
        return f"Plot: none, since no row for {file_name(document)} has a width of {_WIDTH}"
    with pyplot.rc_context(style):
        figure, grid = pyplot.subplots(
            2, 2, figsize=(8.6, 5.6), sharex=True, squeeze=False, layout="constrained"
        )
        for panel in found:
            axes = grid[_KINDS.index(panel["kind"])][_DTYPES.index(panel["dtype"])]
            _draw_panel(axes, panel)
            handles, labels = axes.get_legend_handles_labels()
        for axes in grid[-1]:
            axes.set_xlabel("tokens; below the lines, who is the best other")
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
        path = folder / file_name(document)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Description": digest(document)})
        pyplot.close(figure)
    return f"Plot: {path.name}"


def _draw_panel(axes: Any, panel: Panel) -> None:
    lengths = panel["lengths"]
    for name, rates in panel["rates"].items():
        points = [(x, y) for x, y in zip(lengths, rates, strict=True) if y is not None]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, markersize=5, **_STYLES[name])
    for length, name in zip(lengths, panel["others"], strict=True):
        if name is not None:  # at the foot of the panel, where no line runs
            axes.text(
                *(length, 0.03, name),
                transform=axes.get_xaxis_transform(),
                ha="center",
                fontsize=7,
                color=_STYLES["best other"]["color"],
            )
    limit_name, limit = panel["limit"]
    axes.axhline(limit, **_LIMIT)
    axes.annotate(
        f"{limit_name} {limit:.0f} GF/s", (lengths[0], limit), (0, 3), textcoords="offset points"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    lowest = min(y for rates in panel["rates"].values() for y in rates if y is not None)
    axes.set_ylim(lowest / 1.8, limit * 1.4)
    axes.margins(x=0.12)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0f}")
    axes.set_title(f"{panel['kind']}, {panel['dtype']}, D {_WIDTH}", fontsize=9)
    axes.set_ylabel("GF/s")
    axes.grid(True, linewidth=0.3)
