"""`multihead bench`: turns, limits, checks, documents. What it measures is not judged here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import multihead as mh
from bench_cases import CAUSAL, FULL, GROUPED, SETTING, WINDOW, exact
from close import assert_close
from multihead.bench import (
    contest,
    fresh,
    limits,
    machine,
    results,
    run,
    show,
    timing,
    torch_calls,
    verify,
)
from multihead.bench.case import Case
from multihead.bench.suites import SUITES, grouped, overhead
from multihead.ops.backends import native
from requires import require

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
    machine = {"processor": "A Processor (R) 9", "class": "x86-64 with AVX-512", "threads": 2}
    return {"suite": "prefill", "machine": machine, "rows": [], **fields}


def test_a_result_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    path = results.save(document(), tmp_path)
    assert path.name == "prefill-a-processor-r-9-avx-512-2t.json"
    before = path.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.save(document(rows=[float("nan")]), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == before


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


def test_maps_come_with_the_statistics() -> None:
    from multihead.bench.rivals import Maps

    query, key, value = torch.randn(1, 6, 70, 8), torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 8)
    maps = Maps()
    out, weights = maps(torch.nn.Identity(), query, key, value, None, 0.3)
    call = {"mask": mh.Causal(), "scale": 0.3}
    whole = mh.attention_with_stats(query, key, value, stats=mh.STATISTICS, **call)
    assert weights is None
    assert torch.equal(out.transpose(1, 2), whole.out)
    (statistics,), (found,) = maps.statistics, maps.maps
    assert set(statistics) == set(mh.STATISTICS)
    torch.testing.assert_close(statistics["entropy"], whole.entropy[0].double().mean(-1))
    expected = mh.attention_map(query, key, whole.lse, bins=64, **call)
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-6, equal_nan=True)


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


def test_kept_matrices_are_read_like_those_formed_one_at_a_time() -> None:
    from multihead.bench.rivals import read_kept, read_matrix

    layers = [torch.randn(1, 3, 5, 5).softmax(-1) for _ in range(2)]
    found = read_kept(layers)
    assert len(found) == 6
    assert found[4] == read_matrix(layers[1][:, 1])
    largest, key = layers[1][0, 1].max(-1)
    assert found[4][1:] == pytest.approx((largest.mean().item(), key.double().mean().item()))


def test_the_eager_path_reads_what_fits_and_ours_the_same_beside_it() -> None:
    from multihead.bench.suites.inspection import contestants, most_kept

    assert [most_kept(8192, gib * 2**30) for gib in (6, 24, 512)] == [1024, 2048, 8192]
    programs = contestants(8192, 24 * 2**30)
    assert [it.tokens for it in programs][-2:] == [2048, 2048]
    assert [it.name for it in programs][-2:] == ["multihead-again", "eager"]
    assert len({it.name for it in programs}) == len(programs)
    assert len(contestants(8192, 512 * 2**30)) == len(programs) - 1


def test_a_corpus_is_measured_at_two_sizes(tmp_path: Path) -> None:
    from multihead.bench.suites import corpus

    path = tmp_path / "library.jsonl"
    corpus.write_library(path)
    texts = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert any("class JSONDecoder" in text for text in texts)
    assert sum(map(len, texts)) > 4 * max(corpus.TOKENS), "a token has four letters at most here"
    assert [row.name for row in corpus.rows(quick=False)] == ["corpus-131072", "corpus-1048576"]


@pytest.mark.slow
def test_a_corpus_is_read_by_the_command() -> None:
    require("models")
    from multihead.bench.suites import corpus

    entry = corpus.measure(300, SETTING)
    assert entry["tokens"] == 300
    assert entry["dtype"] in ("float32", "bfloat16")
    assert entry["documents"] >= 1
    assert entry["context"] == 1024
    assert entry["record_bytes"] > 0
    assert entry["peak_rss_bytes"] > 1e8
