"""Where and with what a measurement was made."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy
import torch

from multihead.machine import processor_name, usable_processors
from multihead.ops import explain
from multihead.ops.backends import native

# A ratio to a peer holds for processors that offer the same to both. The flag is Linux's name for
# what sets a class apart from the next.
CLASSES = {
    "amx_bf16": "x86-64 with AMX",
    "avx512_bf16": "x86-64 with AVX-512-BF16",
    "avx512f": "x86-64 with AVX-512",
    "avx2": "x86-64 with AVX2",
    "asimd": "ARM",
}

_PACKAGE = Path(__file__).resolve().parent.parent
_RUN = (
    *(":/src", ":/csrc", ":/CMakeLists.txt", ":/pyproject.toml", ":/constraints.txt"),
    *(":/examples", ":/benchmarks", ":(top,exclude)benchmarks/results"),
)


def describe(threads: int) -> dict[str, Any]:
    """Processor and class, instruction sets of our kernels, usable cores, threads, system."""
    return {
        "processor": processor_name(),
        "class": processor_class(),
        "instruction_sets": instruction_sets(),
        "cores": usable_processors(),
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
    }


def instruction_sets() -> dict[str, str | None]:
    """The set that serves each dtype of the native kernels; None where none does."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        one = torch.zeros(1, 1, 1, 1, dtype=dtype)
        served = explain(one, one, one).backend == native.NAME
        name = str(dtype).removeprefix("torch.")
        found[name] = native.instruction_set(dtype) if served else None
    return found


def processor_class() -> str:
    """The first of `CLASSES` whose flag the processor has, else its architecture."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(errors="replace").split())
    except OSError:
        flags = set()
    return next((name for flag, name in CLASSES.items() if flag in flags), platform.machine())


def versions() -> dict[str, str]:
    """Versions of what ran."""
    from multihead import __version__

    return {
        "multihead": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def commit() -> str | None:
    """The checkout's commit, with `+` behind it if what runs differs; None outside a checkout.

    Results and documents don't count: recording one suite must not mark the next.
    """
    try:
        if Path(_git("rev-parse", "--show-toplevel")) / "src" / "multihead" != _PACKAGE:
            return None
        name = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", *_RUN)
        return name + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()
