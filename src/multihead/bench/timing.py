"""Times of several contestants in one process, taken in turns so that all meet the same noise."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

# A sample shorter than this is dominated by the clock and by the scheduler's tick.
_SHORTEST_SAMPLE = 2e-3

# Rounds in which every contestant takes part; later ones leave out whoever has had his time.
_SHARED_ROUNDS = 3


@dataclass(frozen=True)
class Timing:
    """Seconds for one call: the median of `n` samples, and their quartiles as spread."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """The timing of these samples, in seconds."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples))

    def to_json(self) -> dict[str, float | int]:
        """Fields by name."""
        return asdict(self)


def alternate(
    contestants: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 3.0,
    least: int = 5,
    most: int = 30,
    pause: float = 0.0,
) -> dict[str, Timing]:
    """Time each contestant in every round, in an order that turns around from round to round.

    Args:
        contestants: what to call, by name. Each is called once before, unmeasured.
        seconds: no further round begins after so long, once there were `least`. A contestant that
            has used as much by itself, and twice as much as the first, is left out of rounds after
            the third.
        least: rounds at least.
        most: rounds at most.
        pause: seconds of rest before each sample, in which the threads of the contestant before
            stop to spin: several thread pools share the cores.
    """
    repeats = {name: _repeats(call) for name, call in contestants.items()}
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    spent = dict.fromkeys(contestants, 0.0)
    first, *_ = order = list(contestants)
    start = time.perf_counter()
    for done in range(most):
        if done >= least and time.perf_counter() - start > seconds:
            break
        for name in order:
            if done >= _SHARED_ROUNDS and spent[name] > max(seconds, 2 * spent[first]):
                continue
            time.sleep(pause)
            if pause and repeats[name] > 1:
                contestants[name]()  # wakes its threads again
            samples[name].append(_time(contestants[name], repeats[name]))
            spent[name] += samples[name][-1] * repeats[name]
        order.reverse()
    return {name: Timing.of(values) for name, values in samples.items()}


def _repeats(call: Callable[[], object]) -> int:
    first = _time(call, 1)
    if first > 100 * _SHORTEST_SAMPLE:  # long enough, however much of it was warming up
        return 1
    return max(1, math.ceil(_SHORTEST_SAMPLE / max(_time(call, 1), 1e-9)))


def _time(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
