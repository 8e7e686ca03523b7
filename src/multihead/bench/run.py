"""`multihead bench`: measure, show, and keep."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

import torch

from multihead.bench import machine, peers, results, show
from multihead.bench.contest import Setting
from multihead.bench.limits import Limits, cold_bytes, last_level_cache_bytes, read_bandwidth
from multihead.bench.suites import SUITES, Suite
from multihead.bench.suites.row import Row
from multihead.errors import InputError, MultiheadError

_SECONDS, _QUICK_SECONDS = 2.5, 0.1


def run(
    suites: Sequence[str] = (),
    *,
    only: str | None = None,
    quick: bool = False,
    record: bool = False,
    as_json: bool = False,
    threads: int | None = None,
) -> None:
    """Measure suites and print them: lines for each row, then one line of JSON for all of them.

    Several suites run in a process each, so that none meets the threads and the heap of another.

    Args:
        suites: their names; all without any.
        only: run only rows whose names have this in them.
        quick: small shapes and few rounds, to see that everything works; the figures mean nothing.
        record: also keep each suite's document in benchmarks/results; only of whole suites.
        as_json: print the line of JSON alone, and the rest on stderr.
        threads: for every contestant; torch's number if None.

    Raises:
        InputError: there is no such suite or row, or a result cannot be kept.
        BackendError: a result is wrong, or the native extension is not built.
        MultiheadError: a program of a suite failed.
    """
    chosen = choose(suites, only, quick=quick)
    if record:
        _check_whole(only, quick)
        results.check_folder()
    stream = sys.stderr if as_json else sys.stdout
    threads = torch.get_num_threads() if threads is None else threads
    if len(chosen) == 1:
        ((suite, rows),) = chosen.items()
        documents = [_measure(SUITES[suite], rows, only, quick, threads, stream)]
        failed: list[str] = []
    else:
        documents, failed = _in_processes(list(chosen), only, quick, threads, stream)
    if record:
        for document in documents:
            print(f"Recorded: {results.save(document)}", file=stream)
    print(results.one_line({"suites": documents}))
    if failed:
        raise MultiheadError(f"{' and '.join(failed)} failed; the reasons stand above.")


def choose(suites: Sequence[str], only: str | None, *, quick: bool) -> dict[str, list[Row]]:
    """The rows to run of each suite that has some.

    Raises:
        InputError: there is no such suite, or no row whose name has `only` in it; lists the names.
    """
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise InputError(f"no suite is called {unknown[0]!r}; there are {', '.join(SUITES)}.")
    rows = {name: SUITES[name].rows(quick=quick) for name in dict.fromkeys(suites) or SUITES}
    chosen = {
        name: [row for row in of_suite if only is None or only in row.name]
        for name, of_suite in rows.items()
    }
    chosen = {name: of_suite for name, of_suite in chosen.items() if of_suite}
    if not chosen:
        names = "; ".join(
            f"{name}: {', '.join(row.name for row in of_suite)}" for name, of_suite in rows.items()
        )
        raise InputError(f"no row has {only!r} in its name. {names}.")
    return chosen


def _check_whole(only: str | None, quick: bool) -> None:
    for option, given in ((f"--only {only}", only is not None), ("--quick", quick)):
        if given:
            raise InputError(
                f"--record keeps whole suites at full size, and {option} is less. Leave out one of "
                "the two."
            )


def _measure(
    suite: Suite, rows: Sequence[Row], only: str | None, quick: bool, threads: int, stream: TextIO
) -> results.Document:
    """Run the rows of one suite in this process; torch's number of threads is put back."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        document = _head(suite.name, only, quick, threads)
        print(show.title(suite), file=stream, flush=True)
        found = peers.find(suite.peers, threads=threads)
        limits = Limits.measure(threads)
        bandwidth = read_bandwidth(2**26 if quick else None) if suite.reads_memory else None
        setting = Setting(
            threads=threads,
            seconds=_QUICK_SECONDS if quick else _SECONDS,
            limits=limits,
            read_gb_per_s=bandwidth,
            peers=tuple(name for name, peer in found.items() if "absent" not in peer),
        )
        document |= {"limits": _limits(setting), "peers": found}
        for line in (*show.limits_lines(document["limits"]), *show.peers_lines(found)):
            print(line, file=stream, flush=True)
        document["rows"] = []
        for row in rows:
            document["rows"].append({"name": row.name} | row.measure(setting))
            for line in show.lines(document["rows"][-1]):
                print(line, file=stream, flush=True)
    finally:
        torch.set_num_threads(before)
    return document


def _head(suite: str, only: str | None, quick: bool, threads: int) -> results.Document:
    return {
        "suite": suite,
        "command": " ".join(_command(suite, only, quick, threads)),
        "commit": machine.commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine.describe(threads),
        "versions": machine.versions(),
    }


def _limits(setting: Setting) -> dict[str, Any]:
    """GF/s by the instruction; where memory was read, its GB/s and how it was kept cold."""
    limits: dict[str, Any] = dict(setting.limits.to_json())
    if setting.read_gb_per_s is not None:
        limits |= {
            "memory read": setting.read_gb_per_s,
            "cache_bytes": last_level_cache_bytes(),
            "cold_bytes": cold_bytes(),
        }
    return limits


def _command(suite: str, only: str | None, quick: bool, threads: int) -> list[str]:
    return [
        "multihead",
        "bench",
        *("--suite", suite),
        *(("--only", only) if only is not None else ()),
        *(("--quick",) if quick else ()),
        *("--threads", str(threads)),
    ]


def _in_processes(
    suites: Sequence[str], only: str | None, quick: bool, threads: int, stream: TextIO
) -> tuple[list[results.Document], list[str]]:
    """The documents of the suites that went well, and the names of the others."""
    documents, failed = [], []
    for suite in suites:
        command = [sys.executable, "-m", *_command(suite, only, quick, threads), "--json"]
        # A file, not a pipe: nobody reads it before the lines on stderr end.
        with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
            with subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True) as child:
                assert child.stderr is not None
                for line in child.stderr:
                    print(line, end="", file=stream, flush=True)
            out.seek(0)
            text = out.read()
        if child.returncode:
            failed.append(suite)
        else:
            documents += json.loads(text)["suites"]
    return documents, failed
