"""An inspection on the terminal: header, one token's readers, the heads, roles, provenance."""

from multihead.cli.terminal.inspection import print_inspection
from multihead.cli.terminal.roles import print_roles

__all__ = ["print_inspection", "print_roles"]
