"""Every backend against the definition in float64, over the one table of cases."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from cases import CASES, Case
from checks import check_forward, run
from multihead.ops import dispatch

BACKENDS = [backend.NAME for backend in dispatch.BACKENDS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def reasons(case: Case, dtype: torch.dtype, backend: str) -> tuple[str, ...]:
    query, key, value = case.tensors(dtype)
    found = mh.explain(query, key, value, stats=mh.STATISTICS, **case.options(dtype))
    return found.reasons[backend]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_output_and_statistics(case: Case, backend: str, dtype: torch.dtype) -> None:
    if reasons(case, dtype, backend):
        with pytest.raises(mh.BackendError, match=backend):
            run(case, dtype, backend)
    else:
        check_forward(case, dtype, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equal_keys_the_first_is_the_argmax(backend: str) -> None:
    query, value = torch.zeros(1, 2, 300, 5), torch.randn(1, 2, 300, 5)
    if found := reasons(CASES[0], torch.float32, backend):
        pytest.skip(found[0])
    mask = mh.Window(150, 0)
    result = mh.attention_with_stats(
        query, query, value, mask=mask, stats=("argmax",), backend=backend
    )
    expected = (torch.arange(300) - 150).clamp(min=0)
    assert torch.equal(result.argmax, expected.expand(1, 2, 300))


@pytest.mark.parametrize("backend", BACKENDS)
def test_statistics_do_not_depend_on_which_others_are_asked_for(backend: str) -> None:
    case = next(case for case in CASES if case.name == "all together")
    if found := reasons(case, torch.float32, backend):
        pytest.skip(found[0])
    together = run(case, torch.float32, backend)
    query, key, value = case.tensors(torch.float32)
    for name in mh.STATISTICS:
        alone = mh.attention_with_stats(
            query, key, value, stats=(name,), backend=backend, **case.options()
        )
        assert list(alone.stats) == [name]
        assert torch.equal(alone.stats[name], together.stats[name]), name


@pytest.mark.parametrize("new", [1, 2, 3])
def test_decoding_continues_prefill(new: int) -> None:
    """The last rows of a causal call are the rows of a call with fewer queries."""
    draw = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(2, 4, 17, 8, generator=draw) for _ in range(3))
    for mask in (mh.Causal(), mh.SlidingWindow(5), mh.Window(3, 0, keep_first=2)):
        whole = mh.attention(query, key, value, mask=mask)
        for end in range(new, 18):
            step = mh.attention(
                query[:, :, end - new : end], key[:, :, :end], value[:, :, :end], mask=mask
            )
            torch.testing.assert_close(step, whole[:, :, end - new : end], rtol=0, atol=1e-6)
