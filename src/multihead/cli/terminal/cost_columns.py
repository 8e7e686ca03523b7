"""Models side by side: one column each, or, swept, one row each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from multihead.cli.cost_views import Column, Sweep
from multihead.cli.numbers import short_count
from multihead.cli.sizes import binary_bytes, duration
from multihead.cli.terminal.cost import intensity, paragraph, print_outline
from multihead.cli.terminal.style import plain_table, print_question, room, show
from multihead.cost import LatentAttention

# Measure, its name in a column of names, and over a column of numbers.
_MEASURES = (
    ("parameters", "parameters", "para-\nmeters"),
    ("attention_parameters", "  of attention", "of at-\ntention"),
    ("prefill_products", "prefill products", "prefill\nproducts"),
    ("projection_products", "  projections", "projec-\ntions"),
    ("attention_products", "  QKᵀ and PV", "QKᵀ, PV"),
    ("exponentials", "exponentials", "exponen-\ntials"),
    ("score_table_bytes", "N x N (not built)", "N x N\n(not built)"),
    ("kv_cache_bytes", "KV cache", "KV\ncache"),
    ("decode_products", "a token more: products", "token\nproducts"),
    ("decode_bytes", "a token more: bytes", "token\nreads"),
    ("decode_intensity", "a token more: flop/byte", "flop/\nbyte"),
    ("prefill_seconds", "prefill: time", "prefill\ntime"),
    ("decode_seconds", "a token more: time", "token\ntime"),
    ("largest_context", "largest context", "largest\ncontext"),
    ("largest_batch", "largest batch", "largest\nbatch"),
)
_SWEPT = {
    "heads": (
        "parameters",
        "prefill_products",
        "exponentials",
        "score_table_bytes",
        "kv_cache_bytes",
    ),
    "head-dim": (
        "parameters",
        "prefill_products",
        "exponentials",
        "kv_cache_bytes",
        "decode_bytes",
    ),
    "context": (
        "projection_products",
        "attention_products",
        "exponentials",
        "score_table_bytes",
        "kv_cache_bytes",
    ),
}
_SWEEP_HEADINGS = {
    "heads": "What does another number of heads change, at the same width?",
    "head-dim": "What do wider heads change, as many as now?",
    "context": "What does a longer context change?",
}
_LATENT_HEADING = "What does another number of heads change, each as wide as now?"
_SWEEP_WORDS = {
    "head-dim": "The width of all heads together grows, and with it all these but exponentials.",
    "context": "Twice the context: twice the projections and the cache, four times QKᵀ and PV, "
    "their exponentials and N x N tables, but for layers with windows.",
}
_HEADS_WORDS = {
    "mha": "Parameters, products and cache stay; exponentials and N x N tables grow with heads.",
    "gqa": "Parameters, products and cache stay, as many heads sharing a KV head throughout; "
    "exponentials and N x N tables grow with heads.",
    "mqa": "The one KV head is as wide as a head: more heads make it, and the cache, narrower. "
    "Exponentials and N x N tables grow with heads.",
    "mla": "Heads keep their widths, so attention's parameters, products, exponentials and N x N "
    "tables grow with them; the latent is theirs together, so the cache stays.",
}
# An encoder keeps no cache of which there is a word to say.
_WITHOUT_CACHE = (
    ("Parameters, products and cache stay", "Parameters and products stay"),
    ("the projections and the cache", "the projections"),
    ("make it, and the cache, narrower", "make it narrower"),
    (", so the cache stays", ""),
)
_OVER = {key: heading for key, _, heading in _MEASURES}
_GAP = 2
_TIMES = ("prefill_seconds", "decode_seconds")
_FITS = ("largest_context", "largest_batch")


def print_columns(
    console: Console, document: Mapping[str, Any], columns: Sequence[Column], *, difference: bool
) -> None:
    """Every measure in a row, every model in a column; with `difference`, how the last differs."""
    print_outline(console, document)
    print_question(console, "What changes?" if difference else "Which attention?")
    for table in _tables(console, columns, difference):
        show(console, table)
    before, after = columns[0].setting, columns[-1].setting
    if difference and before != after:
        changed = [
            f"{name} {_plain(getattr(before, name))} to {_plain(getattr(after, name))}"
            for name in ("context", "batch", "dtype", "cache")
            if getattr(before, name) != getattr(after, name)
        ]
        paragraph(console, f"Changed as well: {', '.join(changed)}.")
    _print_limits(console, document)
    if not difference:
        kinds = {column.model.layers[0].attention.kind for column in columns}
        wider = ", MLA's wider by the lanes after +, which are rotated" if "mla" in kinds else ""
        paragraph(
            console,
            f"Queries keep their heads and widths in every column{wider}. What a model learns with "
            "each is another question, which no count answers.",
        )


def _tables(console: Console, columns: Sequence[Column], difference: bool) -> Iterator[Table]:
    """One table, its names broken where it is too wide; several where it still is."""

    def fits(table: Table) -> bool:
        return Measurement.get(console, console.options, table).maximum <= room(console)

    whole = _table(columns, difference, broken=False)
    if difference or fits(whole):
        yield whole
        return
    while columns:
        count = len(columns)
        while count > 1 and not fits(_table(columns[:count], difference, broken=True)):
            count -= 1
        yield _table(columns[:count], difference, broken=True)
        columns = columns[count:]


def _table(columns: Sequence[Column], difference: bool, *, broken: bool) -> Table:
    table = plain_table()
    table.add_column("", no_wrap=True)
    for column in columns:
        name = column.name.replace(":", ":\n") if broken else column.name
        table.add_column(name, justify="right", no_wrap=True)
    if difference:
        table.add_column("difference", justify="right", no_wrap=True)
    heads = [_heads(column) for column in columns]
    table.add_row("heads x width", *[it.replace(" /", "\n/") if broken else it for it in heads])
    for key, name, _ in _MEASURES:
        values = [column.measures.get(key, ...) for column in columns]
        if values[0] is ... or all(value is None for value in values):
            continue
        cells = [_cell(column, key) for column in columns]
        if difference:
            cells.append(_difference(values[0], values[-1]))
        table.add_row(name, *cells)
    return table


def _cell(column: Column, key: str) -> str:
    """A measure as it is written; "-" for what fits where no cache holds the model."""
    held = column.measures["kv_cache_bytes"] is not None
    return _written(key, column.measures[key]) if held or key not in _FITS else "-"


def print_sweep(
    console: Console, document: Mapping[str, Any], columns: Sequence[Column], sweep: Sweep
) -> None:
    """Every model in a row, the measures that the sweep is about in columns."""
    print_outline(console, document)
    own = document["model"]["kinds"][0]
    latent = sweep == "heads" and own["attention"] == "mla"
    print_question(console, _LATENT_HEADING if latent else _SWEEP_HEADINGS[sweep])
    rows = []
    for column in columns:
        attention = column.model.layers[0].attention
        mine = (own["heads"], own["head_dim"]) == (attention.heads, attention.head_dim)
        label = column.name if sweep == "context" else _heads(column)
        rows.append((label, column.measures, "bold" if mine and sweep != "context" else ""))
    keys = [key for key in (*_SWEPT[sweep], *_TIMES, *_FITS) if _is_there(columns, key)]
    shown = _fitting(keys, rows, room(console))
    table = plain_table()
    table.add_column("context" if sweep == "context" else "heads", justify="right", no_wrap=True)
    for key in shown:
        table.add_column(_OVER[key], justify="right", no_wrap=True)
    for label, measures, style in rows:
        table.add_row(label, *[_written(key, measures[key]) for key in shown], style=style)
    show(console, table)
    left_out = [_OVER[key].replace("-\n", "").replace("\n", " ") for key in keys[len(shown) :]]
    if left_out:
        paragraph(console, f"A wider terminal shows also {' and '.join(left_out)}.")
    words = _HEADS_WORDS[own["attention"]] if sweep == "heads" else _SWEEP_WORDS[sweep]
    for cached, without in () if document["model"]["causal"] else _WITHOUT_CACHE:
        words = words.replace(cached, without)
    paragraph(console, words)
    _print_limits(console, document)


def _print_limits(console: Console, document: Mapping[str, Any]) -> None:
    """What the times are, where there are any."""
    device = document["setting"]["device"]
    if device is not None:
        paragraph(
            console,
            f"Times are lower bounds at the limits of {device['name']}; exponentials are not "
            "timed.",
        )


def _fitting(
    keys: Sequence[str], rows: Sequence[tuple[str, Mapping[str, Any], str]], width: int
) -> list[str]:
    """The first of `keys` whose columns have room beside the labels."""
    used = max(len("context"), *[len(label) for label, _, _ in rows])
    shown = []
    for key in keys:
        numbers = [_written(key, measures[key]) for _, measures, _ in rows]
        used += _GAP + max(len(line) for line in (*_OVER[key].splitlines(), *numbers))
        if used > width:
            break
        shown.append(key)
    return shown


def _is_there(columns: Sequence[Column], key: str) -> bool:
    return any(column.measures.get(key) is not None for column in columns)


def _heads(column: Column) -> str:
    attention = column.model.layers[0].attention
    if isinstance(attention, LatentAttention):
        return f"{attention.heads} x {attention.nope_dim}+{attention.rope_dim}"
    shared = "" if attention.kind == "mha" else f" / {attention.kv_heads}"
    return f"{attention.heads} x {attention.head_dim}{shared}"


def _written(key: str, value: Any) -> str:
    if value is None:
        return "any" if key in _FITS else "-"
    if key.endswith("_bytes"):
        return binary_bytes(value)
    if key.endswith("_seconds"):
        return duration(value)
    if key == "decode_intensity":
        return intensity(value)
    return f"{value:,}" if key in _FITS else short_count(value)


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _difference(before: Any, after: Any) -> str:
    if before is None or after is None:
        return ""
    if before == after:
        return "same"
    return f"x {after / before:.3g}" if before else "new"
