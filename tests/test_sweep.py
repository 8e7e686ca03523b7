"""The native second pass over all weights, in every instruction set, against the whole matrix."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import multihead as mh
from cases import CASES, Case
from close import assert_close
from matrix import dense, exact_lse
from multihead.ops import sweep as sweep_module
from multihead.ops.backends import native
from multihead.ops.pooling import bin_edges
from multihead.ops.problem import Logits, describe_logits
from multihead.ops.sweep import RowBins, sweep
from requires import require

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")
MORE_THAN_ROWS = 10_000

# Beside the table: several tiles and groups of them, several blocks and items of keys.
LONG = [
    Case("many blocks", batch=1, heads=6, kv_heads=2, query_length=613, key_length=701,
         mask=mh.Causal()),
    Case("more tiles than a group", batch=1, heads=2, kv_heads=1, query_length=1031,
         key_length=1033, head_dim=17, mask=mh.Window(211, 3, keep_first=2), sinks=1.0),
    Case("padding over blocks", query_length=347, key_length=347, softcap=1.3,
         mask=mh.Causal() & mh.KeyPadding(torch.arange(347) >= torch.tensor([[0], [97]]))),
    Case("ragged over items", query_length=67, key_length=1217, bias=(1, 3, 1, 1217),
         mask=mh.Causal() & mh.KeyLengths(torch.tensor([1217, 130]))),
    Case("documents over blocks", batch=1, query_length=401, key_length=401, bias="alibi",
         mask=mh.Causal() & mh.Documents(torch.arange(401)[None] // 90)),
]  # fmt: skip
TABLE = [case for case in (*CASES, *LONG) if case.batch and case.query_length and case.key_length]


@functools.cache
def described(case: Case, dtype: torch.dtype) -> tuple[Logits, Tensor]:
    """The case's call, and the lse that the definition gives in float64."""
    query, key, _ = case.tensors(dtype)
    options = case.options(torch.float32)
    del options["sinks"]
    return describe_logits(query, key, **options), exact_lse(case)


@dataclass(frozen=True, eq=False)
class Swept:
    """All bins of a sweep, one after the other."""

    sums: Tensor
    peaks: Tensor
    viewers: Tensor
    live: Tensor

    @staticmethod
    def of(parts: Iterator[RowBins]) -> Swept:
        kept = list(parts)
        peaks = [part.peaks for part in kept if part.peaks is not None]
        return Swept(
            torch.cat([part.sums for part in kept], -2),
            torch.cat(peaks, -2),
            torch.cat([part.viewers for part in kept], -2),
            torch.cat([part.live for part in kept], -1),
        )


def by_definition(matrix: dict[str, Tensor], edges: Sequence[int]) -> Swept:
    """The bins' sums over the whole matrix, [B, H, bins, Lk]."""
    weights, visible = matrix["softmax"], matrix["visible"]
    bins = [slice(a, b) for a, b in itertools.pairwise(edges)]
    return Swept(
        torch.stack([weights[..., rows, :].sum(-2) for rows in bins], -2),
        torch.stack([weights[..., rows, :].amax(-2) for rows in bins], -2),
        torch.stack([visible[..., rows, :].sum(-2) for rows in bins], -2),
        torch.stack([visible[..., rows, :].any(-1).sum(-1) for rows in bins], -1),
    )


