"""README's code does what it says, its commands exist, and its links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch
from typer.main import get_command

from multihead.cli.commands import app
from requires import require

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language; "" for those without one, which are commands."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [text for name, text in fenced if name == language]


@pytest.mark.slow
def test_the_code_runs_from_top_to_bottom() -> None:
    require("models")
    namespace: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    out, record = namespace["out"], namespace["record"]
    assert out.shape == (2, 1000, 512)
    assert torch.isfinite(out).all()
    assert record.statistics["entropy"].shape == (30, 9)
    assert namespace["written"].attribution([3], rows=[-1]).shape == (30, 9, 1, 1)
    assert all(namespace["texts"])


def test_the_tour_has_as_many_lines_as_it_says() -> None:
    (tour,) = re.findall(r"^## In 25 lines\n+```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert len([line for line in tour.splitlines() if line and line[0] != "#"]) <= 25


def test_its_commands_exist() -> None:
    known = get_command(app).commands
    lines = [line for block in blocks("") for line in block.splitlines()]
    called = [line.split("#")[0].split() for line in lines if line.startswith("multihead ")]
    assert len(called) > 5
    for _, name, *words in called:
        options = {option for it in known[name].params for option in it.opts}
        given = {word for word in words if word.startswith("--") and len(word) > 2}
        assert given <= options, f"multihead {name} has no {given - options}"


def test_its_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(links) > 5
    for link in links:
        assert link.startswith("http") or (ROOT / link).exists(), link
