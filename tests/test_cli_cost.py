"""`multihead cost`: what it prints, its JSON, tables and pictures, and its errors."""

from __future__ import annotations

import csv
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from multihead import cost
from multihead.cli import main, sizes
from requires import require

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 101,
    "max_position_embeddings": 512,
}
PLAIN = ("--d-model", "1024", "--heads", "8")


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(LLAMA))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = main(["cost", *arguments])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return printed.out


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, *arguments, "--json"))
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    assert main(["cost", *arguments]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("multihead: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("context", "products", "table"),
    [
        ("1k", 134217728, 2097152),
        ("8k", 8589934592, 134217728),
        ("32k", 137438953472, 2147483648),
        ("128k", 2199023255552, 34359738368),
    ],
)
def test_one_head_of_128(
    context: str, products: int, table: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(
        capsys, "--d-model", "128", "--heads", "1", "--context", context, "--dtype", "fp16"
    )
    assert found["prefill"]["dense_operations"]["scores"] == products
    assert found["memory"]["score_tables"]["head"] == table
    assert found["parameters"]["q"] + found["parameters"]["o"] == 2 * 128**2


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    "asked",
    [
        (),
        ("--device", "h100", "--memory", "24GiB"),
        ("--compare", "mha,gqa:2,mqa,mla", "--device", "a100", "--memory", "1GB"),
        ("--sweep", "heads"),
        ("--sweep", "context", "--device", "l4", "--memory", "1GB"),
        ("--sweep", "head-dim", "--memory", "1GB"),
        ("--what-if", "heads=16", "--what-if", "context=1k"),
        ("--cache", "int8", "--batch", "4"),
    ],
)
def test_every_view_fits_the_terminal(
    asked: tuple[str, ...],
    width: int,
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    printed = run(capsys, config, *asked)
    assert all(len(line.rstrip()) <= width for line in printed.splitlines())
    assert "…" not in printed
    assert "3 layers: 8 heads of 8 on 4 KV heads (GQA)" in printed


def test_the_report_says_what_it_counts(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, config)
    words = " ".join(printed.split())
    for said in (
        "512 tokens",
        "A product is one multiply-add",
        "GiB are 2^10, 2^20, 2^30 bytes",
        "not built",
        "parameters and products are the same for any number of heads",
        "depends on KV heads x their width, not on the heads",
        "Vaswani et al. 2017, table 3 (A)",
        "lower bound",
    ):
        assert said in words


def test_json_is_one_document_of_exact_numbers(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = document(capsys, config, "--context", "1k", "--batch", "2", "--dtype", "bf16")
    assert found["model"]["name"] == "tiny"
    assert found["setting"]["context"] == 1024
    assert found["memory"]["cache"] == 2 * 3 * 4 * 8 * 1024 * 2 * 2
    assert (
        found["parameters"]["total"]
        == 2 * 101 * 64 + 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64
    )
    assert found["prefill"]["visible_pairs"] == [8 * 1024 * 1025 // 2] * 3
    assert found["setting"]["device"] is None
    assert found["decode"]["estimate"]["seconds"] is None


def test_folders_and_files_are_one(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, config) == document(capsys, str(Path(config).parent))


def test_compare(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, config, "--compare", "mha,gqa:2,mqa,mla:8+4")
    kept = [column["kv_cache_bytes"] for column in found["columns"]]
    assert kept == [3 * 512 * 2 * numbers for numbers in (128, 32, 16, 12)]
    assert [column["name"] for column in found["columns"]] == ["mha", "gqa:2", "mqa", "mla:8+4"]


def test_sweep_over_heads(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    columns = document(capsys, config, "--sweep", "heads")["columns"]
    assert [column["heads"] for column in columns] == [2, 4, 8, 16, 32, 64]
    for same in ("parameters", "prefill_products", "kv_cache_bytes"):
        assert len({column[same] for column in columns}) == 1, same
    for grows in ("exponentials", "score_table_bytes"):
        assert [column[grows] / columns[0][grows] for column in columns] == [1, 2, 4, 8, 16, 32]


def test_sweep_over_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    columns = document(capsys, *PLAIN, "--sweep", "context", "--context", "5000")["columns"]
    assert [column["context"] for column in columns] == [1024, 2048, 4096, 5000]
    short = document(capsys, *PLAIN, "--sweep", "context", "--context", "100")["columns"]
    assert [column["context"] for column in short][-1] == 100


@pytest.mark.parametrize("asked", [("--compare", "mha"), ("--sweep", "heads"), ()])
def test_every_view_names_the_device_and_the_memory(
    asked: tuple[str, ...], config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    use = [line for line in run(capsys, config, *asked).splitlines() if "batch 1" in line]
    assert use == ["  512 tokens · batch 1 · bfloat16 · growing cache"]
    printed = run(capsys, config, *asked, "--device", "l4", "--memory", "1GiB")
    assert use[0] + " · L4 · 1.00 GiB of memory\n" in printed


def test_layers_that_read_alike_stand_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"d_model": 64, "d_ff": 96, "d_kv": 8, "num_heads": 8, "num_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "vocab_size": 9} | sizes))
    assert "  3 layers: 8 heads" in run(capsys, str(tmp_path))  # the first has T5's score biases


def test_a_model_without_a_head_has_no_logits(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "forward with all logits" in " ".join(run(capsys, config).split())
    assert "logits" not in run(capsys, *PLAIN)


def test_words_are_of_the_model_at_hand(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def words(*arguments: str) -> str:
        return " ".join(run(capsys, *arguments).split())

    encoder = (*PLAIN, "--encoder")
    for sweep in ("heads", "context"):
        assert "cache" in words(config, "--sweep", sweep)
        assert "cache" not in words(*encoder, "--sweep", sweep)
    assert "at the same width?" in words(config, "--sweep", "heads")
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    experts = {"first_k_dense_replace": 3, "moe_intermediate_size": 8, "n_routed_experts": 2}
    path = tmp_path / "latent.json"
    deepseek = LLAMA | latent | experts | {"model_type": "deepseek_v3", "num_experts_per_tok": 1}
    path.write_text(json.dumps(deepseek))
    assert "each as wide as now?" in words(str(path), "--sweep", "heads")
    assert "1 token · batch 1" in words(config, "--context", "1")
    timed = ("--device", "h100")
    for view in ((), ("--sweep", "heads"), ("--compare", "mha")):
        assert "exponentials are not timed" in words(config, *view, *timed)
        assert "not timed" not in words(config, *view)


def test_what_fits_in_words(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fits(context: str, memory: str) -> str:
        return " ".join(run(capsys, config, "--context", context, "--memory", memory).split())

    assert "or 1 row of 512 tokens" in fits("512", "500KiB")
    assert "No row of 512 tokens fits in training." in fits("512", "500KiB")
    assert re.search(r"In training fit [1-9][0-9,]* rows of 512 tokens", fits("512", "1GiB"))


def test_what_if(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, config, "--what-if", "heads=16", "--what-if", "batch=3,dtype=fp32")
    before, after = found["columns"]
    assert (before["heads"], after["heads"], after["batch"]) == (8, 16, 3)
    assert after["kv_cache_bytes"] == 6 * before["kv_cache_bytes"]
    assert after["exponentials"] == 6 * before["exponentials"]
    printed = run(capsys, config, "--what-if", "heads=16")
    assert "difference" in printed
    assert "same" in printed
    changed = run(capsys, config, "--what-if", "context=128k,dtype=fp32")
    assert "context 512 to 131,072, dtype bfloat16 to float32" in " ".join(changed.split())


def test_times(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = document(capsys, config, "--peak-tflops", "2", "--bandwidth", "100")
    device = given["setting"]["device"]
    assert (device["flops"], device["bandwidth"], device["ridge"]) == (2e12, 1e11, 20)
    for part in given["prefill"]["estimate"]["parts"].values():
        assert part["seconds"] == max(part["flops"] / 2e12, part["bytes"] / 1e11)
    preset = document(capsys, config, "--device", "h100", "--bandwidth", "3000")
    assert preset["setting"]["device"]["bandwidth"] == 3e12
    assert preset["setting"]["memory"] == 80 * 10**9


def test_measured_limits(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require("native")
    monkeypatch.setattr("multihead.bench.limits.read_bandwidth", lambda: 12.5)
    device = document(capsys, config, "--measure", "--dtype", "fp32")["setting"]["device"]
    assert device["flops"] > 1e9
    assert device["bandwidth"] == 12.5e9
    assert "measured now" in device["source"]


def test_csv_of_a_report_and_of_a_comparison(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cost.csv"
    assert f"Table: {path}" in run(capsys, config, "--csv", str(path))
    rows = {row["quantity"]: row["value"] for row in csv.DictReader(path.open())}
    assert int(rows["parameters.total"]) > 0
    assert int(rows["prefill.visible_pairs.2"]) == 8 * 512 * 513 // 2
    assert rows["memory.fit"] == ""
    run(capsys, config, "--compare", "mha,mqa", "--csv", str(path))
    columns = list(csv.DictReader(path.open()))
    assert [column["name"] for column in columns] == ["mha", "mqa"]
    assert int(columns[0]["kv_cache_bytes"]) == 8 * int(columns[1]["kv_cache_bytes"])
    assert [entry.name for entry in tmp_path.iterdir()].count("cost.csv") == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_a_table_is_written_whole_or_not_at_all(
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "cost.csv"
    path.write_text("before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", fail)
    error = refusal(capsys, config, "--csv", str(path))
    assert "No space left" in error
    assert path.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("asked", [(), ("--sweep", "heads"), ("--compare", "mha,mqa")])
def test_plots(
    asked: tuple[str, ...], config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "cost.svg"
    assert f"Plot: {path}" in run(capsys, config, *asked, "--plot", str(path))
    assert path.read_bytes().startswith(b"<?xml")


def test_bars_of_many_kinds_are_told_apart() -> None:
    figures = pytest.importorskip("matplotlib.figure")
    from multihead.cli import cost_plot, cost_views

    model = cost.from_transformers(LLAMA)
    kinds = "mha,gqa:4,gqa:2,mqa,mla,mla:8+4,mla:4+2"
    figure = figures.Figure()
    cost_plot._draw_bars(figure, cost_views.compared(model, cost.Setting(64), kinds))
    handles, labels = figure.axes[0].get_legend_handles_labels()
    looks = {(bars[0].get_facecolor(), bars[0].get_hatch()) for bars in handles}
    assert len(looks) == len(labels) == 7


def test_a_plot_without_matplotlib_names_the_extra(
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    error = refusal(capsys, config, "--plot", str(tmp_path / "cost.png"), status=1)
    assert "multihead[plot]" in error


def test_smollm2(capsys: pytest.CaptureFixture[str]) -> None:
    require("models")
    pytest.importorskip("gguf")
    found = document(capsys, "smollm2")
    assert found["parameters"]["total"] == 134515008
    assert found["setting"]["context"] == 8192


def test_the_text_model_of_a_model_that_also_sees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": LLAMA}))
    assert "text model alone" in document(capsys, str(path))["model"]["name"]


def test_a_head_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    tied = document(capsys, *PLAIN, "--vocab", "101")["parameters"]
    untied = document(capsys, *PLAIN, "--vocab", "101", "--untied")["parameters"]
    assert (tied["head"], untied["head"]) == (0, 101 * 1024)


def test_an_encoder(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, *PLAIN, "--encoder", "--layers", "2")
    assert "KV cache" not in printed
    assert "one token more" not in printed
    assert document(capsys, *PLAIN, "--encoder")["decode"] is None
    local = run(capsys, *PLAIN, "--encoder", "--window", "64")
    assert "window 64 and 63 ahead" in local
    assert "every token sees" not in local
    found = document(capsys, *PLAIN, "--encoder", "--window", "3", "--context", "5")
    assert found["prefill"]["visible_pairs"] == [(3 + 4 + 5 + 4 + 3) * 8]
    fits = " ".join(run(capsys, *PLAIN, "--encoder", "--memory", "1TB").split())
    assert "an encoder keeps no cache" in fits
    assert re.search(r"In training fit [1-9][0-9,]* rows", fits)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_many_kinds_keep_their_names(
    width: int, config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    kinds = "mha,gqa:2,gqa:4,mqa,mla,mla:128+16,mla:256+32,mla:512+64"
    printed = run(capsys, config, "--compare", kinds)
    assert all(len(line.rstrip()) <= width for line in printed.splitlines())
    assert "…" not in printed
    assert printed.count("512+64") == 1
    assert "MLA's wider" in printed


def test_a_device_is_written_to_and_a_link_stays(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, link, pipe = tmp_path / "table", tmp_path / "link.csv", tmp_path / "pipe"
    target.write_text("before")
    link.symlink_to(target)
    run(capsys, config, "--csv", str(link))
    assert link.is_symlink()
    assert target.read_text().startswith("quantity,value")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run(capsys, config, "--csv", str(pipe))
    assert os.read(reader, 14) == b"quantity,value"
    assert pipe.is_fifo()
    writer = os.open(pipe, os.O_WRONLY)
    link.unlink()
    link.symlink_to(f"/proc/self/fd/{writer}")  # as /dev/stdout leads to a pipe
    if link.exists():
        run(capsys, config, "--csv", str(link))
    os.close(writer)
    os.close(reader)
    link.unlink()
    link.symlink_to(link)
    assert "leads nowhere" in refusal(capsys, config, "--csv", str(link))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--d-model and --heads"),
        (("--d-model", "12"), "--heads"),
        (("smollm2", "--heads", "4"), "--heads"),
        (("--d-model", "10", "--heads", "3"), "--head-dim"),
        (("--d-model", "12", "--heads", "4", "--kv-heads", "3"), "--kv-heads"),
        ((*PLAIN, "--context", "0"), "--context"),
        ((*PLAIN, "--context", "12q"), "--context"),
        ((*PLAIN, "--batch", "0"), "--batch"),
        ((*PLAIN, "--dtype", "int4"), "bf16"),
        ((*PLAIN, "--what-if", "dtype=int4"), "--what-if dtype='int4'"),
        ((*PLAIN, "--context", "9" * 400), "more than 18 digits"),
        ((*PLAIN, "--memory", "9" * 400 + "GB"), "more than 18 digits"),
        ((*PLAIN, "--device", "tpu"), "h100"),
        ((*PLAIN, "--device", "l4", "--dtype", "fp32"), "--peak-tflops"),
        ((*PLAIN, "--peak-tflops", "5"), "--bandwidth"),
        ((*PLAIN, "--peak-tflops", "0", "--bandwidth", "3"), "above 0"),
        ((*PLAIN, "--measure", "--device", "l4"), "--measure"),
        ((*PLAIN, "--memory", "24G"), "24GiB"),
        ((*PLAIN, "--compare", "linear"), "gqa:N"),
        ((*PLAIN, "--compare", ","), "--compare"),
        ((*PLAIN, "--compare", "gqa:3"), "divide"),
        ((*PLAIN, "--compare", "mha", "--sweep", "heads"), "one at a time"),
        ((*PLAIN, "--sweep", "depth"), "sweep"),
        ((*PLAIN, "--what-if", "heads=5"), "head_dim too"),
        ((*PLAIN, "--what-if", "depth=5"), "depth"),
        ((*PLAIN, "--what-if", "heads"), "heads=16"),
        ((*PLAIN, "--what-if", "heads=4,heads=2"), "twice"),
        ((*PLAIN, "--csv", "/nowhere/cost.csv"), "/nowhere"),
        ((*PLAIN, "--csv", "."), "folder"),
        ((*PLAIN, "--plot", "cost.gif"), ".png"),
        ((*PLAIN, "--cache", "lru"), "lru"),
        ((*PLAIN, "--encoder", "--cache", "int8"), "an encoder, which keeps no cache"),
    ],
)
def test_bad_usage_is_one_sentence(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"model_type": "mamba"}', "'mamba'"),
        ('{"model_type": "llama"}', "num_hidden_layers"),
        ("{", "cannot be read"),
        ("[]", "no object"),
    ],
)
def test_configs_that_cannot_be_counted(
    content: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert named in refusal(capsys, str(path), status=1)


def test_a_table_of_positions_bounds_the_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"n_embd": 12, "n_head": 3, "n_layer": 2, "n_positions": 64, "vocab_size": 99}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    assert "a table of 64 positions" in refusal(capsys, str(path), "--context", "65")
    run(capsys, str(path), "--context", "64")


def test_heads_that_do_not_divide_the_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 100, "num_attention_heads": 3, "num_hidden_layers": 1}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **sizes}))
    assert "3 heads do not divide" in refusal(capsys, str(path), status=1)


def test_models_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = refusal(capsys, str(tmp_path / "none.json"), status=1)
    assert "no file or folder" in missing
    assert "a config.json" in missing
    assert "nothing is ever downloaded" in refusal(capsys, "google/gemma-2-9b", status=1)
    assert "config.json" in refusal(capsys, str(tmp_path), status=1)


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("128k", 131072), ("1M", 1048576), ("131,072", 131072), ("1_000", 1000)],
)
def test_counts(text: str, count: int) -> None:
    assert sizes.parse_count(text, "--context") == count


@pytest.mark.parametrize(
    ("text", "count"),
    [("24GiB", 24 * 2**30), ("24gb", 24 * 10**9), ("1.5 MiB", 3 * 2**19), ("7B", 7)],
)
def test_bytes(text: str, count: int) -> None:
    assert sizes.parse_bytes(text, "--memory") == count


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2097152, "2.00 MiB"),
        (34359738368, "32.0 GiB"),
        (2**40 - 1, "1.00 TiB"),
    ],
)
def test_bytes_as_written(count: int, text: str) -> None:
    assert sizes.binary_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.446e-9, "2.45 ns"),
        (2e-8, "20.0 ns"),
        (9.996e-7, "1.00 µs"),
        (0.0, "0.00 ns"),
        (8.42e-5, "84.2 µs"),
        (0.0123, "12.3 ms"),
        (1.0, "1.00 s"),
        (600.0, "10.0 min"),
        (7200.0, "2.0 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert sizes.duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(131072, "128k"), (2**21, "2m"), (1000, "1,000")])
def test_tokens(count: int, text: str) -> None:
    assert sizes.short_tokens(count) == text
