"""The commands and their options, a file each, in the order of `--help`.

What a command needs is imported when it runs, not for `--help`.
"""

# isort: off
from multihead.cli.commands.inspect import inspect
from multihead.cli.commands.generate import generate
from multihead.cli.commands.prune import prune
from multihead.cli.commands.doctor import doctor
from multihead.cli.commands.cost import cost
from multihead.cli.commands.bench import bench

# isort: on
from multihead.cli.app import app

__all__ = ["app", "bench", "cost", "doctor", "generate", "inspect", "prune"]
