"""Checkpoints of other libraries: their names and layouts against ours, either way.

Pure mappings: nothing is read from a disk here, and no library of theirs is needed.
"""

from .families import (
    MODEL_TYPES,
    Config,
    Model,
    build,
    from_checkpoint,
    read_config,
    to_checkpoint,
    write_config,
)

__all__ = [
    "MODEL_TYPES",
    "Config",
    "Model",
    "build",
    "from_checkpoint",
    "read_config",
    "to_checkpoint",
    "write_config",
]
