"""Run pytest on another build of the extension: `python with_extension.py FILE PYTEST-ARGUMENTS`.

Another build needs a process of its own: a process loads the extension once.
"""

import importlib.util
import sys

import pytest


def load(path: str) -> None:
    """Make the file at `path` the extension of this process."""
    spec = importlib.util.spec_from_file_location("multihead._native", path)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    sys.modules[spec.name] = extension


if __name__ == "__main__":
    load(sys.argv[1])
    sys.exit(pytest.main(sys.argv[2:]))
