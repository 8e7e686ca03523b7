"""A model's heads over a whole corpus, window by window, in memory that does not grow."""

from __future__ import annotations

import hashlib
import json
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ArgumentError, InputError
from ..forward import check_positions, position_count, run
from ..text import piece
from ..watching.choice import choose
from ..watching.record import HeadRecord
from ..watching.watch import model_name
from .links import SampledLinks, draw
from .record import CorpusFacts, CorpusRecord
from .store import load, save
from .text import FIELD, Digest, Document, Window, Windows, documents
from .window import Tables, WindowObserver

CONTEXT = 1024
TOKENS = 2**20
SAVE_SECONDS = 30.0

# Names of documents that are kept, before those that no link is in are forgotten.
_NAMES = 2**15

_OPTIONS = {"asked": "tokens", "special": "special tokens"}

# Values of each tensor that enter the hash of a model.
_HASHED = 4096

Progress = Callable[[int, int], None]


def read_corpus(
    model: nn.Module,
    tokenizer: Any,
    texts: Path | Iterable[str | Document],
    *,
    tokens: int = TOKENS,
    context: int | None = None,
    statistics: Sequence[str] | str | None = None,
    field: str = FIELD,
    seed: int = 0,
    name: str | None = None,
    progress: Progress | None = None,
    state: Path | None = None,
    save_seconds: float = SAVE_SECONDS,
) -> CorpusRecord:
    """Let `model` read a corpus; keep every head's statistics and its strongest links.

    Each document is cut into windows of `context` tokens, the last one shorter, and the model reads
    them one by one from position 0. Windows never reach from one document into the next. The first
    tokens of a window see little, and many heads rest on its first token (a special one where the
    tokenizer adds any): each window's tokens count in the statistics, but links to its first token
    are not among the strongest, and `first_key_first` says how often it is what a query reads most.

    All queries count, in the statistics and in the search for links; only the links by decile are
    drawn from a sample of queries. Memory is that of one window and of the tables, whatever the
    corpus.

    Args:
        model: a language model or an encoder, ours or of transformers.
        tokenizer: a transformers tokenizer, or what is called and decodes like one.
        texts: a folder (all files in and below it but hidden ones, by path), a UTF-8 text file, a
            .jsonl file of one document a line, or documents one after the other.
        tokens: how many to read, special tokens included; fewer where the corpus ends.
        context: tokens of a window, special ones included; 1024 unless given, or as many positions
            as the model has.
        statistics: names out of `multihead.heads.STATISTICS`; all unless given.
        field: where the lines of .jsonl files have their text.
        seed: of the sample of queries.
        name: the model's, if not what it says itself.
        progress: called with the number of tokens read and that of those asked for.
        state: a file in which an unfinished reading is kept every `save_seconds`, and from which it
            goes on if called again with the same arguments: with the result, bit for bit, that it
            would have had. It is written whole or not at all. Remove it when the result is saved:
            until then it is all that a failure leaves.

    Raises:
        ArgumentError: a count, a context, a statistic or texts that cannot be used.
        InputError: a file that cannot be read, a corpus without text, or a state of another
            corpus, model or options.
        ModelError: a model that cannot be run or watched over single texts.
    """
    reading = _Reading(model, tokenizer, tokens, context, statistics, seed, name)
    if state is not None and state.exists():
        reading.go_on_from(state)
    saved = time.monotonic()
    for window in reading.windows(documents(texts, field)):
        reading.read(window)
        if progress is not None:
            progress(reading.tokens, tokens)
        if state is not None and time.monotonic() - saved >= save_seconds:
            save(reading.record(), state, unfinished=True)
            saved = time.monotonic()
    return reading.finished()


