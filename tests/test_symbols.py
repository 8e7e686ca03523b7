"""What the native build may leave for the linker to merge or export."""

from __future__ import annotations

import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from builds import small_build
from requires import require, tool

GUARD = Path(__file__).parent.parent / "csrc" / "no_weak_symbols.cmake"


def _nm(*arguments: str) -> list[str]:
    require("compiler")
    command = ["nm", "--defined-only", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_extension_exports_no_function_of_its_own_but_the_entry_point() -> None:
    require("native")
    spec = find_spec("multihead._native")
    assert spec is not None
    assert spec.origin is not None
    functions = [
        name
        for _, kind, name in (line.split() for line in _nm("--dynamic", spec.origin))
        if kind in "TWi"
    ]
    assert "PyInit__native" in functions
    assert not [name for name in functions if "multihead" in name]


@pytest.mark.parametrize(
    ("source", "passes"),
    [
        ("int plain(int x) { return x; }", True),
        ("namespace { template <class T> T f(T x) { return x; } } int g() { return f(1); }", True),
        ("template <class T> T f(T x) { return x; } int g() { return f(1); }", False),
        ("inline int f() { return 1; } int (*g)() = f;", False),
    ],
)
def test_the_guard_of_the_build_refuses_weak_symbols(
    tmp_path: Path, source: str, passes: bool
) -> None:
    require("compiler")
    (tmp_path / "unit.cpp").write_text(source)
    compile_unit = ["c++", "-O0", "-c", "unit.cpp", "-o", "unit.o"]
    subprocess.run(compile_unit, cwd=tmp_path, check=True)
    guard = [str(tool("cmake")), "-D", "NM=nm", "-D", "OBJECT=unit.o", "-P", str(GUARD)]
    result = subprocess.run(guard, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode == 0) is passes, result.stderr
    assert passes or "weak symbols" in result.stderr


@pytest.mark.slow
def test_the_guard_has_seen_every_object_of_the_build() -> None:
    """Each instruction set's two units; the stamps are made by the guard and precede the link."""
    build = small_build()
    objects = {path.parents[2].name for path in build.folder.rglob("csrc/isa/unit.cpp.o")}
    units = {f"unit_{name}{form}" for name in ("baseline", "avx2") for form in ("", "_narrow")}
    assert objects == {f"{unit}.dir" for unit in units}
    stamps = build.folder.glob("*.has_no_weak_symbols")
    assert {stamp.stem for stamp in stamps} == units
