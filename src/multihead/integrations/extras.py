"""Optional packages: imported where they are needed, missed in one sentence."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import MissingExtraError

# The first release that calls mask functions with lengths and offsets.
_OLDEST_TRANSFORMERS = (5, 4)


def import_extra(name: str) -> Any:
    """The module `name` of a package that the extra `transformers` brings.

    Raises:
        MissingExtraError: the package is absent, or is a transformers older than 5.4.
    """
    package = name.partition(".")[0]
    try:
        root = import_module(package)
        if package == "transformers":
            _check_version(root.__version__)
        return import_module(name)
    except MissingExtraError:
        raise
    except ImportError as error:
        raise MissingExtraError(
            f"This needs the package {package}, which cannot be imported ({error}). "
            "Install it with: pip install 'multihead[transformers]'"
        ) from error


def _check_version(found: str) -> None:
    if tuple(int(part) for part in found.split(".")[:2]) < _OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, _OLDEST_TRANSFORMERS))
        raise MissingExtraError(
            f"multihead needs transformers {oldest} or newer; {found} is installed. "
            "Upgrade it with: pip install -U 'multihead[transformers]'"
        )
