"""Which roles heads have, with score, control and what passes by chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from multihead.cli.terminal.style import (
    HEAD,
    QUIET,
    head_name,
    plain_table,
    print_question,
    room,
    show,
)

if TYPE_CHECKING:
    from multihead.heads import Role, Roles

# Cells of the columns beside the strongest heads, and of one of these.
_OTHER_COLUMNS, _ONE_HEAD = 50, 18


def print_roles(console: Console, roles: Roles, head: tuple[int, int] | None = None) -> None:
    """Print how many heads have each role, the strongest of them, and those of `head`."""
    print_question(console, "Which roles do heads have?")
    table = plain_table()
    table.add_column("role", no_wrap=True)
    for name in ("heads", "asks", "chance", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("strongest: score/control", no_wrap=True)
    count = max(1, (room(console) - _OTHER_COLUMNS) // _ONE_HEAD)
    for name, score in roles.scores.items():
        found = roles.having(name)
        table.add_row(
            name.replace("_", " "),
            str(len(found)),
            roles.asks(name),
            roles.by_chance(name),
            str(score.n),
            _strongest(found[:count]),
        )
    show(console, table)
    console.print()
    for line in roles.notes():
        show(console, Text(line, style=QUIET))
    if head is not None:
        console.print()
        held = roles.of(*head)
        what = "; ".join(f"{role} (n = {role.n})" for role in held) or "none of these roles"
        show(console, Text.assemble((head_name(*head), HEAD), f": {what}"))


def _strongest(found: list[tuple[int, int, Role]]) -> Text:
    parts = Text("  ").join(
        Text.assemble((head_name(layer, head), HEAD), f" {role.score:.2f}/{role.control:.2f}")
        for layer, head, role in found
    )
    return parts if found else Text("none", style=QUIET)
