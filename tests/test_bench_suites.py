"""The suites of `multihead bench`: their rows, and what a row says."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from bench_cases import FULL, SETTING
from multihead.bench import (
    contest,
    memory_probe,
    show,
)
from multihead.bench.case import Case
from multihead.bench.suites import SUITES, decode, grouped, masked, memory, overhead, prefill, small
from multihead.cli import app
from multihead.ops.backends import native
from requires import require

# --- suites --------------------------------------------------------------------------------------


def test_names_of_suites_and_rows_differ() -> None:
    assert tuple(SUITES) == app.SUITES
    for suite in SUITES.values():
        for quick in (False, True):
            names = [row.name for row in suite.rows(quick=quick)]
            assert len(set(names)) == len(names) > 0


def test_the_suites_have_the_shapes_that_are_promised() -> None:
    names = {name: [row.name for row in suite.rows(quick=False)] for name, suite in SUITES.items()}
    for length, width, dtype in (
        (length, width, dtype)
        for length in (1024, 4096, 16384)
        for width in (64, 128)
        for dtype in ("float32", "bfloat16")
    ):
        for kind in ("full", "causal"):
            assert f"{kind}-{length}-d{width}-{dtype}" in names["prefill"]
    assert "full-4096-d64-float16" in names["prefill"]
    assert "window-256-8192-d64-bfloat16" in names["window"]
    assert "packed-16x512-8192-d64-float32" in names["packed"]
    assert "decode-32-8-8192-d128-float32" in names["decode"]
    assert "small-32h-16q-128-d64-float32" in names["small"]


def first(module: object, name: str, setting: contest.Setting = SETTING) -> dict[str, object]:
    """The entry of a suite's first quick row with this in its name."""
    row = next(row for row in module.rows(quick=True) if name in row.name)
    return {"name": row.name} | row.measure(setting)


