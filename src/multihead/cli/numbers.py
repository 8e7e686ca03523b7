"""Numbers as a person reads them."""

from __future__ import annotations

import math

_COUNT_UNITS = ("", " k", " M", " G", " T", " P", " E")
_BYTE_UNITS = (" B", " kB", " MB", " GB", " TB", " PB", " EB")
_EIGHTHS = " ▏▎▍▌▋▊▉"


def short_count(value: float) -> str:
    """Three digits and a decimal unit: 134515008 is "135 M"."""
    return _scaled(value, _COUNT_UNITS)


def short_bytes(value: float) -> str:
    """Three digits and a decimal unit: 34359738368 is "34.4 GB"."""
    return _scaled(value, _BYTE_UNITS)


def _scaled(value: float, units: tuple[str, ...]) -> str:
    scaled, unit = float(value), 0
    while scaled >= 999.5 and unit < len(units) - 1:
        scaled, unit = scaled / 1000, unit + 1
    if unit == 0:
        return f"{scaled:.0f}{units[0]}"
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{digits}f}{units[unit]}"


def weight(value: float) -> str:
    """An attention weight with two decimals, never rounded to a false 0 or 1."""
    if math.isnan(value):
        return "-"
    if 0 < value < 0.005:
        return "<.01"
    if 0.995 <= value < 1:
        return ">.99"
    return f"{value:.2f}"


def measure(value: float) -> str:
    """A distance, a logit or a count of keys in at most five characters."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    size = abs(value)
    if size < 9.95:
        return f"{value:.1f}"
    return f"{value:.0f}" if size < 99999.5 else f"{value:.0e}"


def seconds(value: float) -> str:
    """Seconds with a decimal below a minute, minutes above."""
    return f"{value:.1f} s" if value < 59.95 else f"{int(value // 60)} min {value % 60:.0f} s"


def rate(value: float) -> str:
    """Things a second in three digits: "8.42", "84.2", "842"."""
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"


def bar(share: float, width: int) -> str:
    """A bar of `width` cells, `share` of it filled to an eighth of a cell."""
    if math.isnan(share):
        return " " * width
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)
