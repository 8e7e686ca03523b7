"""Time and peak memory of a command in a process of its own."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multihead.errors import MultiheadError

# A small process starts the command and waits for it: on Linux a process's peak counts from the
# pages of the one that started it, and this one has torch loaded.
_STARTER = """
import json, os, subprocess, sys, time

start = time.perf_counter()
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
seconds = time.perf_counter() - start
print(json.dumps([seconds, usage.ru_maxrss, os.waitstatus_to_exitcode(status)]))
"""

# `ru_maxrss` is in KiB on Linux, in bytes on macOS.
_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class Usage:
    """Wall-clock seconds from start to exit, and the largest resident size in bytes."""

    seconds: float
    peak_rss_bytes: int


def run_fresh(arguments: Sequence[str], *, threads: int) -> Usage:
    """Run `python ARGUMENTS` to its end, its output thrown away.

    Raises:
        MultiheadError: it failed; the message has the end of its standard error.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _STARTER, sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    if done.returncode:
        raise MultiheadError(f"no process could be started: {done.stderr.strip()[-500:]}")
    seconds, maxrss, status = json.loads(done.stdout)
    if status:
        raise MultiheadError(
            f"'python {' '.join(arguments)}' ended with status {status}: "
            f"{done.stderr.strip()[-500:]}"
        )
    return Usage(seconds, maxrss * _MAXRSS_UNIT)


def summary(usages: Sequence[Usage]) -> dict[str, Any]:
    """The median time of several runs with its range, and the largest peak."""
    seconds = [usage.seconds for usage in usages]
    return {
        "seconds": statistics.median(seconds),
        "low": min(seconds),
        "high": max(seconds),
        "n": len(seconds),
        "peak_rss_bytes": max(usage.peak_rss_bytes for usage in usages),
    }
