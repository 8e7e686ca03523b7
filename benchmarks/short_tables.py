"""README's blocks: one table for prefill, one for the other calls, a line for what is added.

Of prefill and calls README has the table of the machine that was measured last, and a line for each
other one, whose tables docs/benchmarks.md has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import loss_plot
import plot
from cells import (
    NOTHING,
    best,
    best_peer,
    call,
    limits,
    losses,
    measured,
    not_measurable,
    of_suite,
    ours,
    parts,
    peers,
    rate,
    ratio,
    share,
    table,
    where,
)
from multihead.bench.contest import OURS, TORCH
from multihead.bench.machine import CLASSES
from multihead.bench.results import Document

_CALLS = ("window", "packed", "decode", "grouped")


def prefill_block(documents: Sequence[Document]) -> str:
    """A picture and a table: ours, torch, and the best peer by name."""
    found = of_suite(documents, "prefill")
    if not found:
        return NOTHING
    newest, *others = _newest_first([[document] for document in found])
    return "\n".join([_prefill_section(*newest), *map(_elsewhere, others), _not_measured(found)])


def calls_block(documents: Sequence[Document]) -> str:
    """One table of windows, packed documents, decoding, groups, small calls."""
    names = (*_CALLS, "small")
    machines: dict[str, list[Document]] = {}
    for name in names:
        for document in of_suite(documents, name):
            machines.setdefault(_machine(document), []).append(document)
    if not machines:
        return NOTHING
    newest, *others = _newest_first(machines.values())
    return "\n".join([_calls_section(newest), *map(_elsewhere, others)])


def layer_block(documents: Sequence[Document]) -> str:
    """For each machine one layer at inference, and what of its time goes where."""
    found = of_suite(documents, "layer")
    return "\n".join(map(_layer_section, found)) if found else NOTHING


def models_block(documents: Sequence[Document]) -> str:
    """For each machine a line for each whole model, ours beside every other."""
    found = [it for name in ("models", "generation") for it in of_suite(documents, name)]
    return "\n".join(map(_models_section, found)) if found else NOTHING


def overhead_block(documents: Sequence[Document]) -> str:
    """A line for each machine: what each feature adds, float32 and bfloat16."""
    found = of_suite(documents, "overhead")
    return "\n".join(map(_overhead_line, found)) if found else NOTHING


def memory_block(documents: Sequence[Document]) -> str:
    """A line for each machine: the most that a call took beyond its inputs and outputs."""
    found = of_suite(documents, "memory")
    return "\n".join(map(_memory_line, found)) if found else NOTHING


def inspect_block(documents: Sequence[Document]) -> str:
    """A section for each machine: the whole inspection against its rivals."""
    found = of_suite(documents, "inspect")
    return "\n".join(map(_inspect_section, found)) if found else NOTHING


def corpus_block(documents: Sequence[Document]) -> str:
    """A line for each machine: time and memory of every head over a corpus, at two sizes."""
    found = of_suite(documents, "corpus")
    return "\n".join(map(_corpus_line, found)) if found else NOTHING


def removal_block(documents: Sequence[Document]) -> str:
    """For each machine a picture of the loss against heads removed, and what it shows."""
    found = of_suite(documents, "removal")
    return "\n".join(map(_removal_section, found)) if found else NOTHING


def restriction_block(documents: Sequence[Document]) -> str:
    """For each machine a picture of the loss against heads restricted, and what it shows."""
    found = of_suite(documents, "restriction")
    return "\n".join(map(_restriction_section, found)) if found else NOTHING


def cost_block(documents: Sequence[Document]) -> str:
    """For each machine how far the predictions of memory and time were off."""
    found = of_suite(documents, "cost")
    return "\n".join(map(_cost_line, found)) if found else NOTHING


BLOCKS: dict[str, Callable[[Sequence[Document]], str]] = {
    "removal": removal_block,
    "restriction": restriction_block,
    "prefill": prefill_block,
    "calls": calls_block,
    "layer": layer_block,
    "models": models_block,
    "overhead": overhead_block,
    "memory": memory_block,
    "cost": cost_block,
    "inspect": inspect_block,
    "corpus": corpus_block,
}


def _prefill_section(document: Document) -> str:
    rows = measured(document)
    lines = [
        (call(row), row["dtype"], ours(row), ratio(row, TORCH), best(row), share(row))
        for row in rows
    ]
    head = ("call", "dtype", "ours (quartiles, n)", "torch", "best other", "of the limit")
    picture = f"![{plot.CAPTION}](docs/images/{plot.file_name(document)})"
    return (
        f"{where(document)} {limits(document)} {peers(document)}\n\n{picture}\n\n"
        f"{table(head, lines)}\n{losses(rows)}{not_measurable(document)}"
    )


def _calls_section(documents: Sequence[Document]) -> str:
    lines: list[tuple[str, ...]] = []
    lost: list[dict[str, Any]] = []
    for document in documents:
        rows = measured(document)
        lost += rows
        if document["suite"] == "small":
            lines += _small_lines(rows)
        else:
            lines += [
                (call(row), row["dtype"], ours(row), ratio(row, TORCH), best(row), share(row))
                for row in rows
            ]
    head = ("call", "dtype", "ours (quartiles, n)", "torch", "best other", "of the limit")
    notes = "".join(map(not_measurable, documents))
    return f"{_place(documents[0])}\n\n{table(head, lines)}\n{losses(lost)}{notes}"


def _layer_section(document: Document) -> str:
    rows = measured(document)
    lines = [
        (call(row), row["dtype"], ours(row), _others(row), share(row), parts(row)) for row in rows
    ]
    head = ("layer", "dtype", "ours (quartiles, n)", "others", "of the limit", "of its time")
    return f"{_place(document)}\n\n{table(head, lines)}\n{losses(rows)}{not_measurable(document)}"


def _models_section(document: Document) -> str:
    rows = measured(document)
    lines = [(call(row), row["dtype"], ours(row), rate(row, OURS), _others(row)) for row in rows]
    head = ("model", "dtype", "ours (quartiles, n)", "ours", "others")
    return f"{_place(document)}\n\n{table(head, lines)}\n{losses(rows)}{not_measurable(document)}"


def _others(row: dict[str, Any]) -> str:
    """The ratio to each other contestant, by name."""
    return ", ".join(f"{ratio(row, name)} {name}" for name in row["ratios"])


def _small_lines(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each dtype and number of heads, the numbers of queries side by side."""
    lines: list[tuple[str, ...]] = []
    for (dtype, heads), group in groupby(rows, key=lambda row: (row["dtype"], row["heads"])):
        of_group = list(group)
        queries = " / ".join(str(row["queries"]) for row in of_group)
        times = " / ".join(f"{1e6 * row['times'][OURS]['median']:.1f}" for row in of_group)
        over = " / ".join(f"{1e6 * row['seconds_over_torch']:+.1f}" for row in of_group)
        python = " / ".join(
            "not measurable here"
            if row["python_seconds"] is None
            else f"{1e6 * row['python_seconds']:.1f}"
            for row in of_group
        )
        ratios = " / ".join(ratio(row, TORCH) for row in of_group)
        least = min(row["times"][OURS]["n"] for row in of_group)
        lines.append(
            (
                f"{heads} heads, {queries} queries on {of_group[0]['keys']} keys",
                dtype,
                f"{times} us (n {least} or more)",
                f"{ratios}, {over} us",
                "",
                f"Python: {python} us",
            )
        )
    return lines


