"""Corpora as files: what is read, in which pieces and order, and what a bad file is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corpora import TEXTS, Characters, write_lines
from multihead.errors import InputError
from multihead.heads.corpora import text as corpus_text
from multihead.heads.corpora.text import Digest, Document, Windows, documents


def contents(texts: object, **options: str) -> list[tuple[str, str]]:
    """Name and whole text of every document."""
    return [
        (it.name, it.text if isinstance(it.text, str) else "".join(it.text))
        for it in documents(texts, **options)
    ]


def test_a_folder_is_read_by_path_and_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("z.txt", "b/a.md", ".git/x", ".hidden", "a.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    write_lines(tmp_path / "b" / "c.jsonl", ["one", "two"])
    assert contents(tmp_path) == [
        ("a.txt", "text of a.txt"),
        ("b/a.md", "text of b/a.md"),
        ("b/c.jsonl:1", "one"),
        ("b/c.jsonl:2", "two"),
        ("z.txt", "text of z.txt"),
    ]


def test_lines_without_text_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('\ufeff{"body": "one"}\n\n  \n{"body": "a\\nb", "id": 3}')
    assert contents(path, field="body") == [("corpus.jsonl:1", "one"), ("corpus.jsonl:4", "a\nb")]


def test_a_file_begins_after_its_mark_and_keeps_its_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffeins\r\nzwei \N{EURO SIGN}".encode())
    assert contents(path) == [("text.txt", "eins\r\nzwei \N{EURO SIGN}")]


def test_characters_cut_by_the_parts_of_a_file_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_text, "_PIECE", 5)
    text = "\N{EURO SIGN}\N{GRINNING FACE}a" * 7
    (tmp_path / "text").write_text(text, encoding="utf-8")
    assert contents(tmp_path / "text") == [("text", text)]


@pytest.mark.parametrize("text", ["word " * 40, "line of words\n" * 20, "x" * 200, "a b\nc " * 33])
def test_pieces_do_not_depend_on_the_parts(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_text, "_PIECE", 37)
    whole = list(corpus_text._pieces(text))
    assert "".join(whole) == text
    assert all(len(it) <= 37 for it in whole)
    assert len(whole) <= 2 * (len(text) // 37) + 1
    for size in (1, 7, 100):
        parts = [text[at : at + size] for at in range(0, len(text), size)]
        assert list(corpus_text._pieces(parts)) == whole


def test_windows_go_over_pieces_but_not_over_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_text, "_PIECE", 17)
    tokenizer = Characters()
    windows = list(Windows(tokenizer, 23).of(documents(TEXTS), Digest()))
    for number, text in enumerate(TEXTS):
        own = [it for it in windows if it.document == number]
        assert [it.start for it in own] == list(range(0, len(text), 23))
        assert [i for it in own for i in it.ids] == tokenizer(text)["input_ids"]
        assert all(len(it.ids) == 23 for it in own[:-1])


def test_the_hash_does_not_depend_on_whether_text_came_from_a_file(tmp_path: Path) -> None:
    digests = []
    write_lines(tmp_path / "lines.jsonl")
    for texts in (TEXTS, [Document("x", list(it)) for it in TEXTS], tmp_path / "lines.jsonl"):
        digest = Digest()
        for window in Windows(Characters(), 23).of(documents(texts), digest):
            digest.window(window.ids)
        digests.append((digest.hex, digest.bytes))
    assert len(set(digests)) == 1
    assert digests[0][1] == sum(map(len, TEXTS))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json}", r"line 3, is no JSON .*under 'text'"),
        ('{"body": "x", "id": 1}', r"line 3, has no field 'text': it has 'body', 'id'.*--field"),
        ("{}", r"line 3, has no field 'text': it has none"),
        ('["x"]', r"line 3, is no JSON object but a JSON array"),
        ("7", r"line 3, is no JSON object but a JSON number"),
        ('{"text": 7}', r"line 3, holds under 'text' no text but a JSON number"),
        ('{"text": null}', r"line 3, .* a JSON null"),
    ],
)
def test_bad_lines_are_named_by_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(f"{json.dumps({'text': 'good'})}\n\n{line}\n")
    with pytest.raises(InputError, match=message):
        contents(path)


def test_half_of_a_character_is_refused(tmp_path: Path) -> None:
    """JSON can spell halves of characters, which no tokenizer takes."""
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "good"}\n{"text": "\\ud83d\\ude00"}\n{"text": "a \\ud83d b"}\n')
    for texts, name in ((path, "corpus.jsonl:3"), (["good", "\udc80"], "text 1")):
        with pytest.raises(InputError, match=rf"{name} has half of a character, U\+D[8C]"):
            list(Windows(Characters(), 23).of(documents(texts), Digest()))


def test_what_is_no_utf8_is_named_by_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_text, "_PIECE", 4)
    (tmp_path / "latin.txt").write_bytes("caf\N{EURO SIGN} ".encode() + b"caf\xe9 au lait")
    with pytest.raises(InputError, match=r"latin\.txt is not UTF-8 text: byte 10 is 0xe9"):
        contents(tmp_path / "latin.txt")
    (tmp_path / "cut.txt").write_bytes(b"abcde\xe2\x82")
    with pytest.raises(InputError, match=r"cut\.txt is not UTF-8 text: byte 5 is 0xe2"):
        contents(tmp_path / "cut.txt")
    (tmp_path / "lines.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n')
    with pytest.raises(InputError, match=r"line 2, is not UTF-8 text: byte 10 is 0xff"):
        contents(tmp_path / "lines.jsonl")


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no files to read"):
        contents(tmp_path)
    with pytest.raises(InputError, match="no file or folder"):
        contents(tmp_path / "absent")
