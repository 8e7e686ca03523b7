"""The suite `agreement`: how far a token's logits depend on what is around it, and on the cut.

Nothing is timed. A text is read alone, at once, by one model; then in each of the ways that may
change nothing. What they differ by is set beside the model's own error: the difference of the same
text, alone, from the model in the next wider dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from multihead.bench import whole
from multihead.bench.case import Entry
from multihead.bench.contest import Setting
from multihead.bench.suites.row import Row
from multihead.errors import BackendError, MissingExtraError, ModelError
from multihead.masks import KeyPadding
from multihead.models import LanguageModel
from multihead.models.caches import CacheKind

TOKENS, QUICK_TOKENS = 192, 12

# The first reading's own error, and in another reading twice that, which is the tests' tolerance.
_FACTOR = 3.0

# Rows beside the text; the padded ones are longer than the text, by all of these.
_BESIDE = 7
_LONGER = 61


@dataclass(frozen=True)
class Subject:
    """A model, the text that it reads, other text, and the logits [L, V] that the text must give.

    `error` is the largest difference of these from the model in the next wider dtype.
    """

    model: LanguageModel
    ids: Tensor
    others: Tensor
    logits: Tensor
    error: float


Way = Callable[[Subject], Tensor]
"""Reads the text in another way; its logits [L, V]."""


@dataclass(frozen=True)
class Reading:
    """One row: a way of reading. `exact` says that it may not change what is computed."""

    kind: str
    what: str
    way: Way
    exact: bool = True


def readings(quick: bool) -> list[Reading]:
    """Every way, the ones that change the batch first."""
    chunk = 5 if quick else 64
    caches: Sequence[CacheKind] = ("static", "paged")
    return [
        Reading("batch", f"{_BESIDE} texts of the same length beside it", _beside),
        Reading("padded-left", "padded on the left, beside longer texts", partial(_padded, "left")),
        Reading(
            "padded-right", "padded on the right, beside longer texts", partial(_padded, "right")
        ),
        Reading("thread", "on one thread", _on_one_thread),
        Reading("chunks", f"in chunks of {chunk} tokens", partial(_in_chunks, chunk, "growing")),
        Reading("tokens", "token by token", partial(_in_chunks, 1, "growing")),
        *(
            Reading(f"tokens-{kind}", f"token by token, {kind} cache", partial(_in_chunks, 1, kind))
            for kind in caches
        ),
        Reading(
            "tokens-int8",
            "token by token, int8 cache, which rounds keys and values",
            partial(_in_chunks, 1, "int8"),
            exact=False,
        ),
    ]


def rows(*, quick: bool) -> list[Row]:
    """Every way of reading, in float32 and bfloat16."""
    return [
        Row(f"{reading.kind}-{_name(dtype)}", partial(_measure, reading, dtype, quick))
        for dtype in (torch.float32, torch.bfloat16)
        for reading in readings(quick)
    ]


def _measure(reading: Reading, dtype: torch.dtype, quick: bool, setting: Setting) -> Entry:
    entry: Entry = {
        "name": f"{reading.kind}-{_name(dtype)}",
        "kind": reading.kind,
        "what": reading.what,
        "dtype": _name(dtype),
    }
    try:
        subject = _subject(dtype, quick)
    except (MissingExtraError, ModelError) as error:
        return {**entry, "not_measurable": str(error)}
    with torch.inference_mode():
        logits = reading.way(subject)
    difference = float((logits - subject.logits).abs().max())
    if reading.exact and not difference <= _FACTOR * subject.error:
        raise BackendError(
            f"{entry['name']}: logits differ by {difference:.1e}, and the model's own error is "
            f"{subject.error:.1e}."
        )
    return entry | {
        "tokens": subject.ids.shape[1],
        "exact": reading.exact,
        "largest_difference": difference,
        "largest_logit": float(subject.logits.abs().max()),
        "own_error": subject.error,
        "other_choices": int((logits.argmax(-1) != subject.logits.argmax(-1)).sum()),
    }


@lru_cache(maxsize=1)
def _subject(dtype: torch.dtype, quick: bool) -> Subject:
    model = whole.own(whole.smollm2(dtype, quick=quick))
    tokens = QUICK_TOKENS if quick else TOKENS
    longer = tokens + _LONGER
    text = whole.text(tokens + _BESIDE * longer, quick=quick)
    ids, others = text[:, :tokens], text[:, tokens:].view(_BESIDE, longer)
    with torch.inference_mode():
        logits = model(ids)[0]
        right = copy.deepcopy(model).to(whole.HIGHER[dtype])(ids)[0]
    return Subject(model, ids, others, logits, float((logits - right).abs().max()))


def _beside(subject: Subject) -> Tensor:
    length = subject.ids.shape[1]
    batch = torch.cat((subject.others[:3, :length], subject.ids, subject.others[3:, :length]))
    return subject.model(batch)[3]  # type: ignore[no-any-return]


def _padded(side: str, subject: Subject) -> Tensor:
    length, width = subject.ids.shape[1], subject.others.shape[1]
    row = slice(width - length, width) if side == "left" else slice(length)
    padded = torch.zeros(1, width, dtype=subject.ids.dtype)
    padded[:, row] = subject.ids
    visible = torch.ones(1 + _BESIDE, width, dtype=torch.bool)
    visible[0] = False
    visible[0, row] = True
    batch = torch.cat((padded, subject.others))
    return subject.model(batch, mask=KeyPadding(visible))[0, row]  # type: ignore[no-any-return]


def _on_one_thread(subject: Subject) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return subject.model(subject.ids)[0]  # type: ignore[no-any-return]
    finally:
        torch.set_num_threads(before)


def _in_chunks(size: int, kind: CacheKind, subject: Subject) -> Tensor:
    caches = subject.model.make_caches(kind, capacity=subject.ids.shape[1])
    parts = [subject.model(part, caches=caches)[0] for part in subject.ids.split(size, dim=1)]
    return torch.cat(parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
