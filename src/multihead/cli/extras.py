"""The optional packages: which are here, which are missing, and how to get them."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

# Extra, then its packages with the least version that serves: as pyproject.toml says.
EXTRAS: dict[str, dict[str, str]] = {
    "cli": {"typer": "0.20", "rich": "14"},
    "transformers": {"transformers": "5.4", "gguf": "0.17"},
}


def installed_version(package: str) -> str | None:
    """The version of an installed distribution, None where it is absent; nothing is imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def extra_problems(extra: str) -> list[str]:
    """What an extra lacks, one phrase a package; empty where it is whole."""
    problems = []
    for package, least in EXTRAS[extra].items():
        found = installed_version(package)
        if found is None:
            problems.append(f"{package} is not installed")
        elif _numbers(found) < _numbers(least):
            problems.append(f"{package} is {found}, older than {least}")
    return problems


def install_command(extra: str) -> str:
    """The command that brings an extra."""
    return f"pip install 'multihead[{extra}]'"


def _numbers(version_text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version_text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
