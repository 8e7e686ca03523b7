"""What `make` promises without setting anything up."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def make(folder: Path, *targets: str) -> str:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    shutil.copy(ROOT / "Makefile", folder)
    done = subprocess.run(
        ["make", "-C", str(folder), *targets], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_clean_removes_what_make_made_and_nothing_else(tmp_path: Path) -> None:
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    tool_caches = [name.strip("/") for name in ignored if name.startswith(".") and "cache" in name]
    assert len(tool_caches) == 4
    made = [*tool_caches, ".hypothesis", ".venv", "build", "src/multihead/ops/__pycache__"]
    kept = ["src/multihead/ops", "benchmarks/results", "tests"]
    for name in (*made, *kept):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "file").touch()
    (tmp_path / "heads.html").touch()
    make(tmp_path, "clean")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("file")}
    assert left == {f"{name}/file" for name in kept}
    assert not (tmp_path / "heads.html").exists()


def test_the_list_names_every_target(tmp_path: Path) -> None:
    listed = {
        line.split()[0:2][1]
        for line in make(tmp_path, "help").splitlines()
        if line[:7] == "  make "
    }
    phony = next(
        line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:")
    )
    assert listed == set(phony.split()[1:])
