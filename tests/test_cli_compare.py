"""`multihead inspect --compare`: two small models on one text, head by head."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

import families
import multihead as mh
from multihead import heads as heads_of
from multihead.cli import main
from requires import require

TEXT = "abcdefgh ijklmnop qrstuvwx"


class Letters:
    """A tokenizer that has a token for each letter."""

    all_special_ids = ()

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % 90 for letter in text]}

    def decode(self, ids: list[int], **_: object) -> str:
        return chr(ids[0])

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Models by name, for the loader."""
    require("models")
    one, other = families.build("llama"), families.build("llama")
    with torch.no_grad():
        for parameter in other.model.layers[1].self_attn.q_proj.parameters():
            parameter[:10] *= 4.0  # head 0 of layer 1
    found = {"one": one, "other": other, "gpt2": families.build("gpt2")}

    def load(name: str, *, dtype: torch.dtype) -> SimpleNamespace:
        return SimpleNamespace(model=found[name].to(dtype), tokenizer=Letters())

    monkeypatch.setattr("multihead.integrations.load", load)
    return found


def record(model: Any) -> heads_of.HeadRecord:
    with torch.no_grad(), mh.watch(model) as heads:
        model(torch.tensor([Letters()(TEXT)["input_ids"]]))
    return heads.record()


OPTIONS = ["--prompt", TEXT, "--max-tokens", "40"]


def test_json(models: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "one", "--compare", "other", *OPTIONS, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    wanted = record(models["one"]).compare(record(models["other"]))
    assert len(document["differences"]) == len(wanted) == 2 * 6 * len(heads_of.STATISTICS)
    for found, it in zip(document["differences"], wanted, strict=True):
        assert (found["layer"], found["head"], found["statistic"]) == (
            it.layer,
            it.head,
            it.statistic,
        )
        assert found["difference"] == pytest.approx(it.difference, rel=1e-6)
    moved = {(it["layer"], it["head"]) for it in document["differences"] if it["difference"]}
    assert moved == {(1, 0)}
    assert document["here"]["tokens"] == document["there"]["tokens"] == len(TEXT)
    assert document["here"]["one_text"] is True


@pytest.mark.parametrize("columns", [80, 200])
def test_terminal(
    models: dict[str, Any],
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["inspect", "one", "--compare", "other", *OPTIONS]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "here  one: 26 tokens of one text, float32, " in captured.out
    changes = captured.out.partition("Largest changes")[2]
    assert "L1H0" in changes
    assert "L0H" not in captured.out
    assert max(map(len, captured.out.splitlines())) <= columns


def test_a_model_and_itself(models: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "one", "--compare", "one", *OPTIONS]) == 0
    assert "No head differs in any statistic." in capsys.readouterr().out


@pytest.mark.parametrize("names", [("one", "other"), ("other", "one")])
def test_a_model_and_what_pruning_left_of_it(
    models: dict[str, Any], names: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    gone = {(0, 3), (0, 4), (0, 5)}
    heads_of.prune(models["other"], gone)
    assert main(["inspect", names[0], "--compare", names[1], *OPTIONS, "--json"]) == 0
    differences = json.loads(capsys.readouterr().out)["differences"]
    compared = {(it["layer"], it["head"]) for it in differences}
    assert compared == {(layer, head) for layer in range(2) for head in range(6)} - gone


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["gpt2"], "one has 2 layers of 6 heads and gpt2 has 2 layers of 3."),
        (["other", "--roles"], "--roles is about one model; --compare has two."),
        (["other", "--head", "L0H0"], "--head is about one model"),
        (["other", "--report", "x.html"], "--report is about one model"),
        (["other", "--sort", "entropy"], "--sort is about one model"),
        (["other", "--token", "a"], "--token is about one model"),
        (["other", "--text", "b"], "--text and --prompt"),
    ],
)
def test_refusals(
    models: dict[str, Any],
    options: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", "one", "--compare", *options, *OPTIONS]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert captured.err.count("\n") == 1


def test_more_tokens_than_positions(
    models: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["inspect", "gpt2", "--compare", "gpt2", "--prompt", 4 * TEXT]
    assert main([*options, "--max-tokens", "62"]) == 2
    assert "but gpt2 has 61 positions. Ask for 61 or fewer." in capsys.readouterr().err
    assert main(options) == 0
    assert capsys.readouterr().out.count("gpt2: 61 tokens of one text") == 2
