"""The document that a suite ends in, and where it is kept."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multihead.errors import InputError
from multihead.files import write_whole

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
    """Of suite, processor, its class and threads: what is measured next on the same replaces it.

    The class tells apart what a virtual machine shows under one name.
    """
    machine = document["machine"]
    what = (document["suite"], machine["processor"], machine["class"].removeprefix("x86-64 with "))
    return f"{'-'.join(map(_slug, what))}-{machine['threads']}t.json"


def save(document: Document, folder: Path = FOLDER) -> Path:
    """Write the document to the file of its name, whole or not at all."""
    return write(document, folder / file_name(document))


def write(document: Document, path: Path) -> Path:
    """Write the document to `path`, whose folder exists, whole or not at all."""
    text = json.dumps(document, allow_nan=False, ensure_ascii=False, indent=1) + "\n"
    write_whole(path, text.encode())
    return path


def load_all(folder: Path = FOLDER) -> list[Document]:
    """Every recorded document, in the order of the files' names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
