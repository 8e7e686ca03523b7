"""The fields of a model's config, whether an object of transformers or what a config.json holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multihead.errors import ArgumentError

_ABSENT = object()

SLIDING, FULL = "sliding_attention", "full_attention"


class Fields:
    """Read-only access by name; `defaults` stand in for what a config.json leaves out.

    A config.json holds what differs from its class's defaults, so a family passes those of its
    own that differ from what the absence of a field means elsewhere.
    """

    def __init__(self, config: object, defaults: Mapping[str, Any] | None = None) -> None:
        self._config = config
        self._defaults = dict(defaults or {})

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """The same fields on top of these defaults."""
        return Fields(self._config, defaults)

    def get(self, name: str, default: Any = None) -> Any:
        """The field, else the family's default, else `default`."""
        if isinstance(self._config, Mapping):
            found = self._config.get(name, _ABSENT)
        else:
            found = getattr(self._config, name, _ABSENT)
        if found is not _ABSENT:
            return found
        return self._defaults.get(name, default)

    def size(self, *names: str) -> int:
        """The first of these fields that is there, a positive integer.

        Raises ArgumentError where none is, or where it is no positive integer.
        """
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(
                    f"The config's {name} must be a positive integer, got {value!r}."
                )
            return value
        raise ArgumentError(
            f"The config has no {' or '.join(names)}, so what the model costs cannot be counted."
        )

    def size_or(self, name: str, default: int) -> int:
        """The field, or `default` where it is absent or null."""
        return default if self.get(name) is None else self.size(name)

    def size_or_none(self, name: str) -> int | None:
        """The field, or None where it is absent or null."""
        return None if self.get(name) is None else self.size(name)

    def count_or(self, name: str, default: int) -> int:
        """The field, an integer from 0 on, or `default` where it is absent or null."""
        return 0 if self.get(name) == 0 else self.size_or(name, default)

    def listed(self, name: str) -> list[Any] | None:
        """The field as a list, or None where it is absent or null.

        Raises ArgumentError where it is no list.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise ArgumentError(f"The config's {name} must be a list, got {value!r}.")
        return list(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """The field as a truth value."""
        return bool(self.get(name, default))

    def refuse(self, **plain: object) -> None:
        """Raise ArgumentError where a field is set to anything but its plain value."""
        for name, value in plain.items():
            found = self.get(name, value)
            if found != value and (found or value):
                raise ArgumentError(
                    f"The config sets {name} to {found!r}; only models with {name} "
                    f"{value!r} are counted."
                )

    def layer_types(self, layers: int) -> list[str] | None:
        """The kind of each layer's attention where the config lists it.

        Raises ArgumentError for a list of another length, or a kind that is not counted.
        """
        given = self.listed("layer_types")
        if given is None:
            return None
        kinds = [str(kind) for kind in given]
        if len(kinds) != layers:
            raise ArgumentError(
                f"The config lists {len(kinds)} layer_types for {layers} layers; they must be one "
                "a layer."
            )
        for kind in kinds:
            if kind not in (SLIDING, FULL):
                raise ArgumentError(
                    f"The config has layers of type {kind!r}; only {FULL} and {SLIDING} are "
                    "counted."
                )
        return kinds
