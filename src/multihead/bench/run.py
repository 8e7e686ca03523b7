"""`multihead bench`: measure, show, and keep."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import torch

from multihead.bench import attention, inspection, machine, results, show
from multihead.bench.limits import Limits
from multihead.errors import InputError

INSPECT = "inspect"


def run(
    *,
    record: bool = False,
    json: bool = False,
    only: str | None = None,
    threads: int | None = None,
    seconds: float = 3.0,
) -> None:
    """Measure a suite and print it: a line for each row, then one line of JSON.

    Args:
        record: also keep the document in benchmarks/results; only of a whole suite.
        json: print the line of JSON alone.
        only: "inspect" for the suite of that name; else a part of the names of the rows of the
            suite "attention", which is what runs without it.
        threads: for every contestant; torch's number if None.
        seconds: about how long a row of the suite "attention" takes.

    Raises:
        InputError: no row has such a name, or a result cannot be kept.
        BackendError: a result is wrong, or the native extension is not built.
        MultiheadError: a program of the suite "inspect" failed.
    """
    if record:
        if only not in (None, INSPECT):
            raise InputError(
                f"--record keeps whole suites, and --only {only} is a part of one. Leave out one "
                "of the two."
            )
        results.check_folder()
    stream = sys.stderr if json else sys.stdout
    before = torch.get_num_threads()
    threads = before if threads is None else threads
    torch.set_num_threads(threads)
    try:
        document = _head(only, threads)
        document |= (
            _inspect(threads, stream)
            if only == INSPECT
            else _attention(choose(only), threads, seconds, stream)
        )
    finally:
        torch.set_num_threads(before)
    if record:
        print(f"Recorded: {results.save(document)}", file=stream)
    print(results.one_line(document))


def choose(only: str | None) -> list[attention.Row]:
    """The rows whose names have `only` in them; all without it.

    Raises:
        InputError: there is none; lists the names.
    """
    rows = [row for row in attention.ROWS if only is None or only in row.name]
    if not rows:
        names = ", ".join(row.name for row in attention.ROWS)
        raise InputError(f"no row has {only!r} in its name; there are {names}, and {INSPECT}.")
    return rows


def _head(only: str | None, threads: int) -> results.Document:
    return {
        "suite": INSPECT if only == INSPECT else "attention",
        "command": f"multihead bench{f' --only {only}' if only else ''} --threads {threads}",
        "commit": machine.commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine.describe(threads),
        "versions": machine.versions(),
    }


def _attention(
    rows: Sequence[attention.Row], threads: int, seconds: float, stream: TextIO
) -> results.Document:
    limits = Limits.measure(threads)
    print(show.limits_line(limits), file=stream, flush=True)
    entries = []
    for row in rows:
        entries.append(attention.measure(row, limits, seconds=seconds))
        print(show.attention_line(entries[-1]), file=stream, flush=True)
    return {"limits": limits.to_json(), "rows": entries}


def _inspect(threads: int, stream: TextIO) -> results.Document:
    entries = []
    with tempfile.TemporaryDirectory() as folder:
        for contestant in inspection.contestants(Path(folder) / "heads.html"):
            entries.append(inspection.measure(contestant, threads=threads))
            print(show.inspect_line(entries[-1]), file=stream, flush=True)
    return {"tokens": inspection.TOKENS, "rows": entries}
