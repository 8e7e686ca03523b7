"""README shows what benchmarks/results say, and its code runs."""

import json
import re
from pathlib import Path

import pytest
import torch

import figures
from multihead.bench.results import load_all

README = figures.README.read_text(encoding="utf-8")


def test_tables_are_those_of_the_results() -> None:
    assert figures.fill(README, load_all(figures.RESULTS)) == README, "run `make figures`"


def test_every_block_is_in_the_readme() -> None:
    assert set(re.findall(r"<!-- figures: (\w+) -->", README)) == set(figures.BLOCKS)
    assert README.count("<!-- figures:") == README.count("<!-- end figures -->")


def test_fill_replaces_what_is_between_the_markers_alone() -> None:
    text = "a\n<!-- figures: attention -->\ntyped by hand 9.9x\n<!-- end figures -->\nb\n"
    filled = figures.fill(text, [])
    assert "9.9x" not in filled
    assert filled.startswith("a\n<!-- figures: attention -->\n")
    assert filled.endswith("<!-- end figures -->\nb\n")
    assert figures.fill(filled, []) == filled


def test_a_machine_without_results_is_said_not_to_be_measured() -> None:
    assert "Not measured yet" in figures.attention_block([])
    assert "Not measured yet" in figures.inspect_block([])


def test_an_unknown_block_is_an_error() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        figures.fill("<!-- figures: nowhere -->\n<!-- end figures -->", [])


def test_results_are_whole() -> None:
    for path in sorted(Path(figures.RESULTS).glob("*")):
        document = json.loads(path.read_text(encoding="utf-8"))
        assert path.suffix == ".json"
        assert document["suite"] in figures.BLOCKS
        assert document["machine"]["processor"]
        assert document["command"].startswith("multihead bench")


def test_the_pictures_exist() -> None:
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (figures.ROOT / name).is_file(), name


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    title, code = re.search(r"## (In \d+ lines)\n\n```python\n(.*?)```", README, re.DOTALL).groups()
    lines = [line for line in code.splitlines() if line.strip()]
    assert title == "In 25 lines"
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 100
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    out, heads = names["out"], names["heads"]
    assert isinstance(out, torch.Tensor)
    assert out.shape == (2, 1000, 512)
    assert heads.entropy.shape == (2, 8, 1000)
    assert heads.weights(rows=[999], columns=slice(0, 10)).shape == (2, 8, 1, 10)
    assert "■" in capsys.readouterr().out


def sample() -> dict[str, object]:
    """A document of the suite `attention`, with round figures."""
    times = {
        name: {"median": t, "low": 0.9 * t, "high": 1.2 * t, "n": 9}
        for name, t in (("native", 0.002), ("torch", 0.006))
    }
    row = {"kind": "full", "length": 1024, "dtype": "float32", "times": times, "ratio": 3.0}
    row |= {"gflops": 321.0, "limit": "FMA", "limit_share": 0.75}
    row |= {"check": {"error": 2e-7, "peer_error": 4e-7}}
    overhead = {"dtype": "float32", "usual_overhead": 0.012, "all_overhead": 0.131}
    return {
        "suite": "attention",
        "command": "multihead bench --threads 2",
        "commit": "0123abc",
        "machine": {
            "processor": "A Processor",
            "class": "x86-64 with AVX2",
            "instruction_set": "avx2",
            "threads": 2,
        },
        "versions": {"torch": "2.13.0"},
        "limits": {"FMA": 428.0, "dpbf16": None},
        "rows": [row, overhead],
    }


def test_a_table_has_what_makes_a_ratio_believable() -> None:
    block = figures.attention_block([sample()])
    (row,) = re.findall(r"^\| full, 1024 .*$", block, re.MULTILINE)
    for part in ("2.00 (1.80-2.40, n 9)", "6.00 (5.40-7.20, n 9)", "3.00x", "75 % of FMA", "0.5x"):
        assert part in row
    for part in ("A Processor, 2 threads", "torch 2.13.0", "commit 0123abc", "FMA 428 GF/s"):
        assert part in block
    assert "dpbf16 not measurable here" in block
    assert "+1 % for lse, entropy and max logit and +13 % for all nine in float32" in block
    assert "Not measured: x86-64 with AMX" in block
    assert "x86-64 with AVX2" not in block.partition("Not measured:")[2]
