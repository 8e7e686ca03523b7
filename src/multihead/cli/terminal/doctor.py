"""Doctor's findings as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from multihead.cli.numbers import short_bytes
from multihead.cli.terminal.style import INDENT, QUIET, plain_table, show

_GOOD, _BAD = ("yes", "green"), ("no", "bold yellow")
_WORD, _NAME = 3, 12


def print_findings(console: Console, findings: Mapping[str, Any]) -> None:
    """Print what `examine` found, what is missing and the sentence that mends it."""
    console.print(Text(f"multihead {findings['versions']['multihead']}", style="bold"))
    _print_machine(console, findings)
    _heading(console, "Native kernels")
    _print_native(console, findings["native"])
    for dtype, backends in findings["backends"].items():
        _heading(console, f"Backends for {dtype} on the CPU")
        _print_backends(console, backends)
    _heading(console, "Extras")
    for extra in findings["extras"]:
        missing = f"{' and '.join(extra['problems'])}. Install with: {extra['install']}"
        _answer(
            console,
            not extra["problems"],
            extra["name"],
            missing if extra["problems"] else " and ".join(extra["packages"]),
        )
    _heading(console, "Sample model")
    model = findings["sample_model"]
    found = model["problem"] or f"{model['file']} ({short_bytes(model['bytes'])})"
    _answer(console, not model["problem"], model["name"], found)


def _print_machine(console: Console, findings: Mapping[str, Any]) -> None:
    table = plain_table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, found in findings["versions"].items():
        if name != "multihead":
            table.add_row(name, Text(found) if found else Text("not installed", style=QUIET))
    table.add_row("system", Text(findings["system"]))
    table.add_row("processor", Text(findings["processor"]))
    threads, usable = findings["threads"], findings["usable_processors"]
    table.add_row("threads", f"{threads}, on {usable} usable processors")
    show(console, table)


def _print_native(console: Console, native: Mapping[str, Any]) -> None:
    if native["problem"]:
        _answer(console, False, "native", native["problem"])
    else:
        _answer(console, True, "native", f"built with {native['build']}")
    if native["built_sets"]:
        _detail(console, f"instruction sets: {', '.join(native['built_sets'])}")
    if native["sets_left_out"]:
        left_out = ", ".join(native["sets_left_out"])
        _detail(console, f"left out: {left_out}, unknown to the compiler (GCC 11 knows all)")
    if native["instruction_sets"]:
        _detail(console, f"can run here: {', '.join(native['instruction_sets'])}")
    if native["chosen"]:
        chosen = ", ".join(f"{name} for {dtype}" for dtype, name in native["chosen"].items())
        by = "as MULTIHEAD_ISA asks" if native["requested"] else "MULTIHEAD_ISA names another"
        _detail(console, f"used: {chosen} ({by})")


def _print_backends(console: Console, backends: list[Mapping[str, Any]]) -> None:
    for backend in backends:
        remark = " ".join(backend["reasons"])
        if backend["chosen"]:
            remark = "serves unless another is named"
        elif not remark:
            remark = "can serve"
        _answer(console, not backend["reasons"], backend["name"], remark)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _detail(console: Console, text: str) -> None:
    """A line under the words of an answer."""
    console.print(Padding(Text(text), (0, 0, 0, INDENT + _WORD + _NAME + 4)))


def _answer(console: Console, good: bool, name: str, text: str) -> None:
    """One line: yes or no, of what, and the words to it."""
    table = plain_table(show_header=False)
    table.add_column(no_wrap=True, min_width=_WORD)
    table.add_column(no_wrap=True, min_width=_NAME)
    table.add_column(overflow="fold")
    word, style = _GOOD if good else _BAD
    table.add_row(Text(word, style=style), Text(name), Text(text))
    show(console, table)
