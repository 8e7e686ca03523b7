"""What the build promises: its size, the sets that it holds, and old compilers."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from builds import ROOT, TESTS, run_python, small_build
from multihead.ops.backends import native
from requires import require, tool

X86 = platform.machine() in ("x86_64", "AMD64")
SETS = ["baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"]

# A compiler that knows nothing of AMX, as GCC 10.
OLD_COMPILER = """#!/bin/sh
case "$*" in *-mamx*) echo "unrecognized command-line option '-mamx-tile'" >&2; exit 1;; esac
exec c++ "$@"
"""


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    require("compiler")
    return subprocess.run(
        [str(tool("cmake")), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja",
         f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DPython_EXECUTABLE={sys.executable}",
         *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_extension_is_under_3_mb() -> None:
    require("native")
    spec = find_spec("multihead._native")
    assert spec is not None
    assert spec.origin is not None
    assert os.path.getsize(spec.origin) < 3e6


def test_every_set_that_runs_is_in_the_build() -> None:
    require("native")
    held, left_out = native.built_sets()
    assert held[0] == "baseline"
    assert set(native.instruction_sets()) <= set(held)
    if X86:
        assert sorted(held + left_out) == sorted(SETS)


@pytest.mark.skipif(not X86, reason="other processors have one set")
@pytest.mark.slow
def test_sets_that_the_compiler_lacks_are_left_out(tmp_path: Path) -> None:
    compiler = tmp_path / "old-c++"
    compiler.write_text(OLD_COMPILER)
    compiler.chmod(0o755)
    done = configure(tmp_path / "build", f"-DCMAKE_CXX_COMPILER={compiler}")
    assert done.returncode == 0, done.stderr
    assert "Left out: avx512_amx. " in done.stdout
    assert "Instruction sets: baseline,avx2,avx512,avx512_bf16\n" in done.stdout


@pytest.mark.skipif(not X86, reason="other processors have one set")
@pytest.mark.slow
def test_a_build_without_some_sets_works_and_says_so() -> None:
    build = small_build()
    assert "Instruction sets: baseline,avx2\n" in build.configured
    assert "Left out: avx512_amx. " in build.configured
    code = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
        f"import with_extension; with_extension.load({str(build.extension)!r})\n"
        "from multihead.cli import main\n"
        "main(['doctor']); print('---'); main(['doctor', '--json'])\n"
    )
    done = run_python("-c", code, environment={"MULTIHEAD_ISA": "", "NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr
    text, _, document = done.stdout.partition("---\n")
    words = " ".join(text.split())
    assert "instruction sets: baseline, avx2" in words
    assert "left out: avx512, avx512_bf16, avx512_amx, unknown to the compiler" in words
    found = json.loads(document)["native"]
    assert found["built_sets"] == ["baseline", "avx2"]
    assert found["sets_left_out"] == ["avx512", "avx512_bf16", "avx512_amx"]
    assert set(found["chosen"].values()) <= {"baseline", "avx2"}


def test_an_unknown_sanitizer_is_refused(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DMULTIHEAD_SANITIZE=thread")
    assert done.returncode != 0
    assert "MULTIHEAD_SANITIZE is address or undefined, not thread" in done.stderr
