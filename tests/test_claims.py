"""Every claim's quick run ends in the verdict expected here; docs/claims.md shows what was kept."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import page
import recording
from claim import Outcome, Table, Verdict, check_equal, lines
from multihead import MultiheadError
from requires import require

COUNTED = {
    "parameters": Outcome.LIMITS,
    "reshape": Outcome.FAILS,
    "softmax_rows": Outcome.HOLDS,
    "identical_heads": Outcome.LIMITS,
    "linear_memory": Outcome.LIMITS,
    "crossover": Outcome.HOLDS,
}
# What has to be trained, or looked for in real models.
LEARNED: dict[str, Outcome] = {
    "one_ranking": Outcome.HOLDS,
    "head_rank": Outcome.FAILS,
    "head_size": Outcome.LIMITS,
    "language_heads": Outcome.LIMITS,
    "kv_sharing": Outcome.LIMITS,
    "cat_mat": Outcome.LIMITS,
    "pruning": Outcome.LIMITS,
}
# Where the quick run is too short to see what the full one does: MQA's loss still falls as MHA's.
QUICK = {"kv_sharing": Outcome.HOLDS}
# Packages with models, which not every machine has.
NEEDS = {"cat_mat": ("models", "minilm"), "pruning": ("models",)}

EXPECTED = COUNTED | LEARNED
NAMES = page.names()
KEPT = recording.load_all()
PAGE = page.PAGE.read_text(encoding="utf-8")


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_claim_has_an_expected_verdict_and_a_place_on_the_page() -> None:
    assert set(EXPECTED) == set(NAMES) <= set(page.ORDER)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("one_thread")
def test_the_quick_run_finds_what_is_expected(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for package in NEEDS.get(name, ()):
        require(package)
    module = script(name)
    verdict = module.measure(True)
    assert verdict.outcome == QUICK.get(name, EXPECTED[name]), verdict.finding
    assert re.search(r"\d", verdict.finding), "a finding has figures"
    assert verdict.table.rows
    shown = lines(module.CLAIM, verdict)
    assert max(len(line) for text in shown for line in text.splitlines()) <= 100
    result = recording.document(module.CLAIM, verdict, 1.0)
    first = recording.picture(result, module.draw, tmp_path).read_bytes()
    assert recording.digest(result).encode() in first
    assert recording.picture(result, module.draw, tmp_path).read_bytes() == first


@pytest.mark.parametrize("name", NAMES)
def test_a_script_reads_like_an_experiment(name: str) -> None:
    path = Path(str(script(name).__file__))
    text = path.read_text(encoding="utf-8")
    defined = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    assert {"measure", "draw"} <= set(defined)
    assert text.endswith('if __name__ == "__main__":\n    main(CLAIM, measure, draw)\n')
    assert script(name).CLAIM.name == name
    assert len(text.splitlines()) <= 200


def test_all_claims_fit_their_budgets() -> None:
    claims = [script(name).CLAIM for name in NAMES]
    assert sum(claim.seconds for claim in claims) <= 45 * 60
    assert sum(claim.quick_seconds for claim in claims) <= 3 * 60


def test_the_page_is_that_of_the_results() -> None:
    assert page.fill_page(PAGE, KEPT) == PAGE, "run `make claims`"


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_result_is_of_todays_script(name: str) -> None:
    result, claim = KEPT[name], script(name).CLAIM
    for field in ("title", "text", "method"):
        assert result[field] == getattr(claim, field), "run `make claims`"
    assert result["outcome"] == EXPECTED[name]
    assert result["commit"]
    assert result["machine"]["processor"]
    assert result["command"] == f"python examples/claims/{name}.py"


@pytest.mark.parametrize("name", KEPT)
def test_a_kept_picture_is_that_of_its_result(name: str) -> None:
    picture = (recording.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert recording.digest(KEPT[name]) in picture, "run `make claims`"


def test_filling_replaces_what_is_between_the_markers_alone() -> None:
    text = "a\n<!-- claims: each -->\ntyped 9.9\n<!-- end claims -->\nb\n"
    filled = page.fill_page(text, {})
    assert filled == "a\n<!-- claims: each -->\n<!-- end claims -->\nb\n"
    assert "Not run yet: " in page.fill_page(text.replace("each", "summary"), {})


def test_agreement_is_to_the_digit() -> None:
    check_equal("products", 4, 4)
    with pytest.raises(MultiheadError, match=r"products: 4 instead of 5\."):
        check_equal("products", 4, 5)


def test_a_table_has_no_ragged_rows() -> None:
    with pytest.raises(ValueError, match="a row of 1 cells under 2 columns"):
        Table(("a", "b"), (("1",),))


def test_a_result_outlives_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "RESULTS", tmp_path)
    claim = script("parameters").CLAIM
    verdict = Verdict(
        Outcome.FAILS,
        "It is 3.",
        Table(("a",), (("3",),)),
        {"a": (1, 2), "b": {3: 0.1}},
        "1",
        0,
        "-",
    )
    result = recording.document(claim, verdict, 1.23)
    assert recording.save(result) == tmp_path / "parameters.json"
    assert recording.load_all()["parameters"]["figures"] == {"a": [1, 2], "b": {"3": 0.1}}
    assert recording.digest(recording.load_all()["parameters"]) == recording.digest(result)


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    """What `python examples/claims` runs; `__main__` is another module here."""
    path = Path(page.__file__).with_name("__main__.py")
    spec = importlib.util.spec_from_file_location("run_claims", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "no claim is called 'nothing'; there are parameters"),
        (["--quick", "--record"], "--record keeps full runs, and --quick is less"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(
    arguments: list[str],
    said: str,
    runner: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["claims", *arguments])
    with pytest.raises(SystemExit, match="2"):
        runner.main()
    assert said in capsys.readouterr().err


def test_options_of_a_script_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("parameters")
    for arguments, said in (
        (["--quick", "--record"], "--record keeps full runs, and --quick is less"),
        (["--threads", "0"], "--threads must be 1 or more, got 0"),
    ):
        monkeypatch.setattr(sys, "argv", ["parameters.py", *arguments])
        with pytest.raises(SystemExit, match="2"):
            module.main(module.CLAIM, module.measure, module.draw)
        assert said in capsys.readouterr().err


def test_a_claim_that_fails_does_not_stop_the_others(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = []

    def end(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        run.append(Path(command[1]).stem)
        return subprocess.CompletedProcess(command, 1 if run[-1] == "reshape" else 0)

    monkeypatch.setattr(sys, "argv", ["claims", "--quick"])
    monkeypatch.setattr(subprocess, "run", end)
    assert runner.main() == 1
    assert run == NAMES
    assert "reshape failed: status 1" in capsys.readouterr().err


def test_a_claim_that_hangs_is_said(runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_LIMIT_SECONDS", 0.01)
    said = runner._run([sys.executable, "-c", "import time; time.sleep(5)"])
    assert said == "took more than 0.01 s"
