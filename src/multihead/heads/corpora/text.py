"""A corpus as windows of tokens: files and texts, read piece by piece, and the hash of what was.

Documents are read in pieces of some 64 K characters, cut between words, and each piece is tokenized
by itself: a corpus of any size needs the memory of a piece.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ArgumentError, InputError

FIELD = "text"

_PIECE = 2**16  # characters


@dataclass(frozen=True)
class Document:
    """A text and what it is called, for links to name it; the text may come in parts."""

    name: str
    text: str | Iterable[str]


@dataclass(frozen=True)
class Window:
    """Tokens of one document that a model reads at once.

    `number` is the document's, from 0; `start` how many of the document's tokens come before;
    `before` how many of the ids are special tokens ahead of the text's own.
    """

    ids: tuple[int, ...]
    document: int
    name: str
    start: int
    before: int


class Digest:
    """SHA-256 of a corpus in the order in which it is read: where documents begin, the UTF-8 bytes
    of their text, and the tokens of every window.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._hash = hashlib.sha256()

    def document(self) -> None:
        """A document begins."""
        self._add(b"d", b"")

    def text(self, text: str) -> None:
        """Text was read; UnicodeEncodeError for what is none, such as half of a character."""
        content = text.encode()
        self.bytes += len(content)
        self._add(b"t", content)

    def window(self, ids: Iterable[int]) -> None:
        """A model reads these tokens."""
        self._add(b"w", np.fromiter(ids, dtype="<i8").tobytes())

    @property
    def hex(self) -> str:
        """Of all so far."""
        return self._hash.hexdigest()

    def _add(self, tag: bytes, content: bytes) -> None:
        self._hash.update(tag + len(content).to_bytes(8, "little") + content)


def documents(texts: Path | Iterable[str | Document], field: str = FIELD) -> Iterator[Document]:
    """The documents of a corpus in order: see `read_corpus`.

    Raises ArgumentError for what is no corpus; InputError for files that cannot be read.
    """
    if isinstance(texts, Path):
        return _of_path(texts, field)
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise ArgumentError(
            "texts must be a pathlib.Path of a folder or a file, or several texts; got a "
            f"{type(texts).__name__}. Write pathlib.Path(name) for a file, [text] for one text."
        )
    return _of_texts(texts)


class Windows:
    """How a tokenizer's tokens fill windows of `context`, its special tokens around each.

    Raises ArgumentError where a window has no room for two tokens of text.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer = tokenizer
        self.before, self.after = _special_tokens(tokenizer)
        self.room = context - len(self.before) - len(self.after)
        if self.room < 2:
            raise ArgumentError(
                f"context must leave room for two tokens of text; got {context}, of which the "
                f"tokenizer's special tokens take {context - self.room}."
            )

    def of(self, found: Iterable[Document], digest: Digest) -> Iterator[Window]:
        """The windows of documents in order; what is read goes into `digest` as it is read.

        Raises InputError for half of a character.
        """
        for number, document in enumerate(found):
            digest.document()
            waiting: list[int] = []
            start = 0
            for piece in _pieces(document.text):
                _add_text(digest, piece, document.name)
                waiting += encode(self._tokenizer, piece)
                while len(waiting) >= self.room:
                    yield self._window(waiting[: self.room], number, document.name, start)
                    start += self.room
                    del waiting[: self.room]
            if waiting:
                yield self._window(waiting, number, document.name, start)

    def cut(self, window: Window, most: int) -> Window | None:
        """`window` with `most` tokens at most; None where fewer than two would be its text's."""
        if len(window.ids) <= most:
            return window
        own = window.ids[window.before : len(window.ids) - len(self.after)]
        left = most - len(self.before) - len(self.after)
        return (
            self._window(own[:left], window.document, window.name, window.start)
            if (left >= 2)
            else None
        )

    def _window(self, ids: Iterable[int], number: int, name: str, start: int) -> Window:
        return Window((*self.before, *ids, *self.after), number, name, start, len(self.before))


def encode(tokenizer: Any, text: str, *, special: bool = False) -> list[int]:
    """A text's tokens. An empty text has none."""
    if not text and not special:
        return []
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def _add_text(digest: Digest, text: str, name: str) -> None:
    try:
        digest.text(text)
    except UnicodeEncodeError as error:
        raise InputError(
            f"{name} has half of a character, U+{ord(text[error.start]):04X}, which no tokenizer "
            "takes. Give the whole character (in JSON both halves), or leave it out."
        ) from error