def _overhead_line(document: Document) -> str:
    features: dict[str, list[str]] = {}
    for row in measured(document):
        if "overhead" in row:
            share_added = f"{100 * row['overhead']:+.1f}"
            features.setdefault(row["kind"].replace("-", " "), []).append(share_added)
    added = ", ".join(f"{name} {' / '.join(values)} %" for name, values in features.items())
    avx2 = "".join(
        f" The kernels for AVX2 on the same processor, float32: {ratio(row, TORCH)} torch."
        for row in measured(document)
        if "ratios" in row
    )
    length = document["rows"][0]["keys"]
    return (
        f"{_place(document)} Added to the plain call at L {length}, float32 / bfloat16: "
        f"{added}.{avx2} {not_measurable(document)}".rstrip()
        + "\n"
    )


def _memory_line(document: Document) -> str:
    rows = measured(document)
    if not rows:
        return f"{_place(document)} {not_measurable(document)}"
    most = max(rows, key=lambda row: int(row["grown_bytes"]))
    features = {name for row in rows for name in row["features"]}
    return (
        f"{_place(document)} At {most['length']} tokens, {most['heads']} heads of "
        f"{most['width']}, {len(rows)} fresh processes in which every two of {len(features)} "
        f"features meet took at most **{most['grown_bytes'] / 2**20:.1f} MiB** beyond inputs and "
        f"outputs ({', '.join(most['features']) or 'plain'}).\n"
    )


def _cost_line(document: Document) -> str:
    rows = measured(document)
    if not rows:
        return f"{_place(document)} {not_measurable(document)}"
    of_memory, of_time = (
        max((abs(row[what]["ratio"] - 1), row["what"]) for row in rows)
        for what in ("memory", "seconds")
    )
    return (
        f"{_place(document)} Over {len(rows)} passes of a SmolLM2-shaped model (prompts, steps of "
        f"decoding, a layer's training), predicted peak memory is off by at most "
        f"**{100 * of_memory[0]:.0f} %** ({of_memory[1]}) of what fresh processes take, predicted "
        f"time by at most **{100 * of_time[0]:.0f} %** ({of_time[1]}): counted operations and "
        "bytes, and rates measured at one length.\n"
    )


def _removal_section(document: Document) -> str:
    if not measured(document):
        return f"{_place(document)} {not_measurable(document)}"
    place, units = _nearest(document, 10.0)
    parts = [
        f"{_spread(line, place, '.2f')} {_BY[line['name']]}" for line in loss_plot.lines(document)
    ]
    whole = loss_plot.lines(document)[0]["medians"][0]
    return (
        f"{loss_plot.image(document, 'docs/images')}\n\n"
        f"Without {units} KV groups SmolLM2's loss of {whole:.2f} nats a token becomes "
        f"{', '.join(parts)} ({document['machine']['processor']}, commit "
        f"{document['commit'] or 'unknown'}).\n"
    )


