"""The `multihead` command: looks into models from the terminal.

Importing this package, or `multihead.cli.main`, needs neither typer nor rich; running it does.
"""

from multihead.cli.main import main

__all__ = ["main"]
