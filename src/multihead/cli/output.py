"""Where a command's results go: JSON or text on stdout, progress on stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping

from rich.console import Console


def print_json(document: Mapping[str, object]) -> None:
    """Print one JSON document; NaN and infinities, for which JSON has no word, become null."""
    json.dump(_finite(document), sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def print_note(text: str, *, aside: bool) -> None:
    """Print one line on stdout, or on stderr where stdout has a document (`aside`)."""
    print(text, file=sys.stderr if aside else sys.stdout)


def stdout_console() -> Console:
    """The console for results: as wide as the terminal, 80 columns or $COLUMNS into a pipe."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=False)


def stderr_console() -> Console:
    """The console for progress."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
