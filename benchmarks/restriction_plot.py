"""What is added to the loss against heads restricted: by far mass, and the range of draws."""

from __future__ import annotations

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

from cells import measured
from multihead.bench.results import Document
from multihead.bench.results import file_name as result_name

CAPTION = "What restricting KV groups to a window adds to SmolLM2's loss: by far mass, at random"

Line = dict[str, Any]

# Told apart without color too: by marker and by dash.
_STYLES: dict[str, dict[str, Any]] = {
    "far-mass": {"color": "#0b5fa5", "marker": "o", "linewidth": 2.2},
    "random": {"color": "#555555", "marker": "^", "linestyle": ":"},
}


def file_name(document: Document) -> str:
    """The picture's name: the document's, as an SVG."""
    return result_name(document).replace(".json", ".svg")


def changes(row: Line) -> list[list[float]]:
    """For each count what it adds to the loss, draw by draw."""
    return [
        [loss - losses[0] for loss, losses in zip(of_count, row["restriction_losses"], strict=True)]
        for of_count in zip(*row["restriction_losses"], strict=True)
    ]


def lines(document: Document) -> list[Line]:
    """The numbers of each line: its name, the shares restricted, changes and their range."""
    found = []
    for row in measured(document):
        by_count = changes(row)
        found.append(
            {
                "name": row["name"],
                "shares": [100 * count / row["units"] for count in row["restricted"]],
                "changes": [statistics.median(added) for added in by_count],
                "low": [min(added) for added in by_count],
                "high": [max(added) for added in by_count],
                "draws": len(row["restriction_losses"]),
            }
        )
    return found


def digest(document: Document) -> str:
    """What a picture of these numbers carries in its description."""
    return hashlib.sha256(json.dumps(lines(document)).encode()).hexdigest()[:16]


def draw(document: Document, folder: Path) -> str:
    """Draw the plot into `folder`; say what was done, or why not."""
    try:
        import matplotlib
    except ImportError:
        return "Plot: left as it is, since matplotlib is not installed"
    matplotlib.use("svg")
    from matplotlib import pyplot

    found = lines(document)
    if not found:
        return f"Plot: none, since no row for {file_name(document)} was measured"
    # The same numbers give the same file: ids from a constant, no date, text as text.
    style = {"svg.hashsalt": "multihead", "svg.fonttype": "none", "font.size": 9}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
        axes.axhline(0, color="#999999", linewidth=0.8)
        for line in found:
            _draw_line(axes, line)
        axes.set_xlabel("KV groups restricted, %")
        axes.set_ylabel("added to the loss, nats a token")
        axes.grid(True, linewidth=0.3)
        axes.legend(loc="upper left", fontsize=8)
        path = folder / file_name(document)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Description": digest(document)})
        pyplot.close(figure)
    return f"Plot: {path.name}"


def _draw_line(axes: Any, line: Line) -> None:
    style = _STYLES[line["name"]]
    label = "least far mass first" if line["name"] == "far-mass" else str(line["name"])
    if line["draws"] > 1:
        label += f", median and range of {line['draws']} draws"
        axes.fill_between(
            line["shares"], line["low"], line["high"], color=style["color"], alpha=0.2
        )
    axes.plot(line["shares"], line["changes"], label=label, markersize=5, **style)
