"""The whole of `multihead inspect` on the terminal, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from multihead.cli.statistics import StatisticName
from multihead.cli.terminal.grid import print_grid
from multihead.cli.terminal.header import print_header
from multihead.cli.terminal.links import print_links
from multihead.cli.terminal.provenance import print_provenance
from multihead.cli.terminal.ranking import print_ranking
from multihead.cli.terminal.readers import print_readers
from multihead.cli.terminal.style import print_question

if TYPE_CHECKING:
    from multihead.heads.inspecting.inspection import Inspection


def print_inspection(
    console: Console,
    inspection: Inspection,
    *,
    sort: StatisticName,
    head: tuple[int, int] | None = None,
) -> None:
    """Print `inspection`: what was read, what a token reads, what each head does.

    `sort` colors the grid and ranks the table; `head` (layer, head) is the one whose links are
    shown, chosen by a stated rule when None.
    """
    print_header(console, inspection)
    print_question(console, "What does this token read?")
    print_readers(console, inspection)
    print_question(console, "What does this head do?")
    print_grid(console, inspection, sort)
    print_ranking(console, inspection, sort)
    print_links(console, inspection, head)
    print_provenance(console, inspection)
