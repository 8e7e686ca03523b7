"""What the parts of the terminal output share: widths, headings, colors."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDEST = 200
INDENT = 2

HEAD = "bold cyan"
TOKEN = "bold"
BAR = "cyan"
QUIET = "dim"

_BETWEEN = " · "

# Viridis in ten steps: even in lightness, so that order survives color blindness and gray.
RAMP = (
    ("#440154", "#ffffff"),
    ("#482878", "#ffffff"),
    ("#3e4989", "#ffffff"),
    ("#31688e", "#ffffff"),
    ("#26828e", "#ffffff"),
    ("#1f9e89", "#000000"),
    ("#35b779", "#000000"),
    ("#6ece58", "#000000"),
    ("#b5de2b", "#000000"),
    ("#fde725", "#000000"),
)


def room(console: Console) -> int:
    """Columns to fill, the indent taken off: never more than people read across."""
    return min(console.width, WIDEST) - INDENT


def show(console: Console, what: Text | Table | str) -> None:
    """Print `what` under the common indent; a string is text, never markup."""
    content = Text(what) if isinstance(what, str) else what
    console.print(Padding(content, (0, 0, 0, INDENT), expand=False))


def flow(parts: Iterable[str], width: int) -> str:
    """Parts on lines of `width` cells that break between parts; a part too long alone overflows."""
    lines: list[str] = []
    for part in parts:
        if lines and cell_len(lines[-1]) + len(_BETWEEN) + cell_len(part) <= width:
            lines[-1] += _BETWEEN + part
        else:
            lines.append(part)
    return "\n".join(lines)


def print_question(console: Console, question: str) -> None:
    """A section's heading."""
    console.print()
    console.print(Text(question, style="bold underline"))
    console.print()


def plain_table(**options: object) -> Table:
    """A table without a frame, its columns two cells apart."""
    return Table(
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        header_style=QUIET,
        **options,  # type: ignore[arg-type]
    )


def head_name(layer: int, head: int) -> str:
    """A head's name, as the command line takes it: L3H8."""
    return f"L{layer}H{head}"


def ramp_style(level: int) -> str:
    """The style of one of the ten steps, 0 to 9."""
    background, foreground = RAMP[level]
    return f"{foreground} on {background}"