@functools.cache
def matrices(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The whole matrix in float64 and in float32."""
    return dense(case, torch.float64), dense(case, torch.float32)


@functools.cache
def definitions(case: Case, edges: tuple[int, ...]) -> tuple[Swept, Swept]:
    """In float64 and in float32: what all instruction sets are held to."""
    exact, plain = (by_definition(matrix, edges) for matrix in matrices(case))
    return exact, plain


def check_bins(case: Case, dtype: torch.dtype, edges: Sequence[int]) -> None:
    """Sums and peaks at most twice as far from float64 as plain float32; counts exact."""
    call, lse = described(case, dtype)
    assert not native.reasons(call)
    actual = Swept.of(sweep(call, lse, edges, peaks=True))
    exact, plain = definitions(case, tuple(edges))
    assert_close(actual.sums, exact.sums, plain.sums, what="sums")
    assert_close(actual.peaks, exact.peaks, plain.peaks, what="peaks")
    assert torch.equal(actual.viewers.expand_as(exact.viewers), exact.viewers)
    assert torch.equal(actual.live.expand_as(exact.live), exact.live)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bins", [1, 3, 64, MORE_THAN_ROWS])
def test_every_case(instruction_set: str, dtype: torch.dtype, bins: int) -> None:
    if dtype != torch.bfloat16 and instruction_set in ("avx512_bf16", "avx512_amx"):
        assert native.instruction_set(dtype) == "avx512"  # these sets hold bfloat16 alone
        return
    for case in TABLE:
        if bins == MORE_THAN_ROWS and case.query_length > 300:
            continue  # one bin a row: most time would go into comparing the whole matrix
        try:
            check_bins(case, dtype, bin_edges(case.query_length, bins))
        except AssertionError as error:
            pytest.fail(f"{case.name}: {error}")


def test_some_rows_alone(instruction_set: str) -> None:
    for edges in ([5, 6], [40, 211, 300], [100, 148, 148 + 48, 500]):
        check_bins(LONG[0], torch.bfloat16, edges)


def test_a_few_bins_at_a_time(instruction_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buffers split a sweep; the bits stay."""
    call, lse = described(LONG[0], torch.float32)
    edges = bin_edges(call.query_length, 31)
    together = Swept.of(sweep(call, lse, edges, peaks=True))
    monkeypatch.setattr(sweep_module, "_BUFFER_ELEMENTS", 5 * call.heads * call.key_length)
    parts = list(sweep(call, lse, edges, peaks=True))
    assert [part.bins for part in parts[:2]] == [slice(0, 5), slice(5, 10)]
    apart = Swept.of(iter(parts))
    for name in vars(together):
        assert torch.equal(getattr(together, name), getattr(apart, name)), name


def test_same_bits_for_any_threads_and_any_batch(instruction_set: str) -> None:
    case = Case("enough for three threads", heads=6, kv_heads=2, query_length=613, key_length=701,
                head_dim=19, mask=mh.Window(307, 5))  # fmt: skip
    call, lse = described(case, torch.bfloat16)
    edges = bin_edges(call.query_length, 17)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(Swept.of(sweep(call, lse, edges, peaks=True)))
    finally:
        torch.set_num_threads(threads)
    alone = describe_logits(call.query[1:], call.key[1:], mask=case.mask)
    one = Swept.of(sweep(alone, lse[1:], edges, peaks=True))
    for name in ("sums", "peaks", "viewers", "live"):
        first, *others = (getattr(result, name) for result in results)
        assert all(torch.equal(first, other) for other in others), name
        assert torch.equal(getattr(one, name), first[-1:]), name


def test_a_bin_of_many_rows_loses_no_digits(instruction_set: str) -> None:
    """Two thousand tiles in one sum: in float32 alone the last ones would be rounded away."""
    rows = 100_003
    query, key = torch.zeros(1, 1, rows, 1), torch.zeros(1, 1, 3, 1)
    lse = torch.full((1, 1, rows), 3.0).log()
    (part,) = sweep(describe_logits(query, key), lse, [0, rows])
    weight = (-lse[0, 0, 0].double()).exp()
    error = (part.sums.double() / (rows * weight) - 1).abs().max()
    assert error <= 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("poison", [NAN, torch.inf, -torch.inf])
@pytest.mark.parametrize("length", [7, 150])
def test_hidden_keys_reach_nothing(instruction_set: str, length: int, poison: float) -> None:
    query, key = torch.randn(1, 2, length, 5), torch.randn(1, 2, length, 5)
    hidden = length // 2
    for mask in (
        mh.KeyPadding(torch.arange(length)[None] != hidden),
        mh.Dense((torch.arange(length) != hidden)[None]) & mh.Causal(),
    ):
        lse = mh.attention_with_stats(query, key, key, mask=mask, stats=("lse",)).lse
        poisoned = key.clone()
        poisoned[:, :, hidden] = poison
        edges = bin_edges(length, 3)
        clean, dirty = (
            Swept.of(sweep(describe_logits(query, k, mask=mask), lse, edges, peaks=True))
            for k in (key, poisoned)
        )
        for name in vars(clean):
            assert torch.equal(getattr(clean, name), getattr(dirty, name)), name
        assert not clean.sums[..., hidden].any()


@pytest.mark.parametrize("extension", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("where", ["query", "key", "lse"])
def test_nan_in_something_visible_stays(
    extension: bool, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if extension:
        require("native")
    else:
        monkeypatch.setattr(native, "_native", None)
    length, place = 150, 70
    query, key = torch.randn(1, 1, length, 5), torch.randn(1, 1, length, 5)
    lse = torch.zeros(1, 1, length)
    {"query": query, "key": key, "lse": lse[..., None]}[where][:, :, place] = NAN
    call = describe_logits(query, key, mask=mh.Causal())
    swept = Swept.of(sweep(call, lse, [0, 50, 100, 150], peaks=True))
    expected = torch.zeros(1, 1, 3, length, dtype=torch.bool)
    if where == "key":
        expected[..., 1:, place] = True  # seen from row 70 on
    else:
        expected[..., 1, : place + 1] = True
    assert torch.equal(swept.sums.isnan(), expected)
    assert torch.equal(swept.peaks.isnan(), expected)


def test_rows_that_see_nothing_give_nothing(instruction_set: str) -> None:
    """Also where their lse is a sink's, and where an lse of another call makes weights infinite."""
    query, key = torch.randn(1, 2, 60, 5), torch.randn(1, 2, 70, 5)
    empty = torch.arange(60) % 3 == 1
    mask = mh.Dense(~empty[:, None].expand(60, 70))
    for lse_of_empty in (-torch.inf, 4.0, NAN):
        lse = torch.where(empty, lse_of_empty, 6.0).expand(1, 2, 60)
        (part,) = sweep(describe_logits(query, key, mask=mask), lse, [0, 60], peaks=True)
        assert part.sums.isfinite().all()
        assert part.sums.all()
        assert torch.equal(part.viewers, torch.full_like(part.viewers, 40))
        assert torch.equal(part.live, torch.full_like(part.live, 40))
    (part,) = sweep(describe_logits(query, key), torch.full((1, 2, 60), -1e4), [0, 60], peaks=True)
    assert part.peaks is not None
    assert torch.equal(part.sums, torch.full_like(part.sums, torch.inf))
    assert torch.equal(part.peaks, torch.full_like(part.sums, torch.inf))
