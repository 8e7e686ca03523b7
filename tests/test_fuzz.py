"""Random calls by number: a failure names the one to run again."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from fuzzing import check_call, check_derived, failures

FIRST, CALLS, BLOCKS, WORKERS = 1_000, 100_000, 50, 2


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed: int) -> None:
    check_call(seed)
    check_derived(seed)


def test_a_failure_is_reported_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(seed: int, longest: int) -> None:
        assert seed != 7, longest

    monkeypatch.setattr("fuzzing.check_call", wrong)
    (report,) = failures(range(5, 9))
    assert report.startswith("seed 7\n")
    assert "AssertionError: 65" in report


@pytest.fixture(scope="module")
def workers() -> Iterator[ProcessPoolExecutor]:
    """Processes of one thread each, so that random calls keep every core busy."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(WORKERS, context, torch.set_num_threads, (1,)) as pool:
        yield pool


@pytest.mark.proof
@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_hundred_thousand_random_calls(block: int, workers: ProcessPoolExecutor) -> None:
    """Some twelve milliseconds of one core a call: ten minutes of two."""
    seeds = range(FIRST + block, FIRST + CALLS, BLOCKS)
    parts = [seeds[i::10] for i in range(10)]
    reports = [report for part in workers.map(failures, parts) for report in part]
    assert not reports, "\n".join(reports[:5])