def model_hash(model: nn.Module) -> str:
    """SHA-256 of a model's config and of the names, shapes, dtypes and some values of its tensors.

    At most some 4096 values of each, spread over it: training changes all of them.
    """
    found = hashlib.sha256(_config(model).encode())
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // _HASHED)].cpu().contiguous()
        found.update(some.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _config(model: nn.Module) -> str:
    """What a model computes with its weights, as text; not where they came from."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(config))  # of functions among its options
    fields = {
        key: value
        for key, value in config.to_dict().items()
        if not (key.startswith("_") or key in ("transformers_version", "architectures"))
    }
    return json.dumps(fields, sort_keys=True, default=str)


def _count(name: str, given: Any, least: int) -> int:
    try:
        count = operator.index(given)
    except TypeError:
        count = 0
    if count < least or isinstance(given, bool):
        raise ArgumentError(f"{name} must be an integer of {least} or more; got {given!r}.")
    return count


class _Reading:
    """What a reading has found so far; changes by whole windows."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        tokens: int,
        context: int | None,
        statistics: Sequence[str] | str | None,
        seed: int,
        name: str | None,
    ) -> None:
        tokens = _count("tokens", tokens, least=2)
        if context is None:
            context = min(CONTEXT, position_count(model) or CONTEXT)
        context = _count("context", context, least=1)
        seed = _count("seed", seed, least=0)
        check_positions(model, context, "Pass a smaller context.")
        self.tokens = 0
        self._model = model
        self._tokenizer = tokenizer
        self._choice = choose(model, statistics, None, None, None)
        self._name = name or model_name(model)
        self._windows = Windows(tokenizer, context)
        self._digest = Digest()
        self._options: dict[str, Any] = {
            "asked": tokens,
            "context": context,
            "special": (len(self._windows.before), len(self._windows.after)),
            "seed": seed,
            "model_sha256": model_hash(model),
        }
        self._asked, self._seed = tokens, seed
        self._heads: HeadRecord | None = None
        self._tables: Tables | None = None
        self._priority = SampledLinks.empty(0, 0).priority
        self._names: dict[int, str] = {}
        self._documents = self._count = self._skipped = 0
        self._last_document = -1
        self._state: tuple[Path, CorpusRecord] | None = None
        self._seconds, self._began = 0.0, time.monotonic()

    def go_on_from(self, state: Path) -> None:
        """Take what was read before; raises InputError where it was read otherwise."""
        before = load(state, unfinished=True)
        known: dict[str, Any] = {name: getattr(before.facts, name) for name in self._options}
        asked = self._options | {"statistics": self._choice.statistics}
        for name, value in (known | {"statistics": before.heads.names}).items():
            if value != asked[name]:
                raise _other(
                    state,
                    "another model"
                    if name == "model_sha256"
                    else f"{_OPTIONS.get(name, name)} {value}, not {asked[name]}",
                )
        self._state = (state, before)

    def windows(self, found: Iterable[Document]) -> Iterator[Window]:
        """The windows that are still to be read."""
        for whole in self._windows.of(found, self._digest):
            window = self._windows.cut(whole, self._asked - self.tokens)
            if window is None:
                return
            if len(window.ids) < 2:
                self._skipped += 1
                continue
            self._digest.window(window.ids)
            self.tokens += len(window.ids)
            self._count += 1
            self._documents += window.document != self._last_document
            self._last_document = window.document
            if self._state is None:
                yield window
            elif self._count == self._state[1].facts.windows:
                self._adopt(*self._state)
            if self.tokens >= self._asked:
                return

    def read(self, window: Window) -> None:
        """Let the model read a window, and add what its heads do."""
        drawn = draw(self._priority, self._count, len(window.ids), self._seed)
        observer = WindowObserver(self._model, self._choice, len(window.ids), drawn)
        ids = torch.tensor([window.ids], device=_device(self._model))
        run(self._model, ids, observer)
        record, layers = observer.result(self._name)
        tables = self._tables or Tables.empty(record)
        # Nothing is changed before all is computed: an interruption leaves whole windows.
        self._heads = record if self._heads is None else self._heads.merge(record)
        self._tables = tables.with_window(layers, drawn, window)
        self._priority = self._tables.sampled.priority
        self._names[window.document] = window.name
        if len(self._names) > _NAMES:
            self._names = self._tables.names(self._names) | {window.document: window.name}

    def record(self) -> CorpusRecord:
        """All that was found so far."""
        if self._heads is None or self._tables is None:
            raise InputError("The corpus has no text: there is no window of two tokens in it.")
        return CorpusRecord(
            heads=replace(self._heads, texts=self._documents),
            facts=CorpusFacts(
                **self._options,
                documents=self._documents,
                windows=self._count,
                skipped=self._skipped,
                text_bytes=self._digest.bytes,
                sha256=self._digest.hex,
                seconds=self._seconds + time.monotonic() - self._began,
            ),
            firsts=self._tables.firsts,
            strongest=self._tables.strongest,
            sampled=self._tables.sampled,
            names=self._tables.names(self._names),
        )

    def finished(self) -> CorpusRecord:
        """The result, with the text of its tokens."""
        if self._state is not None:
            raise _other(self._state[0], "a corpus that goes on, where this one ends")
        record = self.record()
        kinds = (record.strongest, record.sampled)
        parts = [np.unique(ids) for it in kinds for ids in (it.query_ids, it.key_ids)]
        tokens = [int(it) for it in np.unique(np.concatenate(parts)) if it >= 0]
        pieces = _spaced({it: piece(self._tokenizer, it) for it in tokens})
        return replace(record, pieces=pieces)

    def _adopt(self, state: Path, before: CorpusRecord) -> None:
        if before.facts.sha256 != self._digest.hex:
            raise _other(state, "another corpus, or with another tokenizer")
        self._heads = replace(before.heads, model=self._name)
        self._tables = Tables(before.firsts, before.strongest, before.sampled)
        self._priority = before.sampled.priority
        self._names = dict(before.names)
        self._seconds, self._began = before.facts.seconds, time.monotonic()
        self._state = None


def _spaced(pieces: dict[int, str]) -> dict[int, str]:
    """Pieces that join to text: WordPiece marks what goes on with a word, not where one begins."""
    goes_on = {it for it, text in pieces.items() if text[:2] == "##" and text[2:]}
    if not goes_on or any(text.startswith(" ") for text in pieces.values()):
        return pieces
    return {it: text[2:] if it in goes_on else f" {text}" for it, text in pieces.items()}


def _device(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _other(state: Path, what: str) -> InputError:
    return InputError(
        f"{state} keeps an unfinished reading of {what}, so that it cannot go on here. Repeat what "
        "was asked for then, or remove the file to begin anew."
    )
