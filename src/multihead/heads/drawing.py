"""What figures of heads share: axes, tables, colors and names."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from ..errors import ArgumentError, MissingExtraError
from .inspecting.inspection import Inspection
from .watching.record import HeadRecord
from .watching.statistics import MAXIMA, checked_statistics

Table = np.ndarray[Any, np.dtype[np.float64]]
Head = tuple[int, int]
Source = HeadRecord | Inspection

# Okabe and Ito's colors, which stay apart for color-blind eyes; then what else roles need.
COLORS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#F0E442",
    "#000000",
    "#999999",
)
EMPTY = "#eeeeee"
_SHARES = ("entropy_share", "max_weight", "sink_mass", "previous_token", "first_key")
_LOGARITHMIC = ("mean_distance", "participation")
_UNITS = {"entropy": "nats", "mean_distance": "tokens", "participation": "keys"}


def new_axes(axes: Any, size: tuple[float, float]) -> Any:
    """`axes`, or those of a new figure of so many inches, where there are none.

    Raises MissingExtraError where matplotlib is not installed.
    """
    try:
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as error:
        raise MissingExtraError(
            f"A figure needs the package matplotlib, which cannot be imported ({error}). Install "
            "it with: pip install 'multihead[plot]'"
        ) from error
    if axes is not None:
        return axes
    return pyplot.subplots(figsize=(max(size[0], 4.0), max(size[1], 2.4)), layout="constrained")[1]


def checked_table(source: Source, statistic: str) -> Table:
    """A statistic [layers, heads]; raises ArgumentError for one that is not there."""
    checked_statistics(statistic)
    if statistic not in source.statistics:
        raise ArgumentError(
            f"There is no {statistic!r} here; there is {', '.join(source.statistics)}."
        )
    return np.asarray(source.statistics[statistic], dtype=np.float64)


def head_numbers(source: Source) -> list[int]:
    """The number of the head in each column of a table."""
    if isinstance(source, HeadRecord):
        longest = max(source.heads, key=len)
        return list(longest)
    return list(range(source.heads))


def record_place(record: HeadRecord, head: Head) -> tuple[int, int]:
    """Layer and column of a head; raises ArgumentError for one that is not there."""
    layer, number = head
    if layer not in range(len(record.heads)) or number not in record.heads[layer]:
        raise ArgumentError(
            f"There is no head {head!r}; the record has {len(record.heads)} layers, and in the "
            f"first the heads {', '.join(map(str, record.heads[0]))}."
        )
    return layer, record.heads[layer].index(number)


def check_head(inspection: Inspection, layer: int, head: int) -> None:
    """Raise ArgumentError where an inspection has no such head."""
    if layer not in range(inspection.layers) or head not in range(inspection.heads):
        raise ArgumentError(
            f"There is no head L{layer}H{head}: the model has layers L0 to "
            f"L{inspection.layers - 1}, each with heads H0 to H{inspection.heads - 1}."
        )


def norm_of(table_lh: Table, statistic: str) -> Any:
    """How the values of a statistic become brightness: shares from 0 to 1, lengths by their log."""
    colors = import_module("matplotlib.colors")
    if statistic in _SHARES:
        return colors.Normalize(0.0, 1.0)
    finite = table_lh[np.isfinite(table_lh)]
    if statistic in _LOGARITHMIC and finite.size:
        low, high = max(float(finite.min()), 0.1), max(float(finite.max()), 0.1)
        if low < high:
            return colors.LogNorm(low, high, clip=True)
    return colors.Normalize()


def heads_image(
    axes: Any,
    table_lh: Table,
    numbers: Sequence[int],
    label: str,
    *,
    norm: Any,
    cmap: str = "viridis",
) -> None:
    """A table [layers, heads] in color, its color bar and the names of layers and heads."""
    image = axes.imshow(
        np.ma.masked_invalid(table_lh.T), norm=norm, cmap=cmap, interpolation="nearest"
    )
    axes.set_facecolor(EMPTY)
    axes.figure.colorbar(image, ax=axes, label=label)
    layers_and_heads(axes, len(table_lh), numbers)


def layers_and_heads(axes: Any, layers: int, numbers: Sequence[int]) -> None:
    """Name some layers across and some heads down."""
    across, down = (
        range(0, layers, 1 + layers // 16),
        range(0, len(numbers), 1 + len(numbers) // 16),
    )
    axes.set_xticks(across, [f"L{layer}" for layer in across], fontsize="small")
    axes.set_yticks(down, [f"H{numbers[place]}" for place in down], fontsize="small")
    axes.set_xlabel("layer")
    axes.set_ylabel("head")


def bars(axes: Any, names: Sequence[str], values: Sequence[float], label: str) -> None:
    """Horizontal bars, the first on top."""
    axes.barh(range(len(names)), values, color=COLORS[0])
    axes.set_yticks(range(len(names)), names, fontsize="small", parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    plain(axes, label, "")


def plain(axes: Any, across: str, down: str) -> None:
    """Name both axes, and leave the upper and the right line away."""
    axes.set_xlabel(across)
    axes.set_ylabel(down)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def label_of(statistic: str, *, of_queries: bool = False) -> str:
    """A statistic in words, with its unit: of heads, or of their queries."""
    unit = _UNITS.get(statistic)
    name = statistic.replace("_", " ")
    if not of_queries and statistic in MAXIMA:
        name = f"largest {name.removeprefix('max ')} of any query"
    elif not of_queries:
        name = f"mean {name.removeprefix('mean ')}"
    return name if unit is None else f"{name} ({unit})"


def title_of(source: Source) -> str:
    """What was read, "one text" said where it was one."""
    if isinstance(source, HeadRecord):
        texts = "one text" if source.one_text else f"{source.texts:,} texts"
        return f"{source.model}, {source.tokens:,} tokens of {texts}"
    return f"{source.provenance['model']}, {len(source.tokens):,} tokens of one text"


def token_name(inspection: Inspection, index: int) -> str:
    """A token of the text and where it stands."""
    piece = inspection.tokens[index].replace("\n", "⏎").replace("\t", "⇥")
    return f"{piece!r} at {index}"
