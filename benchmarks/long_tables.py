"""The blocks of docs/benchmarks.md: every contestant of every row."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import loss_plot
from cells import (
    NOTHING,
    call,
    limits,
    measured,
    not_measurable,
    of_suite,
    parts,
    peers,
    rate,
    ratio,
    share,
    table,
    where,
)
from multihead.bench.contest import OURS
from multihead.bench.results import Document
from multihead.bench.show import brief, duration
from multihead.bench.suites.overhead import PLAIN

_MIB = 2**20


def contests_block(suite: str, documents: Sequence[Document]) -> str:
    """For each machine a table with a line for each contestant of each row."""
    found = of_suite(documents, suite)
    return "\n".join(map(_contests, found)) if found else NOTHING


def overhead_block(documents: Sequence[Document]) -> str:
    """For each machine both times of each feature."""
    found = of_suite(documents, "overhead")
    return "\n".join(map(_overheads, found)) if found else NOTHING


def memory_block(documents: Sequence[Document]) -> str:
    """For each machine what each call took, and which features it had."""
    found = of_suite(documents, "memory")
    return "\n".join(map(_memory, found)) if found else NOTHING


def agreement_block(documents: Sequence[Document]) -> str:
    """For each machine what the logits differ by in each way of reading the same text."""
    found = of_suite(documents, "agreement")
    return "\n".join(map(_agreement, found)) if found else NOTHING


def removal_block(documents: Sequence[Document]) -> str:
    """For each machine the losses by order and share, and their picture."""
    found = of_suite(documents, "removal")
    return "\n".join(map(_removal, found)) if found else NOTHING


def restriction_block(documents: Sequence[Document]) -> str:
    """For each machine the losses by order and share, and their picture."""
    found = of_suite(documents, "restriction")
    return "\n".join(map(_restriction, found)) if found else NOTHING


def cost_block(documents: Sequence[Document]) -> str:
    """For each machine what was predicted of each pass, beside what was measured."""
    found = of_suite(documents, "cost")
    return "\n".join(map(_cost, found)) if found else NOTHING


BLOCKS: dict[str, Callable[[Sequence[Document]], str]] = {
    **{
        name: partial(contests_block, name)
        for name in (
            *("prefill", "window", "packed", "decode", "small", "grouped"),
            *("layer", "models", "generation"),
        )
    },
    "agreement": agreement_block,
    "removal": removal_block,
    "restriction": restriction_block,
    "overhead": overhead_block,
    "memory": memory_block,
    "cost": cost_block,
}


def _contests(document: Document) -> str:
    lines = [line for row in measured(document) for line in _contest_lines(row)]
    head = ("call", "dtype", "contestant", "time (quartiles, n)", "against ours", "error", "note")
    return _section(document, table(head, lines))


def _contest_lines(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    times, errors = row["times"], row["errors"]
    note = _note(row)
    yield call(row), row["dtype"], OURS, duration(times[OURS]), "", f"{errors[OURS]:.1e}", note
    for name in row["ratios"]:
        first = row["first_call_seconds"].get(name)
        note = "" if first is None else f"first call {first:.1f} s"
        if "tokens_per_second" in row:
            note = rate(row, name)
        yield (
            "",
            "",
            name,
            duration(times[name]),
            ratio(row, name),
            f"{errors[name]:.1e}",
            note,
        )
    for name, reason in row["declined"].items():
        yield "", "", name, "", "", "", reason


def _note(row: dict[str, Any]) -> str:
    """What is to be said of our own line."""
    if "seconds_over_torch" in row:
        note = f"{1e6 * row['seconds_over_torch']:+.1f} us against torch"
        if row["python_seconds"] is not None:
            note += f", of which Python {1e6 * row['python_seconds']:.1f} us"
    elif "tokens_per_second" in row:
        note = rate(row, OURS)
        if "same_tokens" in row:
            note += f", {100 * row['same_tokens']:.1f} % of the tokens are torch's"
    else:
        reached = f"{row['gflops']:.0f} GF/s" if "gflops" in row else f"{row['gb_per_s']:.1f} GB/s"
        note = f"{reached}, {share(row)}"
    if "buffers_bytes" in row:
        note += f", {row['buffers_bytes'] / 2**30:.1f} GiB of buffers in turn"
    return f"{note}; {parts(row)}" if "shares" in row else note


def _overheads(document: Document) -> str:
    added = [
        (
            row["kind"],
            row["dtype"],
            duration(row["times"][OURS]),
            duration(row["times"][PLAIN]),
            f"{100 * row['overhead']:+.1f} %",
        )
        for row in measured(document)
        if "overhead" in row
    ]
    others = [line for row in measured(document) if "ratios" in row for line in _contest_lines(row)]
    tables = [table(("feature", "dtype", "with it", "plain", "added"), added)]
    if others:
        head = ("call", "dtype", "contestant", "time", "against ours", "error", "note")
        tables.append(table(head, others))
    return _section(document, "\n".join(tables))


def _agreement(document: Document) -> str:
    lines = [
        (
            row["what"],
            row["dtype"],
            f"{row['largest_difference']:.1e}",
            f"{row['own_error']:.1e}",
            f"{row['other_choices']} of {row['tokens']}",
        )
        for row in measured(document)
    ]
    head = ("how the text is read", "dtype", "differs by", "own error", "other likeliest tokens")
    return f"{where(document)}\n\n{table(head, lines)}\n{not_measurable(document)}"


def _removal(document: Document) -> str:
    rows = measured(document)
    if not rows:
        return f"{where(document)}\n\n{not_measurable(document)}"
    counts, units = rows[0]["removed"], rows[0]["units"]
    lines = [(row["what"], *_losses(document, row)) for row in rows]
    head = ("removed", *(f"{100 * count / units:.0f} %" for count in counts))
    correlations = "; ".join(_correlations(row) for row in rows if "rank_correlations" in row)
    picture = loss_plot.image(document, "images")
    scored = ", ".join(
        f"{row['name'].replace('-', ' ')} over {row['scored_tokens']:,} tokens"
        for row in rows
        if row["scored_tokens"]
    )
    return (
        f"{where(document)} Scored by {scored}; losses over {rows[0]['tested_tokens']:,} "
        f"others.\n\n{picture}\n\n{table(head, lines)}\n"
        f"Rank correlation with the gate gradients: {correlations}.\n{not_measurable(document)}"
    )


def _restriction(document: Document) -> str:
    rows = measured(document)
    if not rows:
        return f"{where(document)}\n\n{not_measurable(document)}"
    first = rows[0]
    lines = [(row["what"], *_changes(document, row)) for row in rows]
    shares = (f"{100 * count / first['units']:.0f} %" for count in first["restricted"][1:])
    whole = first["restriction_losses"][0][0]
    picture = loss_plot.image(document, "images")
    return (
        f"{where(document)} Far mass over {first['measured_tokens']:,} tokens, losses over "
        f"{first['tested_tokens']:,} others: {whole:.3f} unrestricted, and what is added to it.\n\n"
        f"{picture}\n\n{table(('restricted', *shares), lines)}\n{not_measurable(document)}"
    )


def _changes(document: Document, row: dict[str, Any]) -> Iterator[str]:
    """What each count adds to the loss; of several draws the median and the range."""
    for changes in loss_plot.draws_by_count(document, row)[1:]:
        low, high = min(changes), max(changes)
        spread = f" ({low:+.3f} to {high:+.3f})" if len(set(changes)) > 1 else ""
        yield f"{statistics.median(changes):+.3f}{spread}"


def _correlations(row: dict[str, Any]) -> str:
    numbers = ", ".join(f"{it:.2f}" for it in row["rank_correlations"])
    return f"{row['name'].replace('-', ' ')} {numbers}"


def _losses(document: Document, row: dict[str, Any]) -> Iterator[str]:
    """The loss behind each count; of several draws the median and the range."""
    for losses in loss_plot.draws_by_count(document, row):
        spread = f" ({min(losses):.2f}-{max(losses):.2f})" if len(set(losses)) > 1 else ""
        yield f"{statistics.median(losses):.2f}{spread}"


def _memory(document: Document) -> str:
    lines = [
        (
            ", ".join(row["features"]) or "plain",
            f"{row['grown_bytes'] / _MIB:.1f} MiB",
            f"{row['output_bytes'] / _MIB:.0f} MiB",
        )
        for row in measured(document)
    ]
    head = ("features", "beyond inputs and outputs", "outputs")
    return f"{where(document)}\n\n{table(head, lines)}\n{not_measurable(document)}"


def _cost(document: Document) -> str:
    lines = [
        (
            row["what"],
            row["dtype"],
            *_both(row["memory"], f"{row['memory']['measured'] / _MIB:.0f} MiB", _mib),
            _mib(row["memory"]["usual_allocator"]),
            *_both(row["seconds"], duration(row["seconds"]["measured"]), brief),
            ", ".join(f"{part} {brief(time)}" for part, time in row["seconds"]["parts"].items()),
            f"{100 * row['limit_share']:.0f} % of {row['limit']}",
        )
        for row in measured(document)
    ]
    head = (
        "pass",
        "dtype",
        *("memory predicted", "measured", "predicted / measured", "usual allocator"),
        *("time predicted", "measured", "predicted / measured", "predicted parts"),
        "share of the limit",
    )
    return _section(document, table(head, lines))


def _both(what: dict[str, Any], found: str, show: Callable[[float], str]) -> tuple[str, ...]:
    return show(what["predicted"]), found, f"{what['ratio']:.2f}"


def _mib(size: float) -> str:
    return f"{size / _MIB:.0f} MiB"


def _section(document: Document, body: str) -> str:
    head = " ".join(part for part in (where(document), limits(document), peers(document)) if part)
    return f"{head}\n\n{body}\n{not_measurable(document)}"
