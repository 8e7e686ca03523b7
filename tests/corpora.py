"""A tokenizer of single characters, and corpora of several documents for tests of `read_corpus`."""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 101
START, END = 1, 2
_FIRST = 3  # ids below are special


class Characters:
    """One token a character; `special` puts a start before and an end after a text."""

    def __init__(self, *, special: bool = False) -> None:
        self.all_special_ids = [START, END] if special else []

    def __call__(self, text, *, add_special_tokens=True, verbose=True):
        ids = [_FIRST + ord(character) % (VOCABULARY - _FIRST) for character in text]
        if add_special_tokens and self.all_special_ids:
            ids = [START, *ids, END]
        return {"input_ids": ids}

    def decode(self, ids, **_):
        return "".join({START: "<s>", END: "</s>"}.get(it, chr(it - _FIRST + 98)) for it in ids)

    def convert_ids_to_tokens(self, token):
        return self.decode([token])


TEXTS = (
    "the cat sat on the mat and the dog sat on the log, " * 3,
    "",
    "a quick brown fox jumps over it " * 2,
    "x",
    "pack my box with five dozen jugs of liquor; " * 5,
)


def write_lines(path: Path, texts=TEXTS, field="text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path
