"""`multihead bench`: turns, checks, documents. What it measures is not judged here."""

import json
from pathlib import Path

import pytest
import torch

import multihead as mh
from close import assert_close
from multihead.bench import attention, fresh, results, run, show, timing, verify
from multihead.bench.limits import Limits
from multihead.ops.backends import native
from requires import require

LIMITS = Limits(fma=100.0, dpbf16=200.0, amx=400.0)
SMALL = (
    attention.Row("full", 37, torch.float32),
    attention.Row("causal", 37, torch.bfloat16, mh.Causal()),
    attention.Row("window-5", 41, torch.float32, mh.SlidingWindow(5)),
)


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


def test_a_timing_is_a_median_with_quartiles() -> None:
    found = timing.Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.low, found.median, found.high, found.n) == (2.0, 3.0, 4.0, 5)
    assert timing.Timing.of([7.0]).to_json() == {"median": 7.0, "low": 7.0, "high": 7.0, "n": 1}


def test_operations_count_visible_pairs_alone() -> None:
    full, causal, window = SMALL
    per_pair = 4 * attention.HEADS * attention.WIDTH
    assert full.operations == per_pair * 37 * 37
    assert causal.operations == per_pair * 37 * 38 // 2
    assert window.operations == per_pair * (5 * 41 - 10)


def test_names_of_rows_differ() -> None:
    names = [row.name for row in attention.ROWS]
    assert len(set(names)) == len(names)
    assert [row.name for row in run.choose("window")] == [n for n in names if "window" in n]


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_a_wrong_result_does_not_pass(row: attention.Row) -> None:
    query, key, value = attention._inputs(row)
    right = attention._torch_call(row, query, key, value)()
    assert verify.check(query, key, value, row.mask, right, right).passed
    wrong = right.clone()
    wrong[0, -1, -1, -1] += 0.1
    assert not verify.check(query, key, value, row.mask, wrong, right).passed


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
def test_a_row_is_timed_and_checked(row: attention.Row) -> None:
    require("native")
    entry = attention.measure(row, LIMITS, seconds=0)
    times = entry["times"]
    assert entry["ratio"] == times["torch"]["median"] / times["native"]["median"]
    assert entry["gflops"] == pytest.approx(row.operations / times["native"]["median"] / 1e9)
    name, limit = LIMITS.of(row.dtype)
    assert entry["limit"] == name
    assert entry["limit_share"] == pytest.approx(entry["gflops"] / limit)
    assert entry["check"]["passed"]
    assert f"{entry['ratio']:.2f}x" in show.attention_line(entry)


def test_a_wrong_kernel_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    require("native")

    def wrong(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.zeros_like(query)

    monkeypatch.setattr(attention, "attention", wrong)
    with pytest.raises(mh.BackendError, match="Its time means nothing"):
        attention.measure(SMALL[0], LIMITS, seconds=0)


def test_statistics_are_weighed_against_the_plain_call() -> None:
    require("native")
    entry = attention.measure(attention.Row("statistics", 37, torch.float32), LIMITS, seconds=0)
    plain, every = (entry["times"][name]["median"] for name in ("plain", "all"))
    assert entry["all_overhead"] == pytest.approx(every / plain - 1)
    assert "statistics add" in show.attention_line(entry)


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
    assert LIMITS.of(torch.bfloat16) == limit


def test_a_limit_that_is_not_here_is_shown_as_such() -> None:
    assert "dpbf16 not measurable here" in show.limits_line(Limits(100.0, None, None))


def test_the_last_line_is_one_json_document(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require("native")
    monkeypatch.setattr(attention, "ROWS", SMALL[:1])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").mkdir()
    threads = torch.get_num_threads()
    run.run(record=True, threads=1, seconds=0)
    assert torch.get_num_threads() == threads
    *lines, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert document["machine"]["threads"] == 1
    assert document["command"] == "multihead bench --threads 1"
    assert [row["name"] for row in document["rows"]] == [SMALL[0].name]
    assert lines[1].startswith(SMALL[0].name)
    assert results.load_all() == [document]

    run.run(json=True, seconds=0)
    out = capsys.readouterr().out
    assert json.loads(out)["suite"] == "attention"
    assert out.count("\n") == 1


def document(**fields: object) -> results.Document:
    machine = {"processor": "A Processor (R) 9", "threads": 2}
    return {"suite": "attention", "machine": machine, "rows": [], **fields}


def test_a_result_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    path = results.save(document(), tmp_path)
    assert path.name == "attention-a-processor-r-9-2t.json"
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
    (tmp_path / "benchmarks").write_text("")
    with pytest.raises(mh.InputError, match="no folder benchmarks"):
        run.run(record=True)


def test_an_unknown_row_is_answered_with_the_names() -> None:
    with pytest.raises(mh.InputError, match=r"full-1024-float32.*inspect"):
        run.choose("fool")


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
