"""Run the claims, each in a process of its own: `python examples/claims [--quick] [NAME ...]`.

`--record`, which `make claims` gives, keeps every result and picture and writes docs/claims.md.
A claim that fails does not stop the others; the exit status is 1 if any did.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import page

HERE = Path(__file__).resolve().parent

# A claim that takes longer hangs.
_LIMIT_SECONDS = 1200


def main() -> int:
    """Run what is asked for, then say how each ended."""
    options = _options()
    flags = [f"--{name}" for name in ("quick", "record") if getattr(options, name)]
    if options.threads is not None:
        flags += ["--threads", str(options.threads)]
    ends = {}
    start = time.perf_counter()
    for name in options.names or page.names():
        print(f"--- {name}", flush=True)
        ends[name] = _run([sys.executable, str(HERE / f"{name}.py"), *flags])
        print(flush=True)
    if options.record:
        print(f"Written {page.write()}")
    failed = {name: end for name, end in ends.items() if end}
    print(f"{len(ends) - len(failed)} of {len(ends)} claims run, {_minutes(start)}")
    for name, end in failed.items():
        print(f"{name} failed: {end}", file=sys.stderr)
    return 1 if failed else 0


def _run(command: list[str]) -> str:
    """How a process failed; empty if it did not."""
    try:
        status = subprocess.run(command, check=False, timeout=_LIMIT_SECONDS).returncode
    except subprocess.TimeoutExpired:
        return f"took more than {_LIMIT_SECONDS} s"
    return f"status {status}; the reason stands above" if status else ""


def _minutes(start: float) -> str:
    seconds = time.perf_counter() - start
    return f"{seconds / 60:.1f} minutes" if seconds >= 100 else f"{seconds:.0f} seconds"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python examples/claims", description="Run the claims of the textbook."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(page.names())}")
    parser.add_argument("--quick", action="store_true", help="all of them in three minutes")
    parser.add_argument("--record", action="store_true", help="keep results and pictures")
    parser.add_argument("--threads", type=int, help="threads; torch's number without it")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in page.names()]
    if unknown:
        parser.error(f"no claim is called {unknown[0]!r}; there are {', '.join(page.names())}.")
    if options.quick and options.record:
        parser.error("--record keeps full runs, and --quick is less. Leave out one of the two.")
    return options


if __name__ == "__main__":
    sys.exit(main())
