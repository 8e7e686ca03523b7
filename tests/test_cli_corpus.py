"""`multihead inspect` over a corpus: options, streams, the kept record, what is printed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("typer")
pytest.importorskip("safetensors")

import tiny
from corpora import TEXTS, Characters, write_lines
from multihead.cli import main
from multihead.cli.kept import is_kept
from multihead.cli.terminal.corpus import in_context
from multihead.errors import InputError
from multihead.heads import CorpusRecord, Link, read_corpus

LINES = "lines.jsonl"


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the command asked of the loader, which gives a tiny model; and a corpus."""
    asked: list[str] = []

    def load(name: str, *, dtype: object) -> SimpleNamespace:
        asked.append(f"{name} {dtype}")
        model = tiny.language_model()
        sizes = SimpleNamespace(num_hidden_layers=2, num_attention_heads=6)
        model.config = SimpleNamespace(**vars(model.config), **vars(sizes))
        return SimpleNamespace(
            model=model, tokenizer=Characters(), facts=SimpleNamespace(name="tiny model")
        )

    monkeypatch.setattr("multihead.integrations.load", load)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / LINES)
    return asked


def inspect(*options: object) -> int:
    return main(["inspect", "tiny", "--context", "23", *map(str, options)])


@pytest.mark.parametrize("columns", [80, 200])
def test_what_is_printed(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert inspect("--text", LINES, "--head", "L1H3") == 0
    captured = capsys.readouterr()
    shown = captured.out
    tokens = sum(map(len, TEXTS)) - 1
    assert "tiny model" in shown
    assert f"read {tokens} tokens of 3 documents, in 20 windows of at most 23" in shown
    assert "1,048,576 tokens were asked for: the corpus has no more" in shown
    assert "What does L1H3 do?" in shown
    assert "Strongest links of L1H3" in shown
    assert "one text" not in shown
    assert (f"{LINES}:1" in shown) == (columns == 200)
    assert max(map(len, shown.splitlines())) <= columns
    assert "\x1b" not in shown
    assert captured.err == ""


def test_one_text_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text(TEXTS[0])
    assert inspect("--text", "text.txt", "--tokens", "60") == 0
    shown = capsys.readouterr().out
    assert "read 60 tokens of one text, in 3 windows" in shown
    assert "need not be what it does elsewhere" in shown
    assert "no more" not in shown


def test_a_corpus_that_goes_on_is_not_said_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The last token that was asked for would be a window of its own."""
    assert inspect("--text", LINES, "--tokens", "24") == 0
    shown = capsys.readouterr().out
    assert "read 23 tokens" in shown
    assert "no more" not in shown


def test_json_is_pure_and_that_of_the_record(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("--text", LINES, "--json", "--out", "kept.safetensors") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    record = CorpusRecord.load("kept.safetensors")
    assert document["sha256"] == record.facts.sha256
    assert len(document["heads"]) == 12
    link = document["heads"][7]["strongest"][0]
    assert link == vars(record.strongest_links(1, 1)[0])
    assert captured.err == "Corpus record: kept.safetensors\n"
    assert not document["one_text"]


def test_what_was_kept_is_shown_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("--text", LINES, "--out", "kept", "--head", "L1H3") == 0
    first = capsys.readouterr().out
    Path(LINES).unlink()
    assert main(["inspect", "kept", "--head", "L1H3"]) == 0
    assert capsys.readouterr().out == first.removesuffix("Corpus record: kept\n")
    assert main(["inspect", "kept", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["sha256"] == CorpusRecord.load("kept").facts.sha256


def test_what_was_kept_is_set_beside_another(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect("--text", LINES, "--out", "one.safetensors") == 0
    write_lines(Path(LINES), TEXTS[:2])
    assert inspect("--text", LINES, "--out", "two.safetensors") == 0
    capsys.readouterr()
    one, two = (CorpusRecord.load(f"{name}.safetensors").heads for name in ("one", "two"))
    assert main(["inspect", "one.safetensors", "--compare", "two.safetensors"]) == 0
    shown = capsys.readouterr().out
    assert f"{one.tokens:,} tokens of 3 texts" in shown
    assert f"{two.tokens:,} tokens of one text" in shown
    assert main(["inspect", "one.safetensors", "--compare", "two.safetensors", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["differences"]) == len(one.compare(two))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kept", "--text", LINES], "--text is for reading"),
        (["kept", "--dtype", "bfloat16"], "--dtype is for reading"),
        (["kept", "--roles"], "--roles is for reading"),
        (["kept", "--out", "again"], "--out is for reading"),
        (["kept", "--head", "L9H0"], "no head L9H0 in tiny model: it has 2 layers of 6 heads"),
        (["kept", "--compare", "smollm2"], "a record is compared with another one"),
        (["kept", "--compare", "kept", "--head", "L1H3"], "--compare has two"),
        (["tiny", "--compare", "kept"], "--compare kept is a record"),
        (["kept", "--compare", "other"], "differ in their layers or heads"),
        (["absent.safetensors"], "no file absent.safetensors"),
        ([LINES], "cannot be read|is no "),
    ],
)
def test_what_a_record_cannot_answer(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspect("--text", LINES, "--out", "kept") == 0
    record = CorpusRecord.load("kept")
    replace(record, heads=replace(record.heads, layers=("one", "two"))).save("other")
    capsys.readouterr()
    assert main(["inspect", *arguments]) == 2
    captured = capsys.readouterr()
    assert re.search(message, " ".join(captured.err.split())), captured.err
    assert captured.out == ""


def test_a_model_is_no_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, content in (("smollm2", b"notes"), ("sha256-1", b"GGUF\3\0\0\0"), ("kept", b"some")):
        Path(name).write_bytes(content)
    assert is_kept("kept")
    assert is_kept("~/kept")
    assert is_kept("absent.safetensors")
    for name in ("smollm2", "sha256-1", "absent", "x" * 5000, "."):
        assert not is_kept(name)


def test_a_folder_is_a_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text(TEXTS[0])
    (tmp_path / "docs" / "b.txt").write_text(TEXTS[2])
    assert main(["inspect", "tiny", "--text", "docs"]) == 0
    assert "of 2 documents, in 5 windows of at most 61" in capsys.readouterr().out


def test_an_interrupted_reading_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    eager = partial(read_corpus, save_seconds=0.0)
    monkeypatch.setattr("multihead.heads.read_corpus", eager)
    good = Path(LINES).read_text()
    Path("corpus.jsonl").write_text(good + "no json\n")
    options = ("--text", "corpus.jsonl", "--out", "kept")
    assert inspect(*options) != 0
    captured = capsys.readouterr()
    assert "line 6, is no JSON" in captured.err
    assert Path("kept.unfinished").exists()
    assert not Path("kept").exists()
    Path("corpus.jsonl").write_text(good)
    assert inspect(*options) == 0
    assert capsys.readouterr().err == "Going on from kept.unfinished\n"
    assert not Path("kept.unfinished").exists()
    whole = read_corpus(tiny.language_model(), Characters(), TEXTS, context=23)
    kept = CorpusRecord.load("kept")
    assert kept.facts.sha256 == whole.facts.sha256
    assert kept.strongest_links(1, 3) == [
        replace(it, document=it.document.replace("text ", "corpus.jsonl:"))
        for it in named_by_line(whole)
    ]


def test_a_disk_that_fills_at_the_end_costs_no_reading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("multihead.heads.read_corpus", partial(read_corpus, save_seconds=0.0))

    def full(record: CorpusRecord, path: Path) -> None:
        raise InputError(f"{path} cannot be written: No space left on device.")

    with monkeypatch.context() as patched:
        patched.setattr(CorpusRecord, "save", full)
        assert inspect("--text", LINES, "--out", "kept") == 2
    assert "kept cannot be written: No space left" in capsys.readouterr().err
    assert not Path("kept").exists()
    assert inspect("--text", LINES, "--out", "kept") == 0
    assert capsys.readouterr().err == "Going on from kept.unfinished\n"
    assert Path("kept").exists()
    assert not Path("kept.unfinished").exists()


def named_by_line(record: CorpusRecord) -> list[Link]:
    """Links of one head whose documents count from 1, as lines do."""
    return [
        replace(it, document=f"text {int(it.document.removeprefix('text ')) + 1}")
        for it in record.strongest_links(1, 3)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", "a b"], "--prompt is for one text"),
        (["--text", LINES, "--token", "a"], "--token is for one text"),
        (["--text", LINES, "--max-tokens", "7"], "--max-tokens is for one text"),
        (["--text", LINES, "--report", "page.html"], "--report is for one text"),
        (["--text", LINES, "--roles"], "--roles is for one text"),
        ([], "give it with --text"),
        (["--text", "absent"], "no file or folder absent"),
        (["--text", "empty"], "no files to read"),
        (["--text", LINES, "--tokens", "many"], "--tokens 'many' is no whole number"),
        (["--text", LINES, "--field", "body"], "no field 'body'"),
        (["--text", LINES, "--head", "7"], "is no head"),
        (["--text", LINES, "--head", "L2H0"], "no head L2H0"),
        (["--text", LINES, "--out", "empty"], "is a folder"),
        (["--text", LINES, "--out", "absent/kept"], "absent/kept: there is no folder"),
        (["--text", LINES, "--out", LINES], "is there already"),
    ],
)
def test_errors_are_one_sentence(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    assert inspect(*options) != 0
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split())
    assert captured.out == ""
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("width", [9, 20, 41])
def test_a_token_in_its_context_fits(width: int) -> None:
    for before, token, after in (
        ("", "a", ""),
        ("much before it ", " token", " and behind it as well"),
        ("\n\t", "\N{CJK UNIFIED IDEOGRAPH-6F22}" * 30, "x"),
    ):
        shown = in_context(before, token, after, width)
        assert shown.cell_len == width
        assert "‹" in shown.plain
        assert "›" in shown.plain