@pytest.mark.parametrize(
    ("module", "name"),
    [(prefill, "causal-128-d64-float32"), (decode, "32-8"), (grouped, "bfloat16")],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_row_is_timed_and_checked(module: object, name: str) -> None:
    require("native")
    entry = first(module, name)
    times = {name: timing["median"] for name, timing in entry["times"].items()}
    ours = times.pop(contest.OURS)
    assert entry["ratios"] == {name: t / ours for name, t in times.items()}
    assert contest.TORCH in times
    assert entry["errors"][contest.OURS] <= entry["bound"]
    lines = list(show.lines(entry))
    assert lines[0].strip().startswith(entry["name"])
    assert f"{100 * entry['limit_share']:.0f} % of {entry['limit']}" in lines[0]
    for name, line in zip(times, lines[1:], strict=True):
        assert name in line
        assert f"{entry['ratios'][name]:.2f}x" in line


def test_a_rate_is_work_over_time() -> None:
    require("native")
    entry = first(prefill, "full-128-d64-float32")
    median = entry["times"][contest.OURS]["median"]
    assert entry["gflops"] == pytest.approx(4 * 8 * 64 * 128**2 / median / 1e9)
    assert entry["limit_share"] == pytest.approx(entry["gflops"] / 100)


def test_decoding_is_held_to_memory_and_reads_what_left_the_cache() -> None:
    require("native")
    entry = first(decode, "8-8", replace(SETTING, read_gb_per_s=10.0))
    case = Case("decode", torch.float32, queries=1, keys=128)
    assert entry["limit"] == "memory read"
    assert entry["gb_per_s"] == pytest.approx(
        case.cache_bytes / entry["times"][contest.OURS]["median"] / 1e9
    )
    assert entry["buffers_bytes"] >= 2**24
    key, value = torch.ones(2, 1, 1, 3, 5)
    rotation = decode.Rotation(key, value, most_bytes=3 * 2 * key.nbytes)
    seen = [rotation.next()[0].data_ptr() for _ in range(6)]
    assert len(set(seen[:3])) == 3
    assert seen[:3] == seen[3:]


def test_a_small_call_tells_python_from_the_extension() -> None:
    require("native")
    entry = first(small, "8h-1q")
    times = {name: timing["median"] for name, timing in entry["times"].items()}
    assert entry["seconds_over_torch"] == times[contest.OURS] - times[contest.TORCH]
    assert entry["python_seconds"] == times[contest.OURS] - times[small.BARE]
    assert list(entry["ratios"]) == [contest.TORCH]
    assert "Python's share" in list(show.lines(entry))[-1]
    assert native._native is not None
    assert not isinstance(native._native, small._Recorder), "the extension is put back"


def test_a_bare_call_computes_again() -> None:
    require("native")
    query, key, value = FULL.inputs()
    bare = small.bare_call(contest.ours(query, key, value))
    assert bare is not None
    with torch.inference_mode():
        right = bare.result().clone()
        out = bare.call().zero_()
        assert torch.equal(bare.call(), right)
        assert out.data_ptr() == bare.call().data_ptr()
    assert small.bare_call(lambda: query) is None


@pytest.mark.parametrize("name", ["row-statistics", "softcap", "sinks", "alibi", "keys-bias"])
def test_a_feature_is_weighed_against_the_plain_call(name: str) -> None:
    require("native")
    entry = first(overhead, name)
    ours, plain = (entry["times"][n]["median"] for n in (contest.OURS, overhead.PLAIN))
    assert entry["overhead"] == ours / plain - 1
    (line,) = show.lines(entry)
    assert f"{100 * entry['overhead']:+.1f} %" in line


def test_the_kernels_for_avx2_run_on_later_processors_too() -> None:
    require("native")
    before = native.instruction_set()
    entry = first(overhead, "avx2")
    assert native.instruction_set() == before
    if "avx2" in native.instruction_sets():
        assert entry["ratios"].keys() == {contest.TORCH}
    else:
        assert "not measurable here" in next(show.lines(entry))


@pytest.mark.parametrize("rows", [masked.window_rows, masked.packed_rows])
def test_a_mask_meets_the_dense_one_and_the_rewrite(rows: object) -> None:
    require("native")
    entry = rows(quick=True)[0].measure(SETTING)
    assert list(entry["ratios"]) in ([contest.TORCH, masked.BLOCKS], [contest.TORCH, masked.BATCH])


def test_a_row_that_cannot_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "reasons", lambda problem: ["The kernels are on holiday."])
    entry = first(prefill, "float16")
    (line,) = show.lines(entry)
    assert "not measurable here: The kernels are on holiday." in line


# --- memory --------------------------------------------------------------------------------------


def test_every_two_features_meet() -> None:
    calls = memory.cover(memory_probe.FEATURES)
    for a, b in combinations(memory_probe.FEATURES, 2):
        met = {(values[a], values[b]) for values in calls}
        both = any({a, b} <= group for group in memory._EXCLUSIVE)
        assert met == {(True, False), (False, True), (False, False)} | (
            set() if both else {(True, True)}
        )
    assert len(calls) <= 16
    assert all(memory._allowed(values) for values in calls)


@pytest.mark.slow
def test_a_call_of_each_row_is_one_that_can_be_made() -> None:
    require("native")
    for values in memory.cover(memory_probe.FEATURES):
        features = {name for name, on in values.items() if on}
        found = memory_probe.probe(512, 8, 16, 1, features)
        assert found["output_bytes"] >= 512 * 8 * 16 * 2


def test_growth_is_seen_and_outputs_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if memory_probe._lowered_peak() is None:
        pytest.skip("the system does not tell the peak of a process")

    def call(length: int, *_: object) -> object:
        def make() -> list[torch.Tensor]:
            torch.ones(length * 2**10)  # 4 KiB for each of `length`
            return [torch.ones(length * 2**8)]

        return make

    monkeypatch.setattr(memory_probe, "_call", call)
    found = memory_probe.probe(2**14, 1, 1, torch.get_num_threads(), set())
    assert found["output_bytes"] == 2**24
    assert 0.7 * 2**26 < found["grown_bytes"] < 1.3 * 2**26
