"""`multihead bench`: turns, checks, documents. What it measures is not judged here."""

import importlib.util
import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

import multihead as mh
from close import assert_close
from multihead.bench import (
    contest,
    fresh,
    limits,
    machine,
    memory_probe,
    peers,
    results,
    run,
    show,
    timing,
    torch_calls,
    verify,
)
from multihead.bench.case import Case
from multihead.bench.limits import Limits
from multihead.bench.suites import SUITES, decode, grouped, masked, memory, overhead, prefill, small
from multihead.cli import app
from multihead.ops.backends import native
from requires import require

SETTING = contest.Setting(
    threads=1,
    seconds=0.0,
    limits=Limits(fma=100.0, dpbf16=200.0, amx=400.0),
)
FULL = Case("full", torch.float32, queries=37, keys=37)
CAUSAL = Case("causal", torch.bfloat16, queries=37, keys=37, mask=mh.Causal())
WINDOW = Case("window-5", torch.float32, queries=41, keys=41, mask=mh.SlidingWindow(5))
GROUPED = Case("grouped", torch.float32, queries=7, keys=13, heads=6, kv_heads=2, width=16)


def exact(case: Case) -> torch.Tensor:
    """All rows of the case in float64, by the reference."""
    query, key, value = (x.double() for x in case.inputs())
    return mh.attention(query, key, value, mask=case.mask, backend="reference")


# --- times ---------------------------------------------------------------------------------------


def test_contestants_take_turns() -> None:
    calls: list[str] = []
    times = timing.alternate(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        seconds=0,
        least=4,
        most=9,
    )
    assert [t.n for t in times.values()] == [4, 4]
    runs = [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]
    assert runs[-4:] == ["a", "b", "a", "b"] or runs[-4:] == ["b", "a", "b", "a"]


def test_a_slow_contestant_leaves_after_three_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0

    def take(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock)
    times = timing.alternate({"fast": lambda: take(1.0), "slow": lambda: take(9.0)}, seconds=20)
    assert times["slow"] == timing.Timing(9.0, 9.0, 9.0, 3)  # and one call before
    assert times["fast"] == timing.Timing(1.0, 1.0, 1.0, 5)


def test_a_timing_is_a_median_with_quartiles() -> None:
    found = timing.Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.low, found.median, found.high, found.n) == (2.0, 3.0, 4.0, 5)
    assert timing.Timing.of([7.0]).to_json() == {"median": 7.0, "low": 7.0, "high": 7.0, "n": 1}


# --- cases and limits ----------------------------------------------------------------------------


def test_operations_count_visible_pairs_alone() -> None:
    per_pair = 4 * 8 * 64
    assert FULL.operations == per_pair * 37 * 37
    assert CAUSAL.operations == per_pair * 37 * 38 // 2
    assert WINDOW.operations == per_pair * (5 * 41 - 10)


def test_bytes_are_those_of_key_and_value() -> None:
    _, key, value = GROUPED.inputs()
    assert GROUPED.cache_bytes == key.nbytes + value.nbytes
    assert CAUSAL.table_bytes == 8 * 37 * 37 * 2


@pytest.mark.parametrize(
    ("instruction_set", "limit"),
    [
        ("avx2", ("FMA", 100.0)),
        ("avx512", ("FMA", 100.0)),
        ("avx512_bf16", ("dpbf16", 200.0)),
        ("avx512_amx", ("AMX", 400.0)),
    ],
)
def test_the_limit_is_that_of_the_instruction(
    instruction_set: str, limit: tuple[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "instruction_set", lambda dtype: instruction_set)
    assert SETTING.limits.of(torch.bfloat16) == limit


def test_a_limit_that_is_not_here_is_shown_as_such() -> None:
    (line,) = show.limits_lines({"FMA": 100.0, "dpbf16": None, "AMX": None})
    assert "dpbf16 not measurable here" in line


def test_memory_is_read_at_a_possible_rate() -> None:
    assert 0.1 < limits.read_bandwidth(2**24) < 10_000


def test_buffers_are_capped_where_the_cache_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "last_level_cache_bytes", lambda: 2**25)
    assert limits.cold_bytes() == 2**27
    for size in (2**32, None):
        monkeypatch.setattr(limits, "last_level_cache_bytes", lambda size=size: size)
        assert limits.cold_bytes() == limits.MOST_BUFFER_BYTES


