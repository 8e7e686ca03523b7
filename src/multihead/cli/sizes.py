"""Counts and bytes as the command line takes them, and bytes as it writes them."""

from __future__ import annotations

import re
from fractions import Fraction

from multihead.errors import InputError

# 128k tokens are 131,072 wherever models are described.
_COUNT_FACTORS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_BYTE_FACTORS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def parse_count(text: str, option: str) -> int:
    """A whole number above 0: "4096", "128k" (131,072) or "1m" (1,048,576).

    Raises InputError, naming the option, for anything else.
    """
    match = re.fullmatch(r"(\d[\d_,]*)([kmg]?)", text.strip().lower(), flags=re.ASCII)
    if match:
        _check_digits(text, option)
    value = int(re.sub("[_,]", "", match[1])) * _COUNT_FACTORS[match[2]] if match else 0
    if value < 1:
        raise InputError(
            f"{option} {text!r} is no whole number above 0. Write 4096, 4k (4,096) or 1m "
            "(1,048,576)."
        )
    return value


def parse_bytes(text: str, option: str) -> int:
    """Bytes: "24GiB" (2^30 each) or "24GB" (10^9 each), also with KiB, MiB, TiB and so on.

    Raises InputError, naming the option, for anything else, a bare "24G" included.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b)", text.strip().lower(), flags=re.ASCII)
    if match is None or match[2] not in _BYTE_FACTORS:
        raise InputError(
            f"{option} {text!r} is no number of bytes. Write its unit in full: 24GiB (2^30 bytes "
            "each) or 24GB (10^9 each)."
        )
    _check_digits(text, option)
    return int(Fraction(match[1]) * _BYTE_FACTORS[match[2]])


def _check_digits(text: str, option: str) -> None:
    """So many are far above any model, and far below where floats of their products end."""
    if sum(map(str.isdigit, text)) > 18:
        raise InputError(f"{option} {text[:24]!r}... has more than 18 digits; shorten it.")


def binary_bytes(value: float) -> str:
    """Three digits and a binary unit: 34359738368 is "32.0 GiB"."""
    scaled, unit = float(value), 0
    while scaled >= 1023.5 and unit < len(_BINARY_UNITS) - 1:
        scaled, unit = scaled / 1024, unit + 1
    if unit == 0:
        return f"{scaled:.0f} B"
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{digits}f} {_BINARY_UNITS[unit]}"


def short_tokens(value: int) -> str:
    """A count of tokens, short where it is whole: 131072 is "128k", 1000 stays "1,000"."""
    for factor, unit in ((2**20, "m"), (2**10, "k")):
        if value >= factor and value % factor == 0:
            return f"{value // factor}{unit}"
    return f"{value:,}"


def duration(seconds: float) -> str:
    """Three digits and a unit of time: "84.2 µs", "1.20 s", "3.1 h"."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 99.95:
        return f"{seconds / 60:.1f} min"
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns")):
        scaled = seconds * factor
        if scaled >= 0.9995 or unit == "ns":
            digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{digits}f} {unit}"
    raise AssertionError
