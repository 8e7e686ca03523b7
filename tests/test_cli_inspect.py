"""`multihead inspect` as a command: options, streams, the report's line."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")

import random_heads
from multihead.cli import main
from multihead.errors import InputError, ModelError
from multihead.heads import Probes, find_roles
from requires import require
from synthetic import inspection


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asked of the loader and of the inspection, both made up."""
    calls: dict[str, Any] = {}

    def load(name: str, *, dtype: object) -> SimpleNamespace:
        calls.update(name=name, dtype=str(dtype))
        config = SimpleNamespace(num_hidden_layers=30, num_attention_heads=9)
        model = SimpleNamespace(config=config)
        return SimpleNamespace(model=model, tokenizer="tokenizer", facts="facts")

    def inspect_model(model: object, tokenizer: object, **options: Any) -> object:
        calls.update(options)
        options["progress"](1, 30)
        return inspection()

    def render(view: object, path: Path) -> Path:
        path.write_text("page")
        return path

    monkeypatch.setattr("multihead.integrations.load", load)
    monkeypatch.setattr("multihead.heads.inspecting.inspection.inspect_model", inspect_model)
    monkeypatch.setattr("multihead.report.render", render)
    return calls


def test_defaults(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 0
    captured = capsys.readouterr()
    assert "What does this token read?" in captured.out
    assert captured.err == ""
    assert "\x1b" not in captured.out
    assert asked["name"] == "smollm2"
    assert asked["dtype"] == "torch.float32"
    assert asked["max_tokens"] is None
    assert asked["text"] is None
    assert asked["token"] is None
    assert asked["report"] is False


def test_options_reach_the_inspection(asked: dict[str, Any]) -> None:
    options = ["--prompt", "a b", "--token=-1", "--max-tokens", "7", "--dtype", "bfloat16"]
    assert main(["inspect", "model.gguf", *options]) == 0
    assert asked["name"] == "model.gguf"
    assert asked["text"] == "a b"
    assert asked["token"] == "-1"
    assert asked["max_tokens"] == 7
    assert asked["dtype"] == "torch.bfloat16"
    assert main(["inspect", "--text", "some.txt"]) == 0
    assert asked["text"] == Path("some.txt")


def test_json_is_pure(
    asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "heads.html"
    assert main(["inspect", "--json", "--report", str(page)]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["layers"] == 30
    assert len(document["statistics"]["entropy"]) == 30
    assert captured.err == f"Report: {page}\n"


def test_the_report_is_the_last_line(
    asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "heads.html"
    assert main(["inspect", "--report", str(page)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Report: {page}"
    assert page.read_text() == "page"
    assert asked["report"] is True


def test_a_chosen_head(asked: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--head", "l3h8"]) == 0
    assert "Strongest links of L3H8" in capsys.readouterr().out


@pytest.fixture(scope="module")
def probed() -> Any:
    """Roles of a small model, for a command whose model is made up."""
    probes = Probes(length=64, periods=(8, 12))
    return find_roles(random_heads.small("learned", seed=1), probes=probes, seeds=(0,))


def test_roles_on_demand(
    asked: dict[str, Any],
    probed: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def probe(model: object, *, tokenizer: object, progress: Any) -> object:
        assert tokenizer == "tokenizer"
        progress(1, 7)
        return probed

    monkeypatch.setattr("multihead.heads.find_roles", probe)
    assert main(["inspect", "--roles", "--head", "L3H7"]) == 0
    section = capsys.readouterr().out.partition("Which roles do heads have?")[2]
    for name in ("previous token", "induction", "0.20/0.10", "32 heads", "second sink: it needs"):
        assert name in section
    assert "L3H7: none of these roles" in section
    assert max(map(len, section.splitlines())) <= 80
    assert main(["inspect", "--roles", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["roles"] == probed.to_json()
    assert main(["inspect", "--json"]) == 0
    assert "roles" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--head", "3.8"], "L3H8"),
        (["--head", "L30H0"], "L29"),
        (["--head", "L0H9"], "H8"),
        (["--prompt", "a", "--text", "b"], "--text and --prompt"),
        (["--report", "/"], "is a folder"),
        (["--report", "/no/such/folder/x.html"], "no folder /no/such/folder"),
    ],
)
def test_options_that_cannot_be_used(
    options: list[str],
    named: str,
    asked: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert captured.err.count("\n") == 1
    assert "max_tokens" not in asked


@pytest.mark.parametrize(
    ("error", "status"), [(InputError("no such token"), 2), (ModelError("odd"), 1)]
)
def test_failures_leave_stdout_empty(
    error: Exception,
    status: int,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("multihead.heads.inspecting.inspection.inspect_model", fail)
    assert main(["inspect", "--json"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"multihead: {error}\n"


@pytest.mark.slow
def test_a_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    require("models")
    prompt = "The cat that chased the mouse sat on the mat because it was tired"
    assert main(["inspect", "--prompt", prompt, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["layers"] * document["heads"] == 270
    assert document["token"]["text"] == " it"
    assert document["cost"]["parameters_total"] == 134515008
    first = [keys[0] for layer in document["token"]["top_keys"] for keys in layer]
    assert len(set(first)) > 5