def test_the_machine_names_the_set_of_each_dtype() -> None:
    require("native")
    found = machine.instruction_sets()
    assert list(found) == ["float32", "bfloat16", "float16"]
    assert found["float32"] in native.instruction_sets()


# --- verification --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [FULL, CAUSAL, WINDOW, GROUPED], ids=lambda case: case.name)
def test_what_is_expected_is_what_the_reference_gives(case: Case) -> None:
    expected = verify.expect(*case.inputs(), mask=case.mask)
    assert expected.error(exact(case)) < 1e-12


@pytest.mark.parametrize("name", list(overhead._OPTIONS))
def test_what_is_expected_of_a_feature_is_what_the_reference_gives(name: str) -> None:
    query, key, value = FULL.inputs()
    options = overhead._OPTIONS[name](FULL)
    whole = mh.attention(
        query.double(), key.double(), value.double(), backend="reference", **options
    )
    expected = verify.expect(query, key, value, **options)
    assert expected.error(whole) < 1e-12
    assert 0 < expected.plain_error < 1e-5


@pytest.mark.parametrize("wrong_one", [contest.OURS, contest.TORCH, "a peer"])
def test_a_wrong_result_does_not_pass(wrong_one: str) -> None:
    query, key, value = FULL.inputs()
    right = torch_calls.sdpa(FULL, query, key, value)()
    wrong = right.clone()
    wrong[0, -1, -1, -1] += 0.1
    expected = verify.expect(query, key, value)
    outs = dict.fromkeys([contest.OURS, contest.TORCH, "a peer"], right)

    def measure() -> contest.Entry:
        field = {name: contest.Contestant.of(lambda x=x: x) for name, x in outs.items()}
        return contest.measure(FULL, contest.Field(field), expected, SETTING)

    require("native")
    assert measure()["errors"]["a peer"] < 1e-6
    outs[wrong_one] = wrong
    with pytest.raises(mh.BackendError, match=f"result of {wrong_one}.*Its time means nothing"):
        measure()
    outs[wrong_one] = wrong * torch.nan
    with pytest.raises(mh.BackendError, match="Its time means nothing"):
        measure()


# --- the calls of others -------------------------------------------------------------------------


@pytest.mark.parametrize("case", [FULL, CAUSAL, WINDOW], ids=lambda case: case.name)
def test_torch_makes_the_same_call(case: Case) -> None:
    query, key, value = case.inputs()
    expected = exact(case)
    plain = torch_calls.matmul(case, query, key, value)()
    assert_close(torch_calls.sdpa(case, query, key, value)(), expected, plain, factor=4.0)
    assert verify.expect(query, key, value, mask=case.mask).error(plain) < 0.05


def test_torch_groups_queries() -> None:
    query, key, value = GROUPED.inputs()
    plain = torch_calls.sdpa(GROUPED, query, key, value)()
    last = torch_calls.grouped_matmul(query[:, :, -1:], key, value)
    assert_close(last, exact(GROUPED)[:, :, -1:], plain[:, :, -1:], factor=4.0)


@pytest.mark.parametrize("size", [1, 4])
def test_a_window_by_blocks_is_the_window(size: int) -> None:
    case = Case("window", torch.float32, queries=12, keys=12, mask=mh.SlidingWindow(size))
    inputs = case.inputs()
    call, result = torch_calls.window_blocks(size, *inputs)
    assert_close(result(), exact(case), torch_calls.matmul(case, *inputs)(), factor=4.0)
    assert call().numel() == result().numel()


