"""Progress of long work, on stderr, and only where a person watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from multihead.cli.output import stderr_console

Advance = Callable[[str, float], None]
"""Called with what is being done now and the share of all work that is done, 0 to 1."""


@contextmanager
def progress() -> Iterator[Advance]:
    """A bar that vanishes at the end; silent where stderr is no terminal."""
    console = stderr_console()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as it:
        task = it.add_task("starting", total=1.0)

        def advance(what: str, share: float) -> None:
            it.update(task, description=what, completed=share)

        yield advance
