"""Every backend against the definition in float64, over the one table of cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import multihead as mh
from cases import CASES, Case
from close import assert_close, float64_baseline
from multihead.ops import dispatch

BACKENDS = [backend.NAME for backend in dispatch.BACKENDS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def run(case: Case, dtype: torch.dtype, backend: str) -> mh.AttentionResult:
    query, key, value = case.tensors(dtype)
    options = case.options(dtype)
    return mh.attention_with_stats(
        query, key, value, stats=mh.STATISTICS, backend=backend, **options
    )


def plain(case: Case, dtype: torch.dtype, expected: mh.AttentionResult) -> mh.AttentionResult:
    """What plain torch operations give in `dtype`; see float64_baseline for float64."""
    if dtype != torch.float64:
        return run(case, dtype, "reference")
    single = run(case, torch.float32, "reference")
    stats = {n: float64_baseline(expected.stats[n], single.stats[n]) for n in mh.STATISTICS}
    return replace(single, out=float64_baseline(expected.out, single.out), stats=stats)


def serves(case: Case, dtype: torch.dtype, backend: str) -> list[str]:
    query, key, value = case.tensors(dtype)
    found = mh.explain(query, key, value, stats=mh.STATISTICS, **case.options(dtype))
    return list(found.reasons[backend])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_and_statistics(case: Case, backend: str, dtype: torch.dtype) -> None:
    reasons = serves(case, dtype, backend)
    if reasons:
        with pytest.raises(mh.BackendError):
            run(case, dtype, backend)
        return
    actual = run(case, dtype, backend)
    expected = run(case, torch.float64, "reference")
    baseline = plain(case, dtype, expected)
    assert actual.out.dtype == dtype
    assert_close(actual.out, expected.out, baseline.out, what="out")
    for name in mh.STATISTICS:
        if name != "argmax":
            assert_close(actual.stats[name], expected.stats[name], baseline.stats[name], what=name)
    check_argmax(case, actual, expected, baseline)


def check_argmax(
    case: Case,
    actual: mh.AttentionResult,
    expected: mh.AttentionResult,
    baseline: mh.AttentionResult,
) -> None:
    """The same column, unless its weight is within the error of the largest one."""
    assert torch.equal(actual.argmax == -1, expected.argmax == -1)
    rows = slice(0, case.query_length)
    weights = expected.weights(rows, slice(0, case.key_length))
    if weights.numel() == 0:
        return
    chosen = weights.gather(-1, actual.argmax.clamp(min=0)[..., None])[..., 0]
    largest = weights.amax(-1)
    assert_close(
        chosen[expected.argmax >= 0].to(baseline.max_weight.dtype),
        largest[expected.argmax >= 0],
        baseline.max_weight[expected.argmax >= 0],
        what="weight at argmax",
    )
