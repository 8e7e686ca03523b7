"""The native tests on builds that stop at a read beyond a tensor or at undefined behavior."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from builds import TESTS, Build, build, run_python, run_tests, small_build

# Python itself is not instrumented: the runtime must be there first, and what Python never frees
# is no leak of the extension's.
_PRELOADED = ("libasan.so", "libstdc++.so")
_ADDRESS = {"ASAN_OPTIONS": "detect_leaks=0"}

# test_memory_full_of_rubbish fills memory by the C library's allocator, which address replaces.
# The others start processes of their own, on the build that is installed.
_LEFT_OUT = "not rubbish and not refuses and not environment_chooses"
_NATIVE = [
    str(TESTS / f"test_{name}.py")
    for name in (
        "native",
        "instruction_sets",
        "same_bits",
        "key_values",
        "nonfinite",
        "attention",
        "rotate",
    )
]

# Tells the extension that a tensor is longer than its memory.
READ_BEYOND = """
import ctypes
import torch
import multihead as mh

real = torch.zeros(64 * 4)
memory = (ctypes.c_float * (96 * 4)).from_address(real.data_ptr())
key = torch.frombuffer(memory, dtype=torch.float32).view(1, 1, 96, 4)
mh.attention(torch.ones(1, 1, 3, 4), key, key, backend="native")
"""

# A width whose scratch memory is more bytes than a 64-bit integer counts.
OVERFLOW = """
import torch
import multihead as mh

wide = torch.zeros(1).expand(1, 1, 1, 2**61)
mh.attention(wide, wide, torch.zeros(1, 1, 1, 1), backend="native")
"""


def address_environment() -> dict[str, str]:
    paths = []
    for name in _PRELOADED:
        command = ["c++", f"-print-file-name={name}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(found).is_absolute():
            pytest.skip(f"the compiler has no {name}")
        paths.append(str(Path(found).resolve()))
    return {**_ADDRESS, "LD_PRELOAD": " ".join(paths)}


def run_code(build: Build, code: str, environment: dict[str, str]) -> str:
    """The standard error of `code`, which must end the process early."""
    load = f"import with_extension\nwith_extension.load({str(build.extension)!r})\n"
    done = run_python("-c", load + code, environment=environment)
    assert done.returncode != 0
    return done.stderr


@pytest.mark.slow
def test_cases_without_undefined_behavior() -> None:
    build = small_build()
    done = run_tests(build, str(TESTS / "test_instruction_sets.py"), "-k", "every_case")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"\b[1-9]\d* passed", done.stdout)
    assert "signed integer overflow" in run_code(build, OVERFLOW, {})


@pytest.mark.proof
def test_native_tests_without_undefined_behavior() -> None:
    everything = build("undefined", "-DMULTIHEAD_SANITIZE=undefined")
    done = run_tests(everything, *_NATIVE, "-k", _LEFT_OUT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "signed integer overflow" in run_code(everything, OVERFLOW, {})


@pytest.mark.proof
def test_native_tests_without_a_read_or_write_beyond() -> None:
    everything = build("address", "-DMULTIHEAD_SANITIZE=address")
    environment = address_environment()
    done = run_tests(everything, *_NATIVE, "-k", _LEFT_OUT, environment=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "heap-buffer-overflow" in run_code(everything, READ_BEYOND, environment)