def test_documents_by_batch_are_the_documents() -> None:
    mask = mh.Documents(torch.arange(15)[None] // 5)
    case = Case("packed", torch.float32, queries=15, keys=15, mask=mask)
    inputs = case.inputs()
    _, result = torch_calls.batched_documents(3, *inputs)
    assert_close(result(), exact(case), torch_calls.matmul(case, *inputs)(), factor=4.0)


def installed(peer: peers.Peer) -> bool:
    return importlib.util.find_spec(peer.PACKAGE) is not None


# flex_attention compiles for half a minute: it has a test of its own.
HERE = [peer for peer in peers.PEERS if installed(peer) and peer.NAME != peers.FLEX]


@pytest.mark.slow
def test_the_peers_that_are_installed_make_the_same_call_or_say_why_not() -> None:
    """The extra `bench` installs all of them; those of `test` leave them out."""
    for peer in HERE:
        for case in (
            FULL,
            replace(FULL, dtype=torch.bfloat16),
            replace(CAUSAL, dtype=torch.float32),
        ):
            query, key, value = case.inputs()
            expected = verify.expect(query, key, value, mask=case.mask)
            try:
                found = peer.contestant(case, query, key, value, threads=1)
            except contest.Declined:
                continue
            with torch.inference_mode():
                found.call()
                assert found.result().dtype == case.dtype
                assert expected.error(found.result()) <= expected.peers_bound
        with pytest.raises(contest.Declined, match="window-5 mask"):
            peer.contestant(WINDOW, *WINDOW.inputs(), threads=1)


@pytest.mark.slow
def test_flex_attention_makes_the_same_call() -> None:
    (flex,) = (peer for peer in peers.PEERS if peer.NAME == peers.FLEX)
    mask = mh.Documents(torch.arange(256)[None] // 64)
    case = Case("packed", torch.float32, 256, 256, heads=2, kv_heads=2, mask=mask)
    inputs = case.inputs()
    try:
        found = flex.contestant(case, *inputs, threads=1)
    except contest.Declined as reason:
        pytest.skip(str(reason))
    with torch.inference_mode():
        out = found.result()
    assert_close(out, exact(case), torch_calls.matmul(case, *inputs)(), factor=4.0)
    assert found.first_call_seconds is not None


def test_flex_attention_that_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead.bench.peers import flex

    def fails(call: object) -> None:
        raise RuntimeError("no <omp.h>\nand a long log")

    monkeypatch.setattr(flex, "_compile", fails)
    monkeypatch.setattr(flex.shutil, "which", lambda name: f"/bin/{name}")
    with pytest.raises(contest.Declined, match=r"does not compile here: RuntimeError: no <omp.h>$"):
        flex.contestant(FULL, *FULL.inputs(), threads=1)
    monkeypatch.setattr(flex.shutil, "which", lambda name: None)
    with pytest.raises(contest.Declined, match=r"needs a C\+\+ compiler"):
        flex.contestant(FULL, *FULL.inputs(), threads=1)


def test_a_peer_that_is_not_installed_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead.bench.peers import registry

    class Absent:
        NAME, PACKAGE = "absent", "no-such-package"

    monkeypatch.setattr(registry, "PEERS", (Absent,))
    found = peers.find(["absent", "another"], threads=1)
    assert found == {"absent": {"absent": "not installed"}}
    assert list(show.peers_lines(found)) == ["  peers: absent not installed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended by signal 4"),
        ('raise SystemExit("its result differs")', "its result differs"),
        ("", None),
    ],
)
def test_a_peer_that_does_not_run_here_is_listed(
    code: str, reason: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from multihead.bench.peers import registry

    class Here:
        NAME, PACKAGE = "here", "numpy"

    monkeypatch.setattr(registry, "PEERS", (Here,))
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {registry.sys.executable} -c '{code}'\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(registry.sys, "executable", str(tmp_path / "python"))
    found = peers.find(["here"], threads=1)["here"]
    assert found["version"]
    assert found.get("absent") == (reason and f"does not run here: {reason}")


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


# --- the command ---------------------------------------------------------------------------------


def test_the_last_line_is_one_json_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require("native")
    grouped_suite = replace(SUITES["grouped"], rows=lambda quick: grouped.rows(quick=True)[:1])
    monkeypatch.setitem(SUITES, "grouped", grouped_suite)
    monkeypatch.setattr(run, "_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    threads = torch.get_num_threads()
    run.run(["grouped"], record=True, threads=1)
    assert torch.get_num_threads() == threads
    *lines, last = capsys.readouterr().out.splitlines()
    (document,) = json.loads(last)["suites"]
    assert document["machine"]["threads"] == 1
    assert document["command"] == "multihead bench --suite grouped --threads 1"
    (row,) = document["rows"]
    assert any(line.strip().startswith(row["name"]) for line in lines)
    assert results.load_all() == [document]

    run.run(["grouped"], as_json=True, quick=True, only="float32")
    out = capsys.readouterr().out
    assert json.loads(out)["suites"][0]["command"].startswith(
        "multihead bench --suite grouped --only float32 --quick"
    )
    assert out.count("\n") == 1


@pytest.mark.slow
def test_suites_run_in_processes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    require("native")
    run.run(["grouped", "small"], quick=True, only="bfloat16", threads=1)
    *lines, last = capsys.readouterr().out.splitlines()
    documents = json.loads(last)["suites"]
    assert [document["suite"] for document in documents] == ["grouped", "small"]
    for document in documents:
        for row in document["rows"]:
            assert any(row["name"] in line for line in lines)


@pytest.mark.slow
def test_a_suite_that_fails_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require("native")
    monkeypatch.setenv("MULTIHEAD_ISA", "abacus")
    with pytest.raises(mh.MultiheadError, match="grouped and small failed"):
        run.run(["grouped", "small"], quick=True, threads=1)
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last) == {"suites": []}
    assert sum("abacus" in line for line in lines) == 2


def document(**fields: object) -> results.Document:
    machine = {"processor": "A Processor (R) 9", "threads": 2}
    return {"suite": "prefill", "machine": machine, "rows": [], **fields}


def test_a_result_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    path = results.save(document(), tmp_path)
    assert path.name == "prefill-a-processor-r-9-2t.json"
    before = path.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.save(document(rows=[float("nan")]), tmp_path)
    with pytest.raises(OSError, match="moved"):
        results.save(document(rows=[1]), Unmovable(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == before


class Unmovable(type(Path())):  # type: ignore[misc]
    """A folder into which nothing can be moved in the end."""

    def __truediv__(self, name: str) -> Path:
        raise OSError("cannot be moved")


def test_what_cannot_be_kept_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mh.InputError, match="root of a checkout"):
        run.run(record=True)
    with pytest.raises(mh.InputError, match="--only full"):
        run.run(record=True, only="full")
    with pytest.raises(mh.InputError, match="--quick"):
        run.run(record=True, quick=True)
    (tmp_path / "benchmarks").write_text("")
    with pytest.raises(mh.InputError, match="no folder benchmarks"):
        run.run(record=True)


def test_an_unknown_name_is_answered_with_the_names() -> None:
    with pytest.raises(mh.InputError, match=r"prefill: full-1024-d64-float32.*inspect: multihead"):
        run.choose([], "fool", quick=False)
    with pytest.raises(mh.InputError, match=r"'fool'; there are prefill, window"):
        run.choose(["fool"], None, quick=False)
    assert list(run.choose([], "window", quick=False)) == ["window", "memory"]
    assert list(run.choose(["small", "window"], None, quick=False)) == ["small", "window"]


def test_time_and_peak_are_those_of_the_process() -> None:
    ours = bytearray(700_000_000)
    ours[::4096] = bytes(len(ours[::4096]))  # resident here, so that it could be counted there
    code = (
        "b = bytearray(300_000_000); b[::4096] = bytes(len(b[::4096])); import time; time.sleep(.1)"
    )
    usage = fresh.run_fresh(["-c", code], threads=1)
    assert usage.seconds > 0.1
    assert 0.3e9 < usage.peak_rss_bytes < 0.4e9


def test_a_process_that_fails_is_not_measured() -> None:
    with pytest.raises(mh.MultiheadError, match=r"status 3.*out of luck"):
        fresh.run_fresh(
            ["-c", "import sys; print('out of luck', file=sys.stderr); sys.exit(3)"], threads=1
        )


def test_the_dense_rival_computes_the_same_attention() -> None:
    from multihead.bench.rivals import Dense

    query, key, value = torch.randn(1, 6, 13, 8), torch.randn(1, 2, 13, 8), torch.randn(1, 2, 13, 8)
    dense = Dense()
    out, weights = dense(torch.nn.Identity(), query, key, value, None, 0.3)
    ours = mh.attention_with_stats(
        query, key, value, mask=mh.Causal(), scale=0.3, stats=("entropy", "max_weight", "argmax")
    )
    exact = mh.attention(query.double(), key.double(), value.double(), mask=mh.Causal(), scale=0.3)
    assert weights is None
    assert dense._future(13) is dense._future(13), "its time is that of heads, not of triangles"
    assert_close(ours.out, exact, out.transpose(1, 2), factor=4.0)
    assert_close(out.transpose(1, 2), exact, ours.out, factor=4.0)
    for head, (entropy, largest, key_index) in enumerate(dense.rows):
        assert entropy == pytest.approx(ours.entropy[0, head].mean().item(), rel=1e-5)
        assert largest == pytest.approx(ours.max_weight[0, head].mean().item(), rel=1e-5)
        assert key_index == ours.argmax[0, head].double().mean().item()
