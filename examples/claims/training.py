"""What the claims that train something share: the optimizer, the processes, and the spread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch
from torch import Tensor, nn

Job = TypeVar("Job")
Found = TypeVar("Found")


def train(
    parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], steps: int, rate: float
) -> None:
    """Minimize `loss()`, which draws its own batch, by Adam.

    The rate stays for half of the steps and falls to nothing in the other half.
    """
    optimizer = torch.optim.Adam(parameters, rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, 2 * (1 - step / steps))
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def spread_out(work: Callable[[Job], Found], jobs: Sequence[Job]) -> list[Found]:
    """`work` done for each job, by as many processes as torch has threads, with one thread each.

    Small models gain little from a second thread, and so the result is that of one thread anywhere.
    """
    workers = min(torch.get_num_threads(), len(jobs))
    if workers == 1:
        return [work(job) for job in jobs]
    with ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        return list(pool.map(work, jobs))


def mean(values: Sequence[float]) -> float:
    """The mean over the seeds."""
    return sum(values) / len(values)


def half_range(values: Sequence[float]) -> float:
    """Half of the way from the smallest to the largest."""
    return (max(values) - min(values)) / 2


def told(values: Sequence[float], digits: int = 3) -> str:
    """Mean and half range, as "0.702 ± 0.004"."""
    return f"{mean(values):.{digits}f} ± {half_range(values):.{digits}f}"


def overlap(lower: Sequence[float], upper: Sequence[float]) -> bool:
    """Whether some value that should be lower is not."""
    return max(lower) >= min(upper)
