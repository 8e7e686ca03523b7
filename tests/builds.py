"""The extension built anew with other options, for tests; `build/tests` keeps it."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multihead.machine import usable_processors
from requires import require, tool

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Build:
    """What was built: the extension's file, the folder, and what CMake said when it configured."""

    extension: Path
    folder: Path
    configured: str


@functools.cache
def build(name: str, *options: str) -> Build:
    """Build with CMake's `options`; skips the calling test where there is no compiler."""
    require("compiler")
    folder = ROOT / "build" / "tests" / name
    cmake = str(tool("cmake"))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        # Compiler and environment may be others than last time; objects that are up to date stay.
        (folder / "CMakeCache.txt").unlink(missing_ok=True)
        configured = _run(
            [cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja",
             f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}",
             *options]
        )  # fmt: skip
        _run([cmake, "--build", str(folder), "--parallel", str(usable_processors())])
    (extension,) = folder.glob("_native.*")
    return Build(extension, folder, configured)


def small_build() -> Build:
    """The two sets that compile in seconds, as with an old compiler; watches undefined behavior."""
    left_out = (f"-DMULTIHEAD_HAS_{name}=OFF" for name in ("AVX512", "AVX512_BF16", "AVX512_AMX"))
    return build("small", "-DMULTIHEAD_SANITIZE=undefined", *left_out)


def run_tests(
    build: Build, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own, on this build."""
    return run_python(
        str(TESTS / "with_extension.py"),
        str(build.extension),
        *("-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *arguments),
        environment=environment,
    )


def run_python(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with this process's module path."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(TESTS), *sys.path)),
            **(environment or {}),
        },
    )


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout
