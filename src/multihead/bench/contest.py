"""A call of ours against the same call of others: times, ratios, share of the limit, errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multihead.bench.case import Case, Entry
from multihead.bench.limits import Limits
from multihead.bench.timing import Timing, alternate
from multihead.bench.verify import Expected
from multihead.errors import BackendError
from multihead.ops import attention, explain

OURS = "multihead"
TORCH = "torch"


class Declined(Exception):
    """A contestant cannot make a call; the message says why."""


@dataclass(frozen=True)
class Contestant:
    """What is timed, and the same call's result as [B, H, Lq, Dv]."""

    call: Callable[[], Any]
    result: Callable[[], Tensor]
    first_call_seconds: float | None = None

    @classmethod
    def of(cls, function: Callable[[], Tensor]) -> Contestant:
        """One whose call returns the result itself."""
        return cls(function, function)


@dataclass(frozen=True)
class Setting:
    """How a run measures: on how many threads, for how long a row, against which limits."""

    threads: int
    seconds: float
    limits: Limits
    read_gb_per_s: float | None = None
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Field:
    """The contestants of one row, and why others are not among them."""

    contestants: Mapping[str, Contestant]
    declined: Mapping[str, str] = field(default_factory=dict)


def not_served(case: Case) -> str | None:
    """Why the native kernels can't serve such a call; None if they can."""
    few = torch.zeros(1, 1, 1, case.width, dtype=case.dtype)
    return " ".join(explain(few, few, few).reasons["native"]) or None


def ours(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Callable[[], Tensor]:
    """Our call, by the public function."""
    return partial(attention, query, key, value, backend="native", **options)


def measure(
    case: Case,
    entrants: Field,
    expected: Expected,
    setting: Setting,
    *,
    pause: float = 0.0,
    read_bytes: int | None = None,
) -> Entry:
    """Time the contestants in turns, verify every result, and return the row's entry.

    `read_bytes` is what ours reads of keys and values where these are not the case's tensors.
    `TORCH` is among the contestants: its error is what ours is held to.

    Raises:
        BackendError: our result, or a peer's, is wrong.
    """
    contestants = entrants.contestants
    with torch.inference_mode():
        times = alternate(
            {name: it.call for name, it in contestants.items()},
            seconds=setting.seconds,
            pause=pause,
        )
        errors = {name: expected.error(it.result()) for name, it in contestants.items()}
    judge(case, errors, expected, errors[TORCH])
    return {
        **case.to_json(),
        "times": {name: timing.to_json() for name, timing in times.items()},
        "ratios": ratios(times),
        **_shares(case, times[OURS], setting, read_bytes),
        "errors": errors,
        "bound": expected.bound(errors[TORCH]),
        "declined": dict(entrants.declined),
        "first_call_seconds": {
            name: it.first_call_seconds
            for name, it in contestants.items()
            if it.first_call_seconds is not None
        },
    }


def ratios(times: Mapping[str, Timing]) -> dict[str, float]:
    """How many times as long each other contestant takes as ours."""
    mine = times[OURS].median
    return {name: timing.median / mine for name, timing in times.items() if name != OURS}


def judge(
    case: Case, errors: Mapping[str, float], expected: Expected, baseline_error: float
) -> None:
    """Raise BackendError unless ours is within its bound, and peers within theirs."""
    for name, error in errors.items():
        bound = expected.bound(baseline_error) if name.startswith(OURS) else expected.peers_bound
        if not error <= bound:  # NaN is wrong too
            raise BackendError(
                f"{case.name}: the result of {name} differs from float64 by {error:.2e}; "
                f"{bound:.2e} is allowed. Its time means nothing."
            )


def _shares(case: Case, timing: Timing, setting: Setting, read_bytes: int | None) -> Entry:
    """The rate reached, and its share of the limit: of memory where that is measured."""
    if setting.read_gb_per_s is not None:
        rate = (case.cache_bytes if read_bytes is None else read_bytes) / timing.median / 1e9
        return {
            "gb_per_s": rate,
            "limit": "memory read",
            "limit_share": rate / setting.read_gb_per_s,
        }
    rate = case.operations / timing.median / 1e9
    limit_name, limit = setting.limits.of(case.dtype)
    return {"gflops": rate, "limit": limit_name, "limit_share": rate / limit}
