"""`multihead inspect` over a corpus: many texts, every head."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from multihead.cli.inspect import check_head, parse_head
from multihead.cli.numbers import short_count
from multihead.cli.output import print_json, print_note, stdout_console
from multihead.cli.progress import progress
from multihead.cli.sizes import duration, parse_count
from multihead.cli.statistics import StatisticName
from multihead.errors import InputError
from multihead.files import check_writable

if TYPE_CHECKING:
    from multihead.heads import CorpusRecord

DEFAULT_TOKENS = "1m"
_LINES = (".jsonl", ".ndjson")
_LOADING = 0.02  # of the bar


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked of a corpus; None stands for what was not given."""

    text: Path | None
    tokens: str | None
    context: int | None
    field: str | None
    out: Path | None

    @property
    def is_corpus(self) -> bool:
        """Whether a corpus is meant rather than one text."""
        if any(self.given().values()):
            return True
        text = self.text
        return text is not None and (text.suffix.lower() in _LINES or text.is_dir())

    def given(self) -> dict[str, bool]:
        """Of each option that is of a corpus alone, whether it was given."""
        return {
            "--tokens": self.tokens is not None,
            "--context": self.context is not None,
            "--field": self.field is not None,
            "--out": self.out is not None,
        }


def check_options(options: Options, not_of_a_corpus: dict[str, bool]) -> None:
    """Raise InputError for a corpus without texts, or with options that are of one text.

    `not_of_a_corpus` says of each option whether it was given.
    """
    for option, given in not_of_a_corpus.items():
        if given:
            raise InputError(
                f"{option} is for one text, but a folder, a .jsonl file, --tokens, --context, "
                "--field or --out ask for a corpus. Leave out either."
            )
    if options.text is None:
        raise InputError(
            "--tokens, --context, --field and --out are for a corpus: give it with --text, a "
            "folder, a .jsonl file or a text file."
        )


def run(
    model: str,
    options: Options,
    *,
    head: str | None,
    sort: StatisticName,
    dtype: str,
    as_json: bool,
) -> None:
    """Let `model` read a corpus, print what its heads did, and with `out` keep it.

    With `out`, an interrupted reading is kept beside it, and the same command goes on from there.

    Raises:
        InputError: an option, a corpus, a head or a path that cannot be used.
        ModelError: a model that is not here or cannot be run.
        MissingExtraError: transformers, gguf or safetensors is not installed.
    """
    place = None if head is None else parse_head(head)
    asked = parse_count(options.tokens or DEFAULT_TOKENS, "--tokens")
    out = options.out
    if out is not None:
        check_writable(out, "--out", "corpus.safetensors")
        if out.exists():
            raise InputError(
                f"--out {out} is there already. Name another file, or remove it to read anew."
            )
    record = _read(model, options, asked, place, dtype)
    if out is not None:
        record.save(out)
        state_beside(out).unlink(missing_ok=True)
    if as_json:
        print_json(record.to_json())
    else:
        from multihead.cli.terminal.corpus import print_corpus

        print_corpus(stdout_console(), record, sort=sort, head=place)
    if out is not None:
        print_note(f"Corpus record: {out}", aside=as_json)


def state_beside(out: Path) -> Path:
    """Where an unfinished reading is kept."""
    return out.with_name(f"{out.name}.unfinished")


def _read(
    name: str, options: Options, asked: int, place: tuple[int, int] | None, dtype: str
) -> CorpusRecord:
    with progress() as advance:
        import torch

        from multihead.heads import read_corpus
        from multihead.heads.corpora.text import FIELD
        from multihead.integrations import load

        advance(f"loading {name}", 0.0)
        loaded = load(name, dtype=getattr(torch, dtype))
        if place is not None:
            check_head(place, loaded.model.config)
        state = None if options.out is None else state_beside(options.out)
        if state is not None and state.exists():
            print_note(f"Going on from {state}", aside=True)
        advance("reading the corpus", _LOADING)
        pace = _Pace()

        def tokens_done(done: int, asked: int) -> None:
            share = _LOADING + (1 - _LOADING) * done / asked
            what = f"{short_count(done)} of {short_count(asked)} tokens"
            advance(what + pace.left(done, asked), share)

        assert options.text is not None  # check_options
        return read_corpus(
            loaded.model,
            loaded.tokenizer,
            options.text,
            tokens=asked,
            context=options.context,
            field=options.field or FIELD,
            name=loaded.facts.name if loaded.facts else name,
            progress=tokens_done,
            state=state,
        )


class _Pace:
    """How long the rest will take, by the time since the first call."""

    def __init__(self) -> None:
        self._began: tuple[int, float] | None = None

    def left(self, done: int, asked: int) -> str:
        """In words; nothing before there is anything to go by."""
        now = time.monotonic()
        if self._began is None:
            self._began = (done, now)
        tokens, began = self._began
        if done == tokens:
            return ""
        return f", {duration((asked - done) * (now - began) / (done - tokens))} left"
