"""Text of a model's tokens, made safe and visible for a terminal.

Tokens come from any text: they may hold spaces, newlines, escape sequences, characters that
reverse the direction of writing, wide characters, or halves of characters. What is shown is one
line, changes nothing about the terminal, and is measured in terminal cells.
"""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len, set_cell_size

SPACE, NEWLINE, TAB = "·", "⏎", "⇥"
_ELLIPSIS = "…"
_NAMED = {"\n": NEWLINE, "\t": TAB}
# Controls, formats (direction, joiners), halves of pairs, private use, unassigned, separators.
_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_COMBINING = {"Mn", "Me"}


def visible(text: str, *, spaces: bool = True) -> str:
    """One printable line for `text`: a space is `·` (kept when not `spaces`), a newline `⏎`."""
    if not text:
        return "(empty)"
    shown = "".join(_visible_character(c, spaces) for c in text)
    # A mark that joins the character before it would join the table instead.
    return "◌" + shown if unicodedata.category(text[0]) in _COMBINING else shown


def _visible_character(character: str, spaces: bool) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if character == " ":
        return SPACE if spaces else character
    category = unicodedata.category(character)
    if category == "Zs":
        return SPACE if spaces else " "
    if category in _UNSAFE:
        return ascii(character)[1:-1]
    return character


def printable(text: str) -> str:
    """`text` as it may go to a terminal: lines and tabs stay, what would command it is spelled out.

    Joiners stay too: emoji and several scripts need them.
    """
    return "".join(
        c if c in "\n\t\u200c\u200d" else _visible_character(c, spaces=False) for c in text
    )


def fit(text: str, width: int) -> str:
    """`text` in at most `width` terminal cells, the end cut and marked with an ellipsis."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, max(width - 1, 0)).rstrip(" ") + _ELLIPSIS[: max(width, 0)]


def fit_left(text: str, width: int) -> str:
    """Like `fit`, but the beginning is cut."""
    if cell_len(text) <= width:
        return text
    start = len(text)
    room = width - 1
    while start and (room := room - cell_len(text[start - 1])) >= 0:
        start -= 1
    return _ELLIPSIS[: max(width, 0)] + text[start:]
