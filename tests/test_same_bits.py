"""The kernel's promise: the same bits for any threads, any batch around a row, run after run.

A row of the batch and a group of heads, which share one KV head, are computed alone, among others
and at another place, on several threads, from tensors laid out anew and in memory full of rubbish.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from cases import CASES, EDGES, Case
from held import LAYOUTS, Layout
from multihead.masks.rules import Intersection
from multihead.ops.backends import native
from multihead.ops.problem import Problem
from requires import require

# Several tiles and key blocks, and few queries on many keys: enough work for five threads.
LONG = [
    Case("long: full", batch=3, heads=4, kv_heads=2, query_length=131, key_length=331,
         head_dim=32, value_dim=40),
    Case("long: causal", heads=6, kv_heads=2, query_length=307, key_length=311, head_dim=24,
         value_dim=24, mask=mh.Causal(), sinks=1.0),
    Case("long: window and padding", heads=4, kv_heads=2, query_length=331, key_length=331,
         head_dim=48, value_dim=48, bias=(1, 1, 1, 331),
         mask=mh.Window(140, 5, keep_first=3)
         & mh.KeyPadding(torch.arange(331) >= torch.tensor([[70], [3]]))),
    Case("long: window per head", heads=3, kv_heads=3, query_length=409, key_length=419,
         head_dim=64, value_dim=64, softcap=2.1,
         mask=mh.Window(torch.tensor([3, 170, 400]), torch.tensor([0, 5, 90]))),
    Case("long: ragged batch", batch=3, heads=4, kv_heads=1, query_length=263, key_length=263,
         head_dim=32, value_dim=32, bias="alibi",
         mask=mh.Causal() & mh.KeyLengths(torch.tensor([263, 101, 7]),
                                          query_lengths=torch.tensor([263, 101, 7]))),
    Case("long: documents", heads=4, kv_heads=2, query_length=353, key_length=353, head_dim=64,
         value_dim=32, mask=mh.Causal()
         & mh.Documents(torch.arange(353) // torch.tensor([[90], [37]]))),
    Case("decode: one query", batch=3, heads=8, kv_heads=2, query_length=1, key_length=5003,
         head_dim=64, value_dim=64, mask=mh.Causal()),
    Case("decode: one query, one group", batch=2, heads=16, kv_heads=1, query_length=1,
         key_length=2557, head_dim=128, value_dim=128, sinks=2.0),
    Case("decode: two queries, every head its own", batch=3, heads=7, kv_heads=7, query_length=2,
         key_length=1021, head_dim=64, value_dim=64, mask=mh.Causal(), softcap=3.0),
    Case("decode: three queries of a ragged cache", batch=3, heads=8, kv_heads=2, query_length=3,
         key_length=3001, head_dim=32, value_dim=32,
         mask=mh.Causal() & mh.KeyLengths(torch.tensor([3001, 1025, 5]))),
    Case("decode: four queries in a window", heads=10, kv_heads=2, query_length=4,
         key_length=4099, head_dim=64, value_dim=48, bias=(1, 1, 1, 4099),
         mask=mh.SlidingWindow(2049)),
]  # fmt: skip
# So few rows that every set decodes them.
TWO_CHUNKS = Case("decode: one query of a ragged cache", heads=4, kv_heads=2, query_length=1,
                  key_length=1031, head_dim=24, value_dim=40,
                  mask=mh.Causal() & mh.KeyLengths(torch.tensor([1031, 70])))  # fmt: skip
THREADS = (1, 2, 3, 5)
NAN = math.nan

# Of glibc's malloc.h: a byte that fills freed memory, and how many blocks may be mapped.
_M_PERTURB, _M_MMAP_MAX, _DEFAULT_MMAP_MAX = -6, -4, 65536


@dataclass(frozen=True)
class Call:
    """The tensors and options of one call; rows and groups of heads can be taken from it."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    layout: Layout = mh.KeyValues

    @property
    def kv_heads(self) -> int:
        return self.key.shape[1]

    def run(self) -> dict[str, Tensor]:
        """The output and every statistic."""
        kv = self.layout(self.key, self.value)
        result = mh.attention_with_stats(
            self.query, kv, stats=mh.STATISTICS, backend="native", **self.options
        )
        return {"out": result.out, **result.stats}

    def take(self, rows: Sequence[int], groups: Sequence[int]) -> Call:
        """The call of these batch rows and groups: views where they are one, else copies."""
        batch, heads = self.query.shape[:2]
        heads_taken = _heads_of(groups, heads // self.kv_heads)
        of_rows = functools.partial(_take, size=batch, index=rows)
        of_heads = functools.partial(_take, size=heads, index=heads_taken)

        def of_both(x: Tensor) -> Tensor:
            return of_heads(of_rows(x, axis=0), axis=1)

        def of_groups(x: Tensor) -> Tensor:
            return _take(of_rows(x, axis=0), axis=1, size=self.kv_heads, index=groups)

        bias, sinks = self.options["bias"], self.options["sinks"]
        if isinstance(bias, mh.ALiBi):
            bias = mh.ALiBi(of_heads(bias.slopes, axis=0))
        elif bias is not None:
            bias = of_both(bias)
        options = {
            **self.options,
            "mask": _mask_of(self.options["mask"], of_rows, of_heads),
            "bias": bias,
            "sinks": None if sinks is None else of_heads(sinks, axis=0),
        }
        return replace(
            self,
            query=of_both(self.query),
            key=of_groups(self.key),
            value=of_groups(self.value),
            options=options,
        )

    def filled(self, rows: Sequence[int], groups: Sequence[int], filling: float) -> Call:
        """The same, with `filling` for the numbers of these batch rows and of these groups."""
        heads = _heads_of(groups, self.query.shape[1] // self.kv_heads)

        def fill(x: Tensor, heads: Sequence[int]) -> Tensor:
            x = x.clone()
            x[list(rows)] = filling
            x[:, list(heads)] = filling
            return x

        return replace(
            self,
            query=fill(self.query, heads),
            key=fill(self.key, groups),
            value=fill(self.value, groups),
        )


def call_of(case: Case, dtype: torch.dtype) -> Call:
    return Call(*case.tensors(dtype), case.options())


def _heads_of(groups: Sequence[int], size: int) -> list[int]:
    return [group * size + head for group in groups for head in range(size)]


def _take(x: Tensor, *, axis: int, size: int, index: Sequence[int]) -> Tensor:
    """`index` of an axis that has `size`; an axis that is broadcast stays as it is."""
    if x.shape[axis] != size:
        return x
    if index and list(index) == list(range(index[0], index[0] + len(index))):
        return x.narrow(axis, index[0], len(index))
    return x.index_select(axis, torch.tensor(index))


def _mask_of(mask: mh.Mask | None, of_rows: Any, of_heads: Any) -> mh.Mask | None:
    """The mask for these rows and heads: each tensor of it by the axes that it has."""

    def rows(x: Any, dims: int) -> Any:
        return of_rows(x, axis=0) if isinstance(x, Tensor) and x.ndim == dims else x

    def heads(x: Any) -> Any:
        return of_heads(x, axis=0) if isinstance(x, Tensor) else x

    match mask:
        case None | mh.Causal():
            return mask
        case Intersection(masks):
            return functools.reduce(
                operator.and_, (_mask_of(one, of_rows, of_heads) for one in masks)
            )
        case mh.Window(left, right, keep_first):
            return mh.Window(heads(left), heads(right), keep_first)
        case mh.PrefixCausal(length):
            return mh.PrefixCausal(rows(length, 1))
        case mh.QueryStart(start):
            return mh.QueryStart(rows(start, 1))
        case mh.KeyLengths(lengths, query_lengths):
            return mh.KeyLengths(rows(lengths, 1), rows(query_lengths, 1))
        case mh.KeyPadding(visible):
            return mh.KeyPadding(rows(visible, 2))
        case mh.Documents(query_ids, key_ids):
            return mh.Documents(rows(query_ids, 2), rows(key_ids, 2))
        case mh.Positions(query, key):
            return mh.Positions(rows(query, 2), rows(key, 2))
        case mh.Dense(visible):
            return mh.Dense(of_heads(rows(visible, 4), axis=1))
    raise TypeError(f"no axes are known of {mask}")


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Equal in every bit, the sign of zero too; a NaN equals any NaN at its place."""
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        got = actual[name]
        assert got.shape == want.shape, f"{what}: {name} is {got.shape} instead of {want.shape}"
        assert torch.equal(_bits(got), _bits(want)), f"{what}: {name} has other bits"


def _bits(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.masked_fill(x.isnan(), NAN).contiguous().view(integer)


def part_of(
    result: dict[str, Tensor], rows: Sequence[int], groups: Sequence[int], kv_heads: int
) -> dict[str, Tensor]:
    """What `result` has for these batch rows and groups."""
    size = next(iter(result.values())).shape[1] // kv_heads
    heads = _heads_of(groups, size)
    return {name: x[list(rows)][:, heads] for name, x in result.items()}


def check(
    case: Case,
    dtype: torch.dtype,
    *,
    threads: Sequence[int],
    fillings: Sequence[float],
    layout: Layout = mh.KeyValues,
) -> None:
    """Everything that must not matter, one after the other."""
    call = replace(call_of(case, dtype), layout=layout)
    torch.set_num_threads(1)
    expected = call.run()
    for count in threads:
        torch.set_num_threads(count)
        assert_same_bits(call.run(), expected, f"{case.name}, {count} threads")
    if case.batch == 0:
        return

    for row, group in itertools.product(range(case.batch), range(case.kv_heads)):
        alone = call.take([row], [group]).run()
        want = part_of(expected, [row], [group], case.kv_heads)
        assert_same_bits(alone, want, f"{case.name}, row {row} and group {group} alone")

    # Others before, between and behind, so that each row and group stands at another index.
    rows = [0, *(x for row in range(case.batch) for x in (row, 0))]
    groups = [0, *(x for group in range(case.kv_heads) for x in (group, 0))]
    crowd = call.take(rows, groups)
    others = range(0, len(rows), 2), range(0, len(groups), 2)
    ours = range(1, len(rows), 2), range(1, len(groups), 2)
    for filling in fillings:
        for count in {1, max(threads)}:
            torch.set_num_threads(count)
            found = part_of(crowd.filled(*others, filling).run(), *ours, len(groups))
            assert_same_bits(found, expected, f"{case.name}, among others with {filling}")


# Only bfloat16 is held by the sets that have instructions for it alone.
HELD = [
    pytest.param(name, dtype, id=f"{name}-{dtype}")
    for name in ("baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx")
    for dtype in native._DTYPES
    if dtype == torch.bfloat16 or name not in ("avx512_bf16", "avx512_amx")
]


@pytest.fixture(autouse=True)
def _native_and_threads() -> Iterator[None]:
    require("native")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    native.use_instruction_set(None)


def use(instruction_set: str, dtype: torch.dtype) -> None:
    """Choose the set; skip where the processor lacks it."""
    if instruction_set not in native.instruction_sets():
        pytest.skip(f"this processor does not run {instruction_set}")
    native.use_instruction_set(instruction_set)
    assert native.instruction_set(dtype) == instruction_set


@pytest.mark.parametrize(("instruction_set", "dtype"), HELD)
def test_short_calls(instruction_set: str, dtype: torch.dtype) -> None:
    use(instruction_set, dtype)
    for case in CASES:
        check(case, dtype, threads=(1, 5), fillings=(NAN,))


@pytest.mark.slow
@pytest.mark.parametrize(("instruction_set", "dtype"), HELD)
def test_long_calls(instruction_set: str, dtype: torch.dtype) -> None:
    use(instruction_set, dtype)
    for case in LONG:
        check(case, dtype, threads=(1, 2, 5), fillings=(NAN,))


@pytest.mark.slow
@pytest.mark.parametrize(("instruction_set", "dtype"), HELD)
def test_pages_and_int8(instruction_set: str, dtype: torch.dtype) -> None:
    use(instruction_set, dtype)
    for layout in LAYOUTS.values():
        check(TWO_CHUNKS, dtype, threads=(1, 5), fillings=(NAN,), layout=layout)


@pytest.mark.proof
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("instruction_set", "dtype"), HELD)
def test_every_layout(instruction_set: str, dtype: torch.dtype, layout: str) -> None:
    use(instruction_set, dtype)
    for case in (*CASES, *EDGES, *LONG):
        check(case, dtype, threads=THREADS, fillings=(NAN, math.inf, 0.0), layout=LAYOUTS[layout])


@pytest.mark.proof
@pytest.mark.parametrize(("instruction_set", "dtype"), HELD)
def test_everything(instruction_set: str, dtype: torch.dtype) -> None:
    use(instruction_set, dtype)
    for case in (*CASES, *EDGES, *LONG):
        check(case, dtype, threads=THREADS * 2, fillings=(NAN, math.inf, -3e38, 0.0))


@pytest.fixture
def rubbish() -> Iterator[Callable[[int], None]]:
    """A function that makes the C library fill memory: fresh with a byte's complement."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        pytest.skip("the GNU C library is needed")

    def fill(byte: int) -> None:
        assert libc.mallopt(_M_PERTURB, byte) == 1

    libc.mallopt(_M_MMAP_MAX, 0)  # mapped memory would be fresh from the system, and zero
    yield fill
    libc.mallopt(_M_PERTURB, 0)
    libc.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)


@pytest.mark.parametrize(("instruction_set", "dtype"), HELD)
def test_memory_full_of_rubbish(
    instruction_set: str, dtype: torch.dtype, rubbish: Callable[[int], None]
) -> None:
    """Nothing is read before it is written, and all of the results is written."""
    use(instruction_set, dtype)
    for case in (*EDGES, *LONG):
        call = call_of(case, dtype)
        rubbish(0xFF)
        expected = call.run()
        rubbish(0x80)
        fresh = torch.empty(100_000, dtype=torch.uint8)
        assert fresh.eq(0x7F).float().mean() > 0.99, "no rubbish to be seen"
        assert_same_bits(call.run(), expected, case.name)
        rubbish(0x01)
        assert_same_bits(call.run(), expected, case.name)


# --- the checks can fail -------------------------------------------------------------------------


def by_threads(problem: Problem, out: Tensor, stats: dict[str, Tensor]) -> None:
    if torch.get_num_threads() == 5:
        out[-1:] = out[-1:].nextafter(out.new_tensor(9))


def by_batch_size(problem: Problem, out: Tensor, stats: dict[str, Tensor]) -> None:
    if problem.batch > 3:
        stats["lse"][1] = stats["lse"][1].nextafter(torch.tensor(9.0))


def by_batch_index(problem: Problem, out: Tensor, stats: dict[str, Tensor]) -> None:
    out[1:2, ..., 0] = out[1:2, ..., 0].nextafter(out.new_tensor(9))


def by_head_index(problem: Problem, out: Tensor, stats: dict[str, Tensor]) -> None:
    stats["argmax"][:, 1:2] += 1


def by_neighbors(problem: Problem, out: Tensor, stats: dict[str, Tensor]) -> None:
    if problem.value.isnan().any():
        out[:, :, -1:] = NAN


def by_history(problem: Problem, out: Tensor, stats: dict[str, Tensor]) -> None:
    stats["entropy"] += 1e-6 * next(_RUNS)


def by_sign_of_zero(problem: Problem, out: Tensor, stats: dict[str, Tensor]) -> None:
    if problem.batch == 1:
        stats["mean_distance"][stats["mean_distance"] == 0] = -0.0


_RUNS = itertools.count()
FAULTS = [by_threads, by_batch_size, by_batch_index, by_head_index, by_neighbors, by_history,
          by_sign_of_zero]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_are_found(
    fault: Callable[[Problem, Tensor, dict[str, Tensor]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = native.forward

    def faulty(problem: Problem) -> tuple[Tensor, dict[str, Tensor]]:
        out, stats = forward(problem)
        fault(problem, out, stats)
        return out, stats

    case = Case("faulty", mask=mh.Causal(), query_length=11)
    check(case, torch.float32, threads=(1, 5), fillings=(NAN,))
    monkeypatch.setattr(native, "forward", faulty)
    # A call of a known form would pass the fault by.
    monkeypatch.setattr(sys.modules["multihead.ops.attention"], "known", lambda form: None)
    with pytest.raises(AssertionError, match="has other bits"):
        check(case, torch.float32, threads=(1, 5), fillings=(NAN,))