def _restriction_section(document: Document) -> str:
    rows = measured(document)
    if not rows:
        return f"{_place(document)} {not_measurable(document)}"
    place, units = _nearest(document, 30.0)
    parts = [
        f"{_spread(line, place, '+.3f')} {_BY[line['name']]}" for line in loss_plot.lines(document)
    ]
    return (
        f"{loss_plot.image(document, 'docs/images')}\n\n"
        f"{units} KV groups that see {rows[0]['window']} keys and the first "
        f"{rows[0]['keep_first']} alone, in texts of {rows[0]['tested_tokens']:,} tokens, add to "
        f"the loss {', '.join(parts)} ({document['machine']['processor']}, commit "
        f"{document['commit'] or 'unknown'}).\n"
    )


# How the groups of a line were chosen.
_BY = {
    "gate-gradient": "if chosen by the gradient of a gate on each",
    "leave-one-out": "by leaving each out alone",
    "far-mass": "nats a token if chosen by the mass that they put beyond the window",
    "random": "at random",
}


def _nearest(document: Document, share: float) -> tuple[int, str]:
    """The place of the measured share next to `share` per cent, and its groups in words."""
    shares = loss_plot.lines(document)[0]["shares"]
    place = min(range(len(shares)), key=lambda i: abs(float(shares[i]) - share))
    units = measured(document)[0]["units"]
    return place, f"{round(shares[place] * units / 100)} of {units}"


def _spread(line: dict[str, Any], place: int, form: str) -> str:
    """The median, and the range over draws where there are several."""
    median, low, high = (line[name][place] for name in ("medians", "low", "high"))
    spread = f" ({low:{form}} to {high:{form}} in {line['draws']} draws)"
    return f"{median:{form}}{spread if line['draws'] > 1 else ''}"


def _inspect_section(document: Document) -> str:
    first: dict[int, dict[str, Any]] = {}
    for row in document["rows"]:
        first.setdefault(row["tokens"], row)
    rows = [
        (
            row["what"] + (f" of {row['page_bytes'] / 1e6:.1f} MB" if "page_bytes" in row else ""),
            f"{row['seconds']:.1f} s",
            f"{row['peak_rss_bytes'] / 1e9:.2f} GB",
            f"{row['seconds'] / first[row['tokens']]['seconds']:.2f}x",
        )
        for row in document["rows"]
    ]
    return (
        f"{_place(document)}\n\n"
        f"{table(('fresh process', 'time', 'peak memory', 'time against ours'), rows)}"
    )


def _corpus_line(document: Document) -> str:
    *_, row = rows = document["rows"]
    sizes = " and ".join(
        f"{it['tokens']:,} tokens in {it['seconds'] / 60:.1f} minutes and "
        f"{it['peak_rss_bytes'] / 1e9:.2f} GB"
        for it in rows
    )
    return (
        f"{_place(document)} `multihead inspect --text` over the modules of Python's library, "
        f"{row['context']} tokens at once, {row['dtype']}: {sizes} at the peak, every "
        "statistic with its histogram and the strongest links of each head kept in "
        f"{row['record_bytes'] / 1e6:.1f} MB.\n"
    )


def _place(document: Document) -> str:
    machine = document["machine"]
    return (
        f"**{machine['class']}** ({machine['processor']}, {machine['threads']} threads, commit "
        f"{document['commit'] or 'unknown'}):"
    )


def _newest_first(machines: Iterable[list[Document]]) -> list[list[Document]]:
    """The documents of each machine, those of the last measured one first."""
    return sorted(
        machines,
        key=lambda found: max(document.get("date", "") for document in found),
        reverse=True,
    )


def _elsewhere(documents: Sequence[Document]) -> str:
    """How the rows of another machine compare with torch's and with the best other, in a line."""
    machine = documents[0]["machine"]
    rows = [row for document in documents for row in measured(document)]
    torch = [row["ratios"][TORCH] for row in rows]
    peers = [row["ratios"][name] for row in rows if (name := best_peer(row)) is not None]
    parts = [
        f"{min(ratios):.2f}x to {max(ratios):.2f}x {name}, slower in "
        f"{sum(ratio < 1 for ratio in ratios)} of {len(ratios)} rows"
        for name, ratios in (("torch", torch), ("the best other", peers))
        if ratios
    ]
    return (
        f"**{machine['class']}** ({machine['processor']}, {machine['threads']} threads): "
        f"{'; '.join(parts)} ([docs/benchmarks.md](docs/benchmarks.md)).\n"
    )


def _machine(document: Document) -> str:
    machine = document["machine"]
    return f"{machine['processor']} {machine['class']} {machine['threads']}"


def _not_measured(documents: Sequence[Document]) -> str:
    seen = {document["machine"]["class"] for document in documents}
    missing = [name for name in CLASSES.values() if name not in seen]
    return f"Not measured: {', '.join(missing)}.\n" if missing else ""
