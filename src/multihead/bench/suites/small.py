"""The suite `small`: calls of some microseconds, where Python and the dispatch count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from multihead.bench.case import Case, Entry
from multihead.bench.contest import OURS, TORCH, Contestant, Field, Setting, measure, ours
from multihead.bench.suites.row import Row, of_case
from multihead.bench.torch_calls import sdpa
from multihead.bench.verify import expect
from multihead.ops.backends import native

BARE = "multihead extension"


def rows(*, quick: bool) -> list[Row]:
    """8 and 32 heads of 64, 1, 4 and 16 queries, 128 keys."""
    keys = 16 if quick else 128
    return [
        of_case(
            Case(f"small-{heads}h-{queries}q", dtype, queries, keys, heads=heads, kv_heads=heads),
            _measure,
        )
        for dtype in (torch.float32, torch.bfloat16)
        for heads in (8, 32)
        for queries in (1, 4, 16)
    ]


def _measure(case: Case, setting: Setting) -> Entry:
    query, key, value = case.inputs()
    whole = ours(query, key, value)
    contestants = {
        OURS: Contestant.of(whole),
        TORCH: Contestant.of(sdpa(case, query, key, value)),
    }
    bare = bare_call(whole)
    if bare is not None:
        contestants[BARE] = bare
    entry = measure(case, Field(contestants), expect(query, key, value), setting)
    times = {name: timing["median"] for name, timing in entry["times"].items()}
    entry["ratios"].pop(BARE, None)  # no other implementation, but a part of ours
    return entry | {
        "seconds_over_torch": times[OURS] - times[TORCH],
        "python_seconds": None if bare is None else times[OURS] - times[BARE],
    }


def bare_call(call: Callable[[], Tensor]) -> Contestant | None:
    """The extension's part of a call: the same arguments again, without what leads to them.

    None where the call does not reach the extension by its module.
    """
    with _recorded() as calls, torch.inference_mode():
        out = call()
    if not calls:
        return None
    function, arguments, options = calls[-1]

    def again() -> Tensor:
        function(*arguments, **options)
        return out  # written to by the call, which has its address

    return Contestant.of(again)


class _Recorder:
    """Stands for the extension's module and keeps what is called."""

    def __init__(self, extension: Any, calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]):
        self._extension, self._calls = extension, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._extension, name)
        if isinstance(found, type) or not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self._calls.append((found, arguments, options))
            return found(*arguments, **options)

        return call


@contextmanager
def _recorded() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    extension = native._native
    native._native = _Recorder(extension, calls)  # type: ignore[assignment]
    try:
        yield calls
    finally:
        native._native = extension
