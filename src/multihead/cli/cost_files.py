"""Tables of `multihead cost` as files, whole or not at all."""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multihead.errors import InputError


def check_file(path: Path, option: str) -> None:
    """Raise InputError where `path` cannot be written, before any work."""
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder. Name a file in it.")
    try:
        folder = path.resolve().parent
    except (OSError, RuntimeError) as error:  # links in a circle
        raise InputError(f"{option} {path} leads nowhere: {error}.") from error
    if not folder.is_dir():
        raise InputError(f"{option} {path}: there is no folder {folder}.")
    whole = path.is_file() or not path.exists()
    if (whole and not os.access(folder, os.W_OK)) or (
        path.exists() and not os.access(path, os.W_OK)
    ):
        raise InputError(f"{option} {path}: no permission to write there.")


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows with one header; a field that is None is empty.

    Raises InputError where the file cannot be written; what was there before then stays.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode(), "--csv")


def write_whole(path: Path, content: bytes, option: str) -> None:
    """Write beside `path`, then rename: a reader sees the old file or the new one, never a part.

    A link stays one, and what is no file, such as /dev/stdout, is written to as it is.

    Raises InputError where that fails.
    """
    temporary = None
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        path = path.resolve()
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise InputError(f"{option} {path} cannot be written: {error.strerror}.") from error


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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
