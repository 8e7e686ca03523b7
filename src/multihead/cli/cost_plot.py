"""What `multihead cost` says, as one picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from multihead import cost
from multihead.cli.cost_views import Column, Sweep, swept
from multihead.errors import InputError, MissingExtraError
from multihead.files import write_whole

_FORMATS = (".png", ".svg", ".pdf")
# Okabe and Ito's colors, which stay apart for color-blind eyes.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
# Where there are more columns than colors.
_HATCHES = ("", "///", "...")
_PRODUCTS = (
    ("projection_products", "projections"),
    ("attention_products", "QKᵀ and PV"),
    ("exponentials", "exponentials"),
)
_BYTES = (("score_table_bytes", "N x N (not built)"), ("kv_cache_bytes", "KV cache"))
_BARS = (
    ("parameters", "parameters"),
    ("prefill_products", "prefill products"),
    ("exponentials", "exponentials"),
    ("kv_cache_bytes", "KV cache"),
    ("decode_bytes", "bytes a token reads"),
)


def draw(
    path: Path,
    model: cost.Model,
    setting: cost.Setting,
    columns: Sequence[Column] | None,
    sweep: Sweep | None,
) -> None:
    """Draw a sweep as lines, a comparison as bars, anything else as a sweep over contexts.

    Raises:
        InputError: a file that is no .png, .svg or .pdf, or that cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in _FORMATS:
        raise InputError(f"--plot {path} must end in {', '.join(_FORMATS)}.")
    figures = _matplotlib()
    if columns is not None and sweep is None:
        figure = figures.Figure(figsize=(9, 4), layout="constrained")
        _draw_bars(figure, columns)
    else:
        if columns is None:
            columns, sweep = swept(model, setting, "context"), "context"
        assert sweep is not None
        figure = figures.Figure(figsize=(10, 4), layout="constrained")
        _draw_lines(figure, columns, sweep)
    figure.suptitle(f"{model.name or 'model'} · batch {setting.batch} · {setting.dtype}")
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower(), dpi=150)
    write_whole(path, content.getvalue(), "--plot")


def _draw_lines(figure: Any, columns: Sequence[Column], sweep: Sweep) -> None:
    places = [_place(column, sweep) for column in columns]
    labels = {"context": "context (tokens)", "heads": "heads", "head-dim": "width of a head"}
    for axes, series, name in zip(
        figure.subplots(1, 2), (_PRODUCTS, _BYTES), ("prefill: count", "bytes"), strict=True
    ):
        for color, (key, label) in zip(_COLORS, series, strict=False):
            values = [column.measures[key] for column in columns]
            if None in values:
                continue
            axes.plot(places, values, "o-", color=color, label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2 if name == "bytes" else 10)
        axes.set_xlabel(labels[sweep])
        axes.set_ylabel(name)
        axes.set_xticks(places, [column.name for column in columns], rotation=45)
        axes.minorticks_off()
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.legend(frameon=False)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)


def _place(column: Column, sweep: Sweep) -> int:
    return column.setting.context if sweep == "context" else int(column.name)


def _draw_bars(figure: Any, columns: Sequence[Column]) -> None:
    """Each measure as a share of the largest among the columns."""
    axes = figure.subplots()
    width = 0.8 / len(columns)
    bars = [bar for bar in _BARS if all(column.measures[bar[0]] for column in columns)]
    for index, column in enumerate(columns):
        shares = []
        for key, _ in bars:
            largest = max(float(other.measures[key] or 0) for other in columns)
            shares.append(float(column.measures[key] or 0) / largest)
        places = [place + (index + 0.5) * width - 0.4 for place in range(len(bars))]
        color = _COLORS[index % len(_COLORS)]
        hatch = _HATCHES[index // len(_COLORS) % len(_HATCHES)]
        axes.bar(places, shares, width * 0.92, color=color, hatch=hatch, label=column.name)
    axes.set_xticks(range(len(bars)), [name for _, name in bars])
    axes.set_ylabel("share of the largest")
    ncols = min(len(columns), len(_COLORS))
    axes.legend(frameon=False, ncols=ncols, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _matplotlib() -> Any:
    try:
        from matplotlib import figure
    except ImportError as error:
        raise MissingExtraError(
            f"A plot needs the package matplotlib, which cannot be imported ({error}). Install it "
            "with: pip install 'multihead[plot]'"
        ) from error
    return figure
