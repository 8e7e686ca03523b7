"""README and docs/benchmarks.md show what benchmarks/results say, and README's code runs."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import cells
import figures
import long_tables
import loss_plot
import plot
import short_tables
from multihead.bench.results import file_name, load_all
from multihead.bench.suites import SUITES

README = figures.README.read_text(encoding="utf-8")
RESULTS = load_all(figures.RESULTS)


@pytest.mark.parametrize("path", figures.BLOCKS, ids=lambda path: path.name)
def test_tables_are_those_of_the_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert figures.fill(text, RESULTS, figures.BLOCKS[path]) == text, "run `make figures`"


@pytest.mark.parametrize("path", figures.BLOCKS, ids=lambda path: path.name)
def test_every_block_has_its_place(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"<!-- figures: (\w+) -->", text) == list(figures.BLOCKS[path])
    assert text.count("<!-- figures:") == text.count("<!-- end figures -->")


def test_every_suite_has_a_block() -> None:
    assert {*long_tables.BLOCKS, "inspect", "corpus"} == set(SUITES)


@pytest.mark.parametrize("blocks", figures.BLOCKS.values())
def test_fill_replaces_what_is_between_the_markers_alone(blocks: Any) -> None:
    for name in blocks:
        text = f"a\n<!-- figures: {name} -->\ntyped by hand 9.9x\n<!-- end figures -->\nb\n"
        filled = figures.fill(text, [], blocks)
        assert "9.9x" not in filled
        assert "Not measured yet" in filled
        assert filled.startswith(f"a\n<!-- figures: {name} -->\n")
        assert filled.endswith("<!-- end figures -->\nb\n")
        assert figures.fill(filled, [], blocks) == filled


def test_an_unknown_block_is_an_error() -> None:
    with pytest.raises(KeyError, match="nowhere"):
        figures.fill("<!-- figures: nowhere -->\n<!-- end figures -->", [], short_tables.BLOCKS)


def test_results_are_whole() -> None:
    for path in sorted(Path(figures.RESULTS).glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        assert path.name == file_name(document)
        assert document["suite"] in SUITES
        assert document["machine"]["processor"]
        assert document["command"].startswith("multihead bench")


def test_the_pictures_exist() -> None:
    for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (figures.ROOT / name).is_file(), name


def test_the_plots_are_those_of_the_results() -> None:
    for document in RESULTS:
        drawn = figures.plot_of(document["suite"])
        if drawn is not None:
            picture = (figures.IMAGES / drawn.file_name(document)).read_text(encoding="utf-8")
            assert drawn.digest(document) in picture, "run `make figures`"


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


# --- tables of documents with round figures ------------------------------------------------------


def timing(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.9 * median, "high": 1.2 * median, "n": 9}


def row(kind: str, dtype: str = "float32", **fields: Any) -> dict[str, Any]:
    times = {"multihead": 0.002, "torch": 0.006, "zentorch": 0.0024, "jax": 0.02}
    return {
        **{"name": f"{kind}-1024-d64-{dtype}", "kind": kind, "dtype": dtype, "batch": 1},
        **{"heads": 8, "kv_heads": 8, "queries": 1024, "keys": 1024, "width": 64},
        "times": {name: timing(t) for name, t in times.items()},
        "ratios": {name: t / 0.002 for name, t in times.items() if name != "multihead"},
        **{"gflops": 321.0, "limit": "FMA", "limit_share": 0.75},
        "errors": dict.fromkeys(times, 2e-7),
        "bound": 5e-7,
        "declined": {"onnxruntime": "has no such kernel"},
        "first_call_seconds": {"jax": 1.5},
        **fields,
    }


def document(suite: str, *rows: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "suite": suite,
        "command": f"multihead bench --suite {suite} --threads 2",
        "commit": "0123abc",
        "machine": {
            "processor": "A Processor",
            "class": "x86-64 with AVX2",
            "instruction_sets": {"float32": "avx2", "bfloat16": "avx2", "float16": None},
            "threads": 2,
        },
        "versions": {"torch": "2.13.0"},
        "limits": {"FMA": 428.0, "dpbf16": None, "AMX": None},
        "peers": {"zentorch": {"version": "2.13.0.2"}, "openvino": {"absent": "not installed"}},
        "rows": list(rows),
        **fields,
    }


NOT_HERE = {**row("full", "float16"), "not_measurable": "It computes float32."}
NOT_HERE = {key: NOT_HERE[key] for key in ("name", "kind", "dtype", "not_measurable")}


def lines_of(block: str, start: str) -> list[str]:
    return [line for line in block.splitlines() if line.startswith(start)]


def test_a_table_has_what_makes_a_ratio_believable() -> None:
    block = short_tables.prefill_block([document("prefill", row("full"), NOT_HERE)])
    (line,) = lines_of(block, "| full, 1024")
    for part in ("2.00 ms (1.80-2.40, n 9)", "3.00x", "1.20x zentorch", "75 % of FMA"):
        assert part in line
    for part in (
        *("A Processor, 2 threads", "float32 on avx2, bfloat16 on avx2,", "torch 2.13.0"),
        *("commit 0123abc", "FMA 428 GF/s", "zentorch 2.13.0.2", "openvino not installed"),
    ):
        assert part in block
    assert "dpbf16 not measurable here" in block
    assert "full-1024-d64-float16 (It computes float32)" in block
    assert "Slower than no other here." in block
    assert "Not measured: x86-64 with AMX" in block
    assert "x86-64 with AVX2" not in block.partition("Not measured:")[2]


@pytest.mark.parametrize(("suite", "block"), [("prefill", "prefill"), ("window", "calls")])
def test_the_last_machine_has_a_table_and_the_others_a_line(suite: str, block: str) -> None:
    lost = row("window-256")
    lost["ratios"] = {"torch": 0.5, "zentorch": 0.75, "jax": 4.0}
    old = document(suite, row("window-128"), lost, date="2026-01-02")
    old["machine"] = {**old["machine"], "processor": "An Older One", "class": "x86-64 with AMX"}
    new = document(suite, row("window-64"), date="2026-01-03")
    for documents in ([old, new], [new, old]):
        filled = short_tables.BLOCKS[block](documents)
        assert filled.count("\n| --- ") == 1
        assert len(lines_of(filled, "| window of 64")) == 1
        (line,) = lines_of(filled, "**x86-64 with AMX** (An Older One, 2 threads):")
        assert (
            "0.50x to 3.00x torch, slower in 1 of 2 rows; 0.75x to 1.20x the best other, slower "
            "in 1 of 2 rows"
        ) in line
        assert filled.index("A Processor") < filled.index("An Older One")


@pytest.mark.parametrize("suite", ["prefill", "window"])
def test_a_loss_is_said_and_stays(suite: str) -> None:
    lost = row("window-256" if suite == "window" else "full")
    lost["ratios"] = {"torch": 1.5, "zentorch": 0.9, "jax": 4.0}
    blocks = short_tables.BLOCKS["prefill" if suite == "prefill" else "calls"]
    block = blocks([document(suite, row("causal"), lost)])
    (line,) = lines_of(block, "| window of 256 in 1024" if suite == "window" else "| full, 1024")
    assert "| 1.50x | **0.90x** zentorch |" in line
    (said,) = lines_of(block, "Slower than another:")
    assert "float32 (zentorch)" in said
    assert "causal" not in said
    longer = long_tables.contests_block(suite, [document(suite, row("causal"), lost)])
    assert "**0.90x**" in longer


def test_ours_in_another_way_is_no_peer() -> None:
    grouped = row("grouped-16-2", heads=16, kv_heads=2)
    grouped["ratios"] = {"multihead expanded": 0.8, "torch": 2.0, "torch expanded": 1.5}
    assert cells.best_peer(grouped) == "torch expanded"
    assert cells.losses([grouped]) == (
        "Slower than no other here. Slower than another form of our own: "
        "16/2 heads, 1024, float32 (multihead expanded).\n"
    )
    assert "| 16/2 heads, 1024 |" in short_tables.calls_block([document("grouped", grouped)])


def test_many_losses_are_counted() -> None:
    rows = [row("full", queries=length, keys=length) for length in (1, 2, 3, 4, 5)]
    for lost in rows[:4]:
        lost["ratios"] = {"torch": 1.5, "llama.cpp": 0.5, "zentorch": 0.9 if lost is rows[0] else 2}
    assert cells.losses(rows) == (
        "Slower than another in 4 of 5 rows: llama.cpp in 4, zentorch in 1.\n"
    )
    assert cells.losses(rows[1:4]).startswith("Slower than another: full, 2, D 64, float32 (llama")


def test_small_calls_stand_side_by_side() -> None:
    rows = [
        row(
            f"small-{heads}h-{queries}q",
            heads=heads,
            queries=queries,
            keys=128,
            times={"multihead": timing(1e-6 * (10 + queries)), "torch": timing(1e-5)},
            ratios={"torch": 10 / (10 + queries)},
            seconds_over_torch=1e-6 * queries,
            python_seconds=2e-6,
        )
        for heads in (8, 32)
        for queries in (1, 4)
    ]
    block = short_tables.calls_block([document("small", *rows)])
    (line,) = lines_of(block, "| 8 heads, 1 / 4 queries on 128 keys")
    for part in ("11.0 / 14.0 us", "**0.91x** / **0.71x**, +1.0 / +4.0 us", "Python: 2.0 / 2.0 us"):
        assert part in line
    assert len(lines_of(block, "| 32 heads")) == 1
    longer = long_tables.contests_block("small", [document("small", *rows)])
    assert "+4.0 us against torch, of which Python 2.0 us" in longer


def test_overheads_are_one_line_and_memory_another() -> None:
    rows = [
        {**row("sinks", dtype), "overhead": added, "times": {"multihead": timing(1), **plain}}
        for dtype, added in (("float32", 0.012), ("bfloat16", -0.004))
        for plain in ({"plain": timing(1)},)
    ]
    for entry in rows:
        del entry["ratios"]
    block = short_tables.overhead_block([document("overhead", *rows, row("avx2-build"))])
    assert "sinks +1.2 / -0.4 %" in block
    assert "3.00x torch" in block
    assert block.count("\n") == 1
    assert "+1.2 %" in long_tables.overhead_block([document("overhead", *rows)])

    calls = [
        {"name": "a", "features": ["causal", "sinks"], "grown_bytes": 3 * 2**20},
        {"name": "b", "features": ["causal"], "grown_bytes": 2**20},
    ]
    calls = [{**c, "length": 32768, "heads": 8, "width": 64, "output_bytes": 2**26} for c in calls]
    block = short_tables.memory_block([document("memory", *calls)])
    assert "2 fresh processes in which every two of 2 features meet" in block
    assert "**3.0 MiB** beyond inputs and outputs (causal, sinks)" in block
    assert block.count("\n") == 1
    assert "| causal | 1.0 MiB | 64 MiB |" in long_tables.memory_block([document("memory", *calls)])


def test_a_layer_tells_where_its_time_goes() -> None:
    entry = row("layer", heads=12, kv_heads=12, keys=2048)
    entry |= {"shares": {"projections": 0.4, "attention": 0.55}, "packed_bytes": 0}
    block = short_tables.layer_block([document("layer", entry, NOT_HERE)])
    (line,) = lines_of(block, "| layer, 2048 tokens, 768 wide, 12 heads |")
    for part in ("3.00x torch, 1.20x zentorch", "75 % of FMA", "projections 40 %, attention 55 %"):
        assert part in line
    assert "no weight packed" in line
    assert "full-1024-d64-float16 (It computes float32)" in block
    longer = long_tables.contests_block(
        "layer", [document("layer", entry | {"packed_bytes": 2**20})]
    )
    assert "75 % of FMA; projections 40 %, attention 55 %; 1.0 MiB of packed weights" in longer


def test_a_whole_model_tells_tokens_a_second() -> None:
    entry = row("smollm2-decode", what="SmolLM2, decoding", same_tokens=0.995)
    entry["declined"] = {"llama.cpp": "not measurable here: not installed"}
    del entry["gflops"]
    entry["tokens_per_second"] = {"multihead": 123.4, "torch": 41.1, "zentorch": 99.0, "jax": 12.0}
    block = short_tables.models_block([document("models", entry)])
    (line,) = lines_of(block, "| SmolLM2, decoding | float32 |")
    assert "2.00 ms (1.80-2.40, n 9) | 123 tokens/s | 3.00x torch, 1.20x zentorch" in line
    assert "Slower than no other here." in block
    longer = long_tables.contests_block("models", [document("models", entry)])
    assert "123 tokens/s, 99.5 % of the tokens are torch's" in longer
    assert "| torch | 6.00 ms (5.40-7.20, n 9) | 3.00x | 2.0e-07 | 41.1 tokens/s |" in longer
    assert "| llama.cpp |  |  |  | not measurable here: not installed |" in longer


def test_the_long_table_has_every_contestant() -> None:
    block = long_tables.contests_block("prefill", [document("prefill", row("full"))])
    for part in (
        "| torch | 6.00 ms (5.40-7.20, n 9) | 3.00x | 2.0e-07 |",
        "| jax | 20.0 ms (18.0-24.0, n 9) | 10.00x | 2.0e-07 | first call 1.5 s |",
        "| onnxruntime |  |  |  | has no such kernel |",
    ):
        assert part in block


def test_decoding_tells_how_much_was_read() -> None:
    entry = row("decode-32-8", heads=32, kv_heads=8, keys=8192, width=128, queries=1)
    del entry["gflops"]
    entry |= {"gb_per_s": 20.0, "limit": "memory read", "buffers_bytes": 3 * 2**29}
    measured = document("decode", entry, limits={**document("decode")["limits"]})
    measured["limits"] |= {"memory read": 26.7, "cache_bytes": 2**25, "cold_bytes": 2**27}
    block = long_tables.contests_block("decode", [measured])
    assert "| decode, 32/8 heads, 8192 keys, D 128 |" in block
    assert "20.0 GB/s, 75 % of memory read, 1.5 GiB of buffers in turn" in block
    assert "memory read 26.7 GB/s," in block
    paged = document("decode", entry | {"kind": "decode-int8-32-8"}, limits=measured["limits"])
    assert "| decode from int8, 32/8 heads" in long_tables.contests_block("decode", [paged])
    measured["limits"] |= {"cache_bytes": 2**31, "cold_bytes": 6 * 2**30}
    block = long_tables.contests_block("decode", [measured])
    assert "26.7 GB/s (buffers of 6.0 GiB, a cache of 2048 MiB: some may still be in it)" in block


# --- the plot ------------------------------------------------------------------------------------


def plotted() -> dict[str, Any]:
    rows = [row("full", keys=length, gflops=rate) for length, rate in ((4096, 300), (1024, 200))]
    other_width = row("full", width=128)
    return document("prefill", *rows, other_width, row("causal", "bfloat16"), NOT_HERE)


def test_a_panel_has_the_numbers_of_its_rows() -> None:
    full, causal = plot.panels(plotted())
    assert (full["kind"], full["dtype"], full["lengths"]) == ("full", "float32", [1024, 4096])
    assert full["rates"]["multihead"] == [200, 300]
    assert full["rates"]["torch"] == pytest.approx([200 / 3, 100])
    assert full["rates"]["best other"] == pytest.approx([200 / 1.2, 250])
    assert full["others"] == ["zentorch", "zentorch"]
    assert full["limit"] == ["FMA", 428.0]
    assert (causal["kind"], causal["dtype"]) == ("causal", "bfloat16")


def test_another_number_is_another_picture() -> None:
    changed = copy.deepcopy(plotted())
    changed["rows"][0]["gflops"] = 301
    assert plot.digest(changed) != plot.digest(plotted()) == plot.digest(plotted())


def test_a_drawing_is_the_same_for_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "a").mkdir()
    said = plot.draw(plotted(), tmp_path)
    assert said == "Plot: prefill-a-processor-avx2-2t.svg"
    first = (tmp_path / "prefill-a-processor-avx2-2t.svg").read_bytes()
    plot.draw(plotted(), tmp_path / "a")
    assert (tmp_path / "a" / "prefill-a-processor-avx2-2t.svg").read_bytes() == first
    text = first.decode()
    for part in (plot.digest(plotted()), "FMA 428 GF/s", "multihead", "torch", "zentorch"):
        assert part in text


def removals() -> dict[str, Any]:
    shared = {"units": 20, "removed": [0, 2, 10], "tested_tokens": 2048}
    return document(
        "removal",
        {
            **{"name": "gate-gradient", "what": "by gradients", "scored_tokens": 1024},
            **{"removal_losses": [[3.0, 3.125, 5.0]], **shared},
        },
        {
            **{"name": "random", "what": "at random", "scored_tokens": 0},
            **{"removal_losses": [[3.0, 6.0, 9.0], [3.0, 4.0, 8.0], [3.0, 5.0, 7.0]], **shared},
            "rank_correlations": [0.125, -0.5, 0.0],
        },
    )


def test_a_removal_has_a_picture_and_the_range_of_draws(tmp_path: Path) -> None:
    block = long_tables.BLOCKS["removal"]([removals()])
    assert "| removed | 0 % | 10 % | 50 % |" in block
    assert "| by gradients | 3.00 | 3.12 | 5.00 |" in block
    assert "| at random | 3.00 | 5.00 (4.00-6.00) | 8.00 (7.00-9.00) |" in block
    assert "Rank correlation with the gate gradients: random 0.12, -0.50, 0.00." in block
    assert "Scored by gate gradient over 1,024 tokens; losses over 2,048 others." in block
    assert f"(images/{loss_plot.file_name(removals())})" in block
    short = short_tables.BLOCKS["removal"]([removals()])
    assert f"(docs/images/{loss_plot.file_name(removals())})" in short
    assert (
        "Without 2 of 20 KV groups SmolLM2's loss of 3.00 nats a token becomes 3.12 if chosen by "
        "the gradient of a gate on each, 5.00 (4.00 to 6.00 in 3 draws) at random (A Processor"
    ) in short
    pytest.importorskip("matplotlib")
    for _ in range(2):
        loss_plot.draw(removals(), tmp_path)
    (path,) = tmp_path.iterdir()
    assert loss_plot.digest(removals()) in path.read_text(encoding="utf-8")
    gradient, random = loss_plot.lines(removals())
    assert gradient["shares"] == [0, 10, 50]
    assert (random["medians"], random["low"], random["high"]) == ([3, 5, 8], [3, 4, 7], [3, 6, 9])


def restrictions() -> dict[str, Any]:
    shared = {
        **{"units": 20, "restricted": [0, 2, 20], "window": 256, "keep_first": 4},
        **{"measured_tokens": 512, "tested_tokens": 1024},
    }
    return document(
        "restriction",
        {"name": "far-mass", "what": "by mass", "restriction_losses": [[3.0, 2.75, 5.0]], **shared},
        {
            **{"name": "random", "what": "at random", **shared},
            "restriction_losses": [[3.0, 3.5, 5.0], [3.0, 4.0, 5.0], [3.0, 3.25, 5.0]],
        },
    )


def test_a_restriction_has_a_picture_and_what_it_adds(tmp_path: Path) -> None:
    block = long_tables.BLOCKS["restriction"]([restrictions()])
    assert "| restricted | 10 % | 100 % |" in block
    assert "| by mass | -0.250 | +2.000 |" in block
    assert "| at random | +0.500 (+0.250 to +1.000) | +2.000 |" in block
    assert "Far mass over 512 tokens, losses over 1,024 others: 3.000 unrestricted" in block
    assert f"(images/{loss_plot.file_name(restrictions())})" in block
    short = short_tables.BLOCKS["restriction"]([restrictions()])
    assert f"(docs/images/{loss_plot.file_name(restrictions())})" in short
    assert (
        "2 of 20 KV groups that see 256 keys and the first 4 alone, in texts of 1,024 tokens, add "
        "to the loss -0.250 nats a token if chosen by the mass that they put beyond the window, "
        "+0.500 (+0.250 to +1.000 in 3 draws) at random (A Processor"
    ) in short
    pytest.importorskip("matplotlib")
    for _ in range(2):
        loss_plot.draw(restrictions(), tmp_path)
    (path,) = tmp_path.iterdir()
    assert loss_plot.digest(restrictions()) in path.read_text(encoding="utf-8")
    mass, random = loss_plot.lines(restrictions())
    assert (mass["shares"], mass["medians"]) == ([0, 10, 100], [0, -0.25, 2])
    assert (random["low"], random["high"]) == ([0, 0.25, 2], [0, 1, 2])
