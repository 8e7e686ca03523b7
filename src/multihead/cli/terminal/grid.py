"""The layers x heads grid, one statistic in color and in digits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.text import Text

from multihead.cli.statistics import STATISTICS, Scale, StatisticName
from multihead.cli.terminal.style import QUIET, ramp_style, room, show

if TYPE_CHECKING:
    from multihead.heads.inspecting.inspection import Inspection

Values = npt.NDArray[Any]

_LEVELS = 10
_LABEL = 4
_WIDEST_CELL = 5
_NUMBER_CELL = 5  # a cell this wide has room for the value itself


def levels(values: Values, scale: Scale) -> npt.NDArray[np.int64]:
    """Steps 0 to 9 for `values`; -1 where a value is not finite.

    "unit" cuts 0 to 1 into ten; "linear" and "log" cut the range of the finite values.
    """
    finite = np.isfinite(values)
    result = np.full(values.shape, -1, dtype=np.int64)
    if not finite.any():
        return result
    low, high = _bounds(values, scale)
    shares = np.zeros(values.shape)
    if high > low:
        shares[finite] = (_scaled(values[finite], scale) - low) / (high - low)
    result[finite] = np.clip(shares[finite] * _LEVELS, 0, _LEVELS - 1).astype(np.int64)
    return result


def _bounds(values: Values, scale: Scale) -> tuple[float, float]:
    if scale == "unit":
        return 0.0, 1.0
    finite = _scaled(values[np.isfinite(values)], scale)
    return float(finite.min()), float(finite.max())


def _scaled(values: Values, scale: Scale) -> Values:
    # Distances of zero exist; below a tenth of a token they are alike.
    return np.log(np.maximum(values, 0.1)) if scale == "log" else values.astype(np.float64)


def print_grid(console: Console, inspection: Inspection, name: StatisticName) -> None:
    """Print the grid: layers across where they fit, else layers down, else in parts."""
    statistic = STATISTICS[name]
    values = np.asarray(inspection.statistics[name])
    steps = levels(values, statistic.scale)
    show(console, Text.assemble((statistic.name, "bold"), f": {statistic.meaning}"))
    show(console, _legend(values, name))
    console.print()
    layers, heads = values.shape
    space = room(console) - _LABEL
    if 2 * layers <= space or heads > space // 2:
        width = min(max(space // layers, 2), _WIDEST_CELL)
        part = space // width
        for start in range(0, layers, part):
            chosen = slice(start, start + part)
            _print_block(console, values[chosen].T, steps[chosen].T, name, width, "H", "L", start)
    else:
        width = min(space // heads, _WIDEST_CELL)
        _print_block(console, values, steps, name, width, "L", "H", 0)
    console.print()


def _print_block(
    console: Console,
    values: Values,
    steps: npt.NDArray[np.int64],
    name: StatisticName,
    width: int,
    down: str,
    across: str,
    first: int,
) -> None:
    """Print rows named `down` by columns named `across`, the columns counted from `first`."""
    every = 1 if width > 4 else 5
    head = "".join(
        f"{across}{first + column}".ljust(width * every)
        for column in range(0, values.shape[1], every)
    )
    show(console, Text(" " * _LABEL + head.rstrip(), style=QUIET, no_wrap=True))
    for row in range(values.shape[0]):
        line = Text(no_wrap=True).append(f"{down}{row}".ljust(_LABEL), QUIET)
        for value, step in zip(values[row], steps[row], strict=True):
            line.append(*_cell(float(value), int(step), name, width))
        show(console, line)


def _cell(value: float, step: int, name: StatisticName, width: int) -> tuple[str, str]:
    if step < 0:
        return "-".center(width), QUIET
    label = STATISTICS[name].show(value) if width >= _NUMBER_CELL else str(step)
    if width >= _NUMBER_CELL and len(label) > width - 1:
        label = str(step)
    return label.center(width), ramp_style(step)


def _legend(values: Values, name: StatisticName) -> Text:
    statistic = STATISTICS[name]
    finite = values[np.isfinite(values)]
    if not finite.size:
        return Text("no head has a value", style=QUIET)
    low, high = (0.0, 1.0) if statistic.scale == "unit" else (finite.min(), finite.max())
    legend = Text(f"{statistic.show(float(low))} ")
    for step in range(_LEVELS):
        legend.append(f"{step} ".rjust(3), ramp_style(step))
    legend.append(f" {statistic.show(float(high))}")
    legend.append(", log scale" if statistic.scale == "log" else "")
    spread = f"   median {statistic.show(float(np.median(finite)))}"
    if statistic.scale == "unit":
        spread += (
            f", from {statistic.show(float(finite.min()))} to {statistic.show(float(finite.max()))}"
        )
    legend.append(spread, QUIET)
    return legend
