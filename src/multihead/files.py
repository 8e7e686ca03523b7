"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from .errors import InputError


def check_writable(path: Path, option: str, example: str) -> None:
    """Raise InputError where `path`, which `option` gave, cannot be written: before any work."""
    try:
        is_folder, folder = path.is_dir(), path.resolve().parent
    except (OSError, RuntimeError) as error:  # names that are too long, links in a circle
        raise InputError(f"{option} {path} leads nowhere: {error}.") from error
    if is_folder:
        raise InputError(f"{option} {path} is a folder. Name a file in it, such as {example}.")
    if not folder.is_dir():
        raise InputError(f"{option} {path}: there is no folder {folder}.")
    replaced = path.is_file() or not path.exists()
    if (replaced and not os.access(folder, os.W_OK)) or (
        path.exists() and not os.access(path, os.W_OK)
    ):
        raise InputError(f"{option} {path}: no permission to write there.")


def write_whole(path: Path, content: bytes, what: str = "") -> None:
    """Write beside `path`, then rename: a reader sees the old file or the new one, never a part.

    A link stays one, and what is no file, such as /dev/stdout, is written to as it is.

    Raises InputError, which begins with `what`, where that fails; what was there before stays.
    """
    part = None
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        target = path.resolve()
        part = target.with_name(f".{os.getpid()}-{uuid4().hex[:8]}.part")
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(target)
        part = None
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{what} {path} cannot be written: {reason}.".lstrip()) from error
    finally:
        if part is not None:  # also after a KeyboardInterrupt
            with suppress(OSError):
                part.unlink()
