"""An inspection on the terminal: header, one token's readers, the heads, provenance."""

from multihead.cli.terminal.inspection import print_inspection

__all__ = ["print_inspection"]
