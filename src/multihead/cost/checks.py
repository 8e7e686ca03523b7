"""Checks that the descriptions and the counts share."""

from __future__ import annotations

from collections.abc import Iterable

from multihead.errors import ArgumentError


def check_counts(**counts: int) -> None:
    """Raise ArgumentError unless every value is an integer, zero or more."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ArgumentError(f"{name} must be an integer, got {value!r}.")
        if value < 0:
            raise ArgumentError(f"{name} must be 0 or more, got {value}.")


def check_sizes(**sizes: int) -> None:
    """Raise ArgumentError unless every value is an integer, one or more."""
    check_counts(**sizes)
    for name, value in sizes.items():
        if value == 0:
            raise ArgumentError(f"{name} must be 1 or more, got 0.")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ArgumentError unless `value` is one of `choices`."""
    known = tuple(choices)
    if value not in known:
        raise ArgumentError(f"{name} must be one of {', '.join(known)}; got {value!r}.")
