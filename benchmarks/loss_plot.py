"""The loss against heads that are taken away or restricted: a line for each order, and its range.

An order of one draw is a line; of several, their median and the range between the least and the
most.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cells import measured
from multihead.bench.results import Document
from multihead.bench.results import file_name as result_name

Line = dict[str, Any]

# Told apart without color too: by marker and by dash.
_FIRST = {"color": "#0b5fa5", "marker": "o", "linewidth": 2.2}
_SECOND = {"color": "#b3500b", "marker": "s", "linestyle": "--"}
_RANDOM = {"color": "#555555", "marker": "^", "linestyle": ":"}


@dataclass(frozen=True)
class LossPlot:
    """What the picture of one suite shows.

    Args:
        caption: what stands below it, or is read out in its place.
        done: what happened to the KV groups, a word; the row's field for how many of them.
        losses: the row's field for the losses, [draws, counts].
        added: whether the loss without any of it is taken off.
        labels: what each order is called.
        styles: how each is drawn.
    """

    caption: str
    done: str
    losses: str
    added: bool
    labels: dict[str, str]
    styles: dict[str, dict[str, Any]]


PLOTS = {
    "removal": LossPlot(
        caption="SmolLM2's loss against KV groups removed: by gate gradient, by leaving out, at "
        "random",
        done="removed",
        losses="removal_losses",
        added=False,
        labels={
            "gate-gradient": "gate gradient",
            "leave-one-out": "leave one out",
            "random": "random",
        },
        styles={"gate-gradient": _FIRST, "leave-one-out": _SECOND, "random": _RANDOM},
    ),
    "restriction": LossPlot(
        caption="What restricting KV groups to a window adds to SmolLM2's loss: by far mass, at "
        "random",
        done="restricted",
        losses="restriction_losses",
        added=True,
        labels={"far-mass": "least far mass first", "random": "random"},
        styles={"far-mass": _FIRST, "random": _RANDOM},
    ),
}


def file_name(document: Document) -> str:
    """The picture's name: the document's, as an SVG."""
    return result_name(document).replace(".json", ".svg")


def image(document: Document, folder: str) -> str:
    """The picture as Markdown, where pictures lie in `folder`."""
    return f"![{PLOTS[document['suite']].caption}]({folder}/{file_name(document)})"


def draws_by_count(document: Document, row: Line) -> list[list[float]]:
    """For each number of groups what the plot shows of it, draw by draw."""
    plot = PLOTS[document["suite"]]
    off = [losses[0] if plot.added else 0.0 for losses in row[plot.losses]]
    return [
        [loss - base for loss, base in zip(of_count, off, strict=True)]
        for of_count in zip(*row[plot.losses], strict=True)
    ]


def lines(document: Document) -> list[Line]:
    """The numbers of each line: its name, the shares, medians, and their range over draws."""
    found = []
    for row in measured(document):
        by_count = draws_by_count(document, row)
        found.append(
            {
                "name": row["name"],
                "shares": [
                    100 * count / row["units"] for count in row[PLOTS[document["suite"]].done]
                ],
                "medians": [statistics.median(draws) for draws in by_count],
                "low": [min(draws) for draws in by_count],
                "high": [max(draws) for draws in by_count],
                "draws": len(by_count[0]),
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

    plot, found = PLOTS[document["suite"]], lines(document)
    if not found:
        return f"Plot: none, since no row for {file_name(document)} was measured"
    # The same numbers give the same file: ids from a constant, no date, text as text.
    style = {"svg.hashsalt": "multihead", "svg.fonttype": "none", "font.size": 9}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
        if plot.added:
            axes.axhline(0, color="#999999", linewidth=0.8)
        for line in found:
            _draw_line(axes, plot, line)
        axes.set_xlabel(f"KV groups {plot.done}, %")
        axes.set_ylabel(f"{'added to the ' if plot.added else ''}loss, nats a token")
        axes.grid(True, linewidth=0.3)
        axes.legend(loc="upper left", fontsize=8)
        path = folder / file_name(document)
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None, "Description": digest(document)})
        pyplot.close(figure)
    return f"Plot: {path.name}"


def _draw_line(axes: Any, plot: LossPlot, line: Line) -> None:
    style, label = plot.styles[line["name"]], plot.labels[line["name"]]
    if line["draws"] > 1:
        label += f", median and range of {line['draws']} draws"
        axes.fill_between(
            line["shares"], line["low"], line["high"], color=style["color"], alpha=0.2
        )
    axes.plot(line["shares"], line["medians"], label=label, markersize=5, **style)
