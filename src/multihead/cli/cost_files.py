"""Tables of `multihead cost` as files."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multihead.files import write_whole


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows with one header; a field that is None is empty.

    Raises InputError where the file cannot be written; what was there before then stays.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode(), "--csv")


def flattened(document: Mapping[str, Any], prefix: str = "") -> list[dict[str, object]]:
    """Every single value of a document as a row: its dotted name, and it."""
    rows: list[dict[str, object]] = []
    for key, value in document.items():
        rows += _rows(f"{prefix}{key}", value)
    return rows


def _rows(name: str, value: Any) -> list[dict[str, object]]:
    if isinstance(value, Mapping):
        return flattened(value, f"{name}.")
    if isinstance(value, list | tuple):
        return [row for index, item in enumerate(value) for row in _rows(f"{name}.{index}", item)]
    return [{"quantity": name, "value": value}]