def _special_tokens(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a tokenizer puts before and after a text."""
    plain, full = encode(tokenizer, "a"), encode(tokenizer, "a", special=True)
    for place in range(len(full) - len(plain) + 1):
        if full[place : place + len(plain)] == plain:
            return tuple(full[:place]), tuple(full[place + len(plain) :])
    return (), ()


def _pieces(text: str | Iterable[str]) -> Iterator[str]:
    """A text in pieces that do not depend on the parts in which it comes."""
    waiting = ""
    for part in _parts(text) if isinstance(text, str) else text:
        waiting += part
        while len(waiting) > _PIECE:
            end = max(waiting.rfind("\n", 0, _PIECE), waiting.rfind(" ", 0, _PIECE) - 1) + 1
            piece, waiting = waiting[: end or _PIECE], waiting[end or _PIECE :]
            yield piece
    if waiting:
        yield waiting


def _parts(text: str) -> Iterator[str]:
    for at in range(0, len(text), _PIECE):
        yield text[at : at + _PIECE]


def _of_texts(texts: Iterable[str | Document]) -> Iterator[Document]:
    for number, text in enumerate(texts):
        if isinstance(text, Document):
            yield text
        elif isinstance(text, str):
            yield Document(f"text {number}", text)
        else:
            raise ArgumentError(
                f"texts must be strings or Documents; number {number} is a {type(text).__name__}."
            )


def _of_path(path: Path, field: str) -> Iterator[Document]:
    if path.is_dir():
        files = sorted(it for it in path.rglob("*") if it.is_file() and not _hidden(it, path))
        if not files:
            raise InputError(
                f"The folder {path} has no files to read. Put UTF-8 text or .jsonl files there."
            )
        for file in files:
            yield from _of_file(file, str(file.relative_to(path)), field)
    elif not path.exists():
        raise InputError(
            f"There is no file or folder {path}. Give a UTF-8 text file, a .jsonl file or a folder "
            "of such files."
        )
    else:
        yield from _of_file(path, path.name, field)


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _of_file(file: Path, name: str, field: str) -> Iterator[Document]:
    if file.suffix.lower() in (".jsonl", ".ndjson"):
        yield from _of_lines(file, name, field)
    else:
        yield Document(name, _text_of(file))


def _text_of(file: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    done = 0
    for content in _contents(file):
        held = len(decoder.getstate()[0])
        try:
            yield decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            raise _no_utf8(f"{file}", done - held + error.start, error) from error
        done += len(content)


def _contents(file: Path) -> Iterator[bytes]:
    """A file's bytes in parts, an empty one last."""
    try:
        with file.open("rb") as opened:
            while content := opened.read(_PIECE):
                yield content
    except OSError as error:
        raise _unreadable(file, error) from error
    yield b""


def _of_lines(file: Path, name: str, field: str) -> Iterator[Document]:
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, 1):
                if line.strip():
                    yield Document(f"{name}:{number}", _of_line(file, number, line, field))
    except OSError as error:
        raise _unreadable(file, error) from error


def _of_line(file: Path, number: int, line: bytes, field: str) -> str:
    place = f"{file}, line {number},"
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise _no_utf8(place, error.start, error) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{place} is no JSON ({error}). Each line must be an object with its text under "
            f"{field!r}."
        ) from error
    if not isinstance(value, dict):
        raise InputError(
            f"{place} is no JSON object but a JSON {_kind(value)}. Each line must be an object "
            f"with its text under {field!r}."
        )
    if field not in value:
        raise InputError(
            f"{place} has no field {field!r}: it has {', '.join(map(repr, value)) or 'none'}. Name "
            "the field that holds the text with field=... (on the command line --field)."
        )
    text = value[field]
    if not isinstance(text, str):
        raise InputError(
            f"{place} holds under {field!r} no text but a JSON {_kind(text)}. Every line must have "
            "a string there."
        )
    return text


def _kind(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _no_utf8(place: str, byte: int, error: UnicodeDecodeError) -> InputError:
    return InputError(
        f"{place} is not UTF-8 text: byte {byte} is 0x{error.object[error.start]:02x}. Convert it, "
        "for example with iconv -f latin1 -t utf-8, or take it out of the corpus."
    )


def _unreadable(file: Path, error: OSError) -> InputError:
    return InputError(f"{file} cannot be read: {(error.strerror or str(error)).lower()}.")
