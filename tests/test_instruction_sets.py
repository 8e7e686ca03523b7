"""The kernel in every instruction set that this processor runs."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import checks
import multihead as mh
from cases import CASES, Case
from multihead.ops.backends import native
from requires import require

DTYPES = [torch.float32, torch.bfloat16]

# Lengths and widths around a vector (4, 8, 16 lanes), a tile (8, 24, 32 rows) and a key block (64).
EDGES = [
    Case("one row", query_length=1, key_length=67, head_dim=16, value_dim=3, mask=mh.Causal()),
    Case("below a tile", query_length=23, key_length=63, head_dim=15, value_dim=17),
    Case("a tile", query_length=32, key_length=64, head_dim=8, value_dim=16, mask=mh.Causal()),
    Case("above a tile", query_length=33, key_length=65, head_dim=7, value_dim=8, softcap=1.3),
    Case("two blocks", query_length=47, key_length=127, head_dim=3, value_dim=9, mask=mh.Causal()),
    Case("three blocks", query_length=67, key_length=131, head_dim=17, value_dim=33, sinks=True),
    Case("wide", query_length=37, key_length=71, head_dim=80, value_dim=80, mask=mh.Causal()),
    Case("wider", query_length=35, key_length=73, head_dim=192, value_dim=128, mask=mh.Causal()),
    Case("widest", query_length=5, key_length=69, head_dim=576, value_dim=512, mask=mh.Causal()),
    Case(
        "window over blocks",
        heads=4,
        kv_heads=2,
        query_length=211,
        key_length=223,
        head_dim=11,
        value_dim=13,
        bias="alibi",
        mask=mh.Window(70, 3, keep_first=66),
    ),
    Case(
        "bias over blocks",
        query_length=70,
        key_length=139,
        bias="hiding",
        layout="every second element",
        mask=mh.Causal(),
    ),
    Case(
        "documents over blocks",
        query_length=199,
        key_length=199,
        mask=mh.Documents(torch.arange(199).repeat(2, 1) // torch.tensor([[50], [67]]))
        & mh.Causal(),
    ),
    Case(
        "dense over blocks",
        query_length=41,
        key_length=193,
        mask=mh.Dense(
            torch.rand((2, 1, 41, 193), generator=torch.Generator().manual_seed(1)) < 0.3
        ),
    ),
]


def _expected_sets() -> list[str]:
    """What the processor's own flags say that it runs."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("/proc/cpuinfo is needed")
    lines = cpuinfo.read_text().splitlines()
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    needs = {
        "baseline": set[str](),
        "avx2": {"avx2", "fma"},
        "avx512": {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "avx512_bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"},
    }
    return [name for name, needed in needs.items() if needed <= flags]


@functools.cache
def _sets() -> list[str]:
    return native.instruction_sets()


@pytest.fixture(params=["baseline", "avx2", "avx512", "avx512_bf16"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each set in turn; the choice is undone afterwards."""
    require("native")
    name = str(request.param)
    if name not in _sets():
        pytest.skip(f"this processor does not run {name}")
    native.use_instruction_set(name)
    yield name
    native.use_instruction_set(None)


def test_every_set_of_the_processor_is_there() -> None:
    require("native")
    assert native.instruction_sets() == _expected_sets()


def test_the_chosen_set_serves(instruction_set: str) -> None:
    assert native.instruction_set(torch.bfloat16) == instruction_set
    single = "avx512" if instruction_set == "avx512_bf16" else instruction_set
    assert native.instruction_set(torch.float32) == single


_compute = checks.run
_reference = functools.cache(checks.run)


def _run(case: Case, dtype: torch.dtype, backend: str) -> mh.AttentionResult:
    """`checks.run`, which computes what all sets are compared with once."""
    return (_reference if backend == "reference" else _compute)(case, dtype, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_case(
    instruction_set: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.instruction_set(dtype) != instruction_set:
        pytest.skip(f"{instruction_set} holds bfloat16 alone")
    monkeypatch.setattr(checks, "run", _run)
    for case in (*CASES, *EDGES):
        try:
            checks.check_forward(case, dtype, "native")
        except AssertionError as error:
            pytest.fail(f"{case.name}: {error}")


def test_an_unknown_set_is_refused() -> None:
    require("native")
    with pytest.raises(mh.BackendError, match=r"'avx9'; this processor and build have baseline"):
        native.use_instruction_set("avx9")


def test_the_environment_chooses() -> None:
    require("native")
    program = (
        "import torch, multihead as mh\n"
        "from multihead.ops.backends import native\n"
        "x = torch.ones(1, 1, 3, 4)\n"
        "try:\n"
        "    mh.attention(x, x, x, backend='native')\n"
        "    print(native.instruction_set())\n"
        "except mh.BackendError as error:\n"
        "    print(error)\n"
    )
    for name, said in (("baseline", "baseline"), ("sparc", "MULTIHEAD_ISA names the instruction")):
        result = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "MULTIHEAD_ISA": name},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.startswith(said)
