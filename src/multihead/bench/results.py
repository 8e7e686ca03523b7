"""The document that a suite ends in, and where it is kept."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multihead.errors import InputError

FOLDER = Path("benchmarks/results")

Document = dict[str, Any]


def one_line(document: Mapping[str, Any]) -> str:
    """The document as one line of JSON; NaN and infinities, which JSON lacks, are refused."""
    return json.dumps(document, allow_nan=False, ensure_ascii=False)


def check_folder(folder: Path = FOLDER) -> None:
    """Refuse to record where no result can be kept, before anything is measured.

    Raises:
        InputError: the working directory is not a checkout, or the folder cannot be written.
    """
    if not folder.parent.is_dir():
        raise InputError(
            f"--record writes to {folder}, but there is no folder {folder.parent} in "
            f"{Path.cwd()}. Run it in the root of a checkout of multihead."
        )
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}.") from error


def file_name(document: Mapping[str, Any]) -> str:
    """Of suite, processor and threads: the next measurement of the same takes its place."""
    machine = document["machine"]
    return f"{document['suite']}-{_slug(machine['processor'])}-{machine['threads']}t.json"


def save(document: Document, folder: Path = FOLDER) -> Path:
    """Write the document to the file of its name, whole or not at all."""
    return write(document, folder / file_name(document))


def write(document: Document, path: Path) -> Path:
    """Write the document to `path`, whose folder exists.

    The file appears whole or not at all: it is written beside its place, then moved there.
    """
    text = json.dumps(document, allow_nan=False, ensure_ascii=False, indent=1) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp keeps it from everybody else
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def load_all(folder: Path = FOLDER) -> list[Document]:
    """Every recorded document, in the order of the files' names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
