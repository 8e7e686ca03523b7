"""The text of an inspection: built in or the user's, as tokens; and the token that is chosen."""

from __future__ import annotations

import difflib
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError

SENTENCE = "The cat that chased the mouse sat on the mat because it was tired"
PRONOUN = " it"

# No tokenizer in use needs fewer tokens than this for so many characters of prose.
_CHARACTERS_PER_TOKEN = 8
# Cutting the text can change how the few tokens before the cut are split.
_SPARE_TOKENS = 16


@dataclass(frozen=True)
class Text:
    """A text and where it came from; the first `focus` characters are searched for tokens first."""

    content: str
    source: str
    focus: int = 0


@dataclass(frozen=True)
class Tokens:
    """A text as a model reads it: ids, and each token's own text.

    `start_token` is the text of a token that the tokenizer put before the text, or None; `focus`
    the number of tokens in which a token is looked for first.
    """

    ids: list[int]
    pieces: list[str]
    start_token: str | None
    focus: int


def built_in() -> Text:
    """A sentence with a pronoun, and after it the prose of Python's own documentation.

    In a causal model the sentence reads nothing of what follows it.
    """
    from pydoc_data.topics import topics

    prose = "\n\n".join(topics.values())
    version = ".".join(platform.python_version_tuple()[:2])
    source = f"a built-in sentence, then pydoc_data.topics of Python {version}"
    return Text(f"{SENTENCE}.\n\n{prose}", source, focus=len(SENTENCE))


def from_file(path: Path) -> Text:
    """The text of a UTF-8 file.

    Raises InputError for a file that is missing, cannot be read, is not UTF-8 or has no text.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(
            f"There is no text file {path}. Give the path of a UTF-8 text file, or a text itself "
            "with --prompt."
        ) from error
    except IsADirectoryError as error:
        raise InputError(f"{path} is a folder. Give the path of a UTF-8 text file.") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}. "
            f"If it is a text in another encoding, convert it first, for example with: "
            f"iconv -f latin1 -t utf-8 {path.name}"
        ) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"The text file {path} cannot be read: {reason}.") from error
    if not content.strip():
        raise InputError(f"The text file {path} is empty. Give one with at least a few words.")
    return Text(content, path.name)


def from_prompt(prompt: str) -> Text:
    """A text given as it is. Raises InputError for one without a word, or with half a character."""
    if not prompt.strip():
        raise InputError("The prompt is empty. Give a text of at least a few words.")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        half = ord(prompt[error.start])
        raise InputError(
            f"The prompt is no UTF-8 text: character {error.start} is U+{half:04X}, half of a "
            "character or a byte of another encoding. Give it in UTF-8."
        ) from error
    return Text(prompt, "the prompt")


def tokenize(tokenizer: Any, text: Text, max_tokens: int) -> Tokens:
    """The first `max_tokens` tokens of a text, start token included where the tokenizer adds one.

    Raises InputError for a text of fewer than two tokens.
    """
    length = _CHARACTERS_PER_TOKEN * max_tokens
    ids = _ids(tokenizer, text.content[:length])
    while len(ids) < max_tokens + _SPARE_TOKENS and length < len(text.content):
        length *= 2
        ids = _ids(tokenizer, text.content[:length])
    ids = ids[:max_tokens]
    if len(ids) < 2:
        raise InputError(
            f"The text ({text.source}) is {len(ids)} token long; attention needs at least two to "
            "choose from. Give a longer text."
        )
    pieces = [piece(tokenizer, token) for token in ids]
    plain = _ids(tokenizer, text.content[:_CHARACTERS_PER_TOKEN], special=False)
    added = ids[0] in tokenizer.all_special_ids and plain[:1] != ids[:1]
    focus, characters = int(added), 0
    while characters < text.focus and focus < len(pieces):
        characters += len(pieces[focus])
        focus += 1
    return Tokens(ids, pieces, pieces[0] if added else None, focus if text.focus else 0)


def choose_token(tokens: Tokens, wanted: str | int | None) -> int:
    """The index of the token that is meant.

    An int, or a string of digits, is an index, negative from the end. A string is a token's text:
    the last token that is exactly it, else the last that is it but for spaces around. None is the
    last " it", or the last token of a text without one. In the built-in text the sentence is
    searched before what follows it.

    Raises InputError for an index outside the text, and for a text that is no token.
    """
    if wanted is None:
        found = _find(tokens, PRONOUN)
        return len(tokens.pieces) - 1 if found is None else found
    if isinstance(wanted, int) or re.fullmatch(r"-?\d+", wanted):
        index, length = int(wanted), len(tokens.pieces)
        if not -length <= index < length:
            raise InputError(
                f"There is no token {index}: the text has {length} tokens, 0 to {length - 1}, or "
                f"-{length} to -1 from the end."
            )
        return index % length
    found = _find(tokens, wanted)
    if found is None:
        raise InputError(_no_such_token(tokens.pieces, wanted))
    return found


def _find(tokens: Tokens, wanted: str) -> int | None:
    searched = [tokens.pieces[: tokens.focus], tokens.pieces] if tokens.focus else [tokens.pieces]
    for pieces in searched:
        for same in (str, str.strip):
            places = [i for i, piece in enumerate(pieces) if same(piece) == same(wanted)]
            if places:
                return places[-1]
    return None


def _no_such_token(pieces: Sequence[str], wanted: str) -> str:
    message = f"No token of the text is {wanted!r}."
    joined = "".join(pieces)
    place = joined.rfind(wanted.strip())
    if wanted.strip() and place >= 0:
        parts, end = [], 0
        for index, piece in enumerate(pieces):
            begin, end = end, end + len(piece)
            if end > place and begin < place + len(wanted.strip()):
                parts.append(f"{piece!r} ({index})")
        return (
            f"{message} The text has it as {', '.join(parts)}: name one of these, by its text or "
            "by its index."
        )
    known = {piece.strip().lower(): piece for piece in pieces if piece.strip()}
    near = difflib.get_close_matches(wanted.strip().lower(), known, n=5, cutoff=0.5)
    if near:
        return f"{message} Near to it: {', '.join(repr(known[word]) for word in near)}."
    some = list(dict.fromkeys(piece for piece in pieces if piece.strip()))[:8]
    return f"{message} The text begins with the tokens {', '.join(map(repr, some))}."


def _ids(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids


def piece(tokenizer: Any, token: int) -> str:
    """A token's own text, a leading space included."""
    text: str = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    # SentencePiece marks a word's leading space; decoded alone the word loses it.
    marked = str(tokenizer.convert_ids_to_tokens(token)).startswith("\N{LOWER ONE EIGHTH BLOCK}")
    return f" {text}" if marked and not text.startswith(" ") else text
