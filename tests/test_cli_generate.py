"""`multihead generate` as a command: the text on stdout, the rest beside it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

import tiny
from multihead import generate as continue_text
from multihead.cli import main
from multihead.cli.generate import TextStream
from multihead.cli.tokens import printable
from multihead.errors import ModelError
from requires import require

PROMPT = "abcde"


class Letters:
    """A tokenizer whose tokens are characters from '!' on."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 33 for c in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token + 33) for token in tokens)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model in the place of the one that would be loaded."""
    loaded = SimpleNamespace(
        model=tiny.language_model(),
        tokenizer=Letters(),
        facts=SimpleNamespace(name="tiny", file="tiny.gguf", parameters=7, context_length=61),
        stop_tokens=(),
        asked=[],
    )

    def load(name: str, *, dtype: object) -> object:
        loaded.asked.append((name, dtype))
        return loaded

    monkeypatch.setattr("multihead.integrations.load_language_model", load)
    return loaded


def expected(model: Any, count: int, prompt: str = PROMPT, **options: Any) -> list[int]:
    tokens = model.tokenizer.encode(prompt)
    return continue_text(model.model, tokens, max_new_tokens=count, **options)[0]


def test_the_text_is_all_of_stdout(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "--max-new-tokens", "9"]) == 0
    captured = capsys.readouterr()
    assert captured.out == model.tokenizer.decode(expected(model, 9)) + "\n"
    line = " ".join(captured.err.split())
    assert line.startswith("5 tokens read in 0.0 s (")
    assert "9 written in" in line
    assert "growing cache" in line
    assert line.endswith("cut at --max-new-tokens")
    assert "\x1b" not in captured.err
    assert model.asked == [("smollm2", torch.float32)]


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_a_prompt_from_stdin(
    arguments: list[str],
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert main(["generate", *arguments, "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out == model.tokenizer.decode(expected(model, 4)) + "\n"


@pytest.mark.parametrize("cache", ["growing", "static", "window", "paged"])
def test_json_is_pure(cache: str, model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cache", cache, "--json", "--model", "x.gguf", "--dtype", "float64"]
    assert main(["generate", PROMPT, "--max-new-tokens", "6", *options]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["tokens"] == expected(model, 6)
    assert document["text"] == model.tokenizer.decode(document["tokens"])
    assert document["prompt_tokens"] == 5
    assert document["stopped"] == "length"
    assert document["seed"] is None
    assert document["seconds"]["prefill"] > 0
    assert document["tokens_per_second"]["decode"] > 0
    assert document["cache"]["kind"] == cache
    assert document["cache"]["tokens"] == 10
    # Two layers, two KV heads of ten numbers each way.
    assert document["cache"]["filled_bytes"] >= 2 * 2 * 2 * 10 * 10 * 4
    assert document["cache"]["bytes"] >= document["cache"]["filled_bytes"]
    assert model.asked == [("x.gguf", torch.float64)]


def test_it_ends_at_a_stop_token(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    whole = expected(model, 12)
    model.stop_tokens = (whole[3],)
    assert main(["generate", PROMPT, "--max-new-tokens", "20", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tokens"] == whole[: whole.index(whole[3]) + 1]
    assert document["stopped"] == "stop token"


def test_a_seed_draws_its_tokens_again(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", "1.5", "--top-k", "40", "--top-p", "0.95", "--json"]

    def draw(*more: str) -> Any:
        assert main(["generate", PROMPT, "--max-new-tokens", "20", *options, *more]) == 0
        return json.loads(capsys.readouterr().out)

    first = draw("--seed", "3")
    assert first["tokens"] == draw("--seed", "3")["tokens"]
    assert first["tokens"] != draw("--seed", "4")["tokens"]
    unseeded = draw()
    assert unseeded["tokens"] == draw("--seed", str(unseeded["seed"]))["tokens"]


def test_a_chat(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", PROMPT, "--chat", "--max-new-tokens", "5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tokens"] == expected(model, 5, "<user>abcde")
    assert document["chat"] is True


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([""], "prompt is empty"),
        ([PROMPT, "--top-p", "1.5", "--temperature", "1"], "--top-p"),
        ([PROMPT, "--top-k", "3", "--seed", "1"], "--top-k and --seed would do nothing"),
        ([PROMPT, "--temperature", "-1"], "--temperature"),
        ([PROMPT, "--max-new-tokens", "0"], "--max-new-tokens"),
        ([PROMPT, "--cache", "endless"], "--cache"),
        ([PROMPT, "--max-new-tokens", "57"], "5 tokens, and the model was trained on 61"),
    ],
)
def test_options_that_cannot_be_used(
    options: list[str], named: str, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    assert captured.err.count("\n") == 1


def test_nobody_is_kept_waiting_for_a_prompt(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["generate"]) == 2
    assert "There is no prompt" in capsys.readouterr().err


def test_a_model_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModelError("no such model")

    monkeypatch.setattr("multihead.integrations.load_language_model", fail)
    assert main(["generate", PROMPT, "--json"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "multihead: no such model\n")


def test_pieces_are_whole_characters() -> None:
    """Tokens are bytes here, so that most characters are several."""

    class Bytes:
        def decode(self, tokens: Sequence[int]) -> str:
            return bytes(tokens).decode("utf-8", errors="replace")

    text = "naïve 中文 🙂!"
    stream = TextStream(Bytes())  # type: ignore[arg-type]
    pieces = [stream.add(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.rest() == ""
    assert stream.add(0xE4) == ""
    assert stream.rest() == "\ufffd"


def test_what_would_command_a_terminal_is_spelled_out() -> None:
    assert printable("a\n\tb \x1b[31m\u202e🏳️\u200d🌈") == "a\n\tb \\x1b[31m\\u202e🏳️\u200d🌈"


@pytest.mark.slow
def test_a_real_model(capsys: pytest.CaptureFixture[str]) -> None:
    require("models")
    question = "What is the capital of France?"
    assert main(["generate", "--chat", question, "--json", "--max-new-tokens", "16"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "Paris" in document["text"]
    assert document["stopped"] == "stop token"
    assert document["parameters"] == 134515008
