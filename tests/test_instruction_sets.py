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

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Lengths and widths around a vector (4, 8, 16 lanes), a tile (8, 24, 32 rows) and a key block (64).
EDGES = [
    Case("one row", query_length=1, key_length=67, head_dim=16, value_dim=3, mask=mh.Causal()),
    Case("below a tile", query_length=23, key_length=63, head_dim=15, value_dim=17),
    Case("a tile", query_length=32, key_length=64, head_dim=8, value_dim=16, mask=mh.Causal()),
    Case("above a tile", query_length=33, key_length=65, head_dim=7, value_dim=8, softcap=1.3),
    Case("two blocks", query_length=47, key_length=127, head_dim=3, value_dim=9, mask=mh.Causal()),
    Case("three blocks", query_length=67, key_length=131, head_dim=17, value_dim=33, sinks=True),
    Case(
        "chunks",
        batch=1,
        heads=6,
        kv_heads=2,
        query_length=2,
        key_length=2300,
        head_dim=24,
        value_dim=40,
        softcap=3.0,
        sinks=1.0,
        mask=mh.Causal() & mh.Window(1500, None, 3),
    ),
    Case(
        "chunks of ragged rows",
        heads=16,
        kv_heads=4,
        query_length=1,
        key_length=2050,
        bias=(1, 16, 1, 2050),
        mask=mh.KeyLengths(torch.tensor([2049, 700])) & mh.Causal(),
    ),
    Case(
        "a chunk that is hidden",
        heads=2,
        kv_heads=1,
        query_length=3,
        key_length=2100,
        bias="alibi",
        mask=mh.Window(40, None, keep_first=1),
    ),
    Case(
        "side by side",
        heads=6,
        kv_heads=2,
        query_length=13,
        key_length=150,
        bias="alibi",
        sinks=1.0,
        mask=mh.Window(torch.tensor([3, 9, 70, 0, 20, 149]), 0),
    ),
    Case(
        "side by side with dense",
        heads=4,
        kv_heads=2,
        query_length=11,
        key_length=140,
        bias=(2, 4, 11, 140),
        mask=mh.Dense(torch.rand((2, 4, 1, 140), generator=torch.Generator().manual_seed(2)) < 0.6),
    ),
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
        "avx512_amx": {"avx512f", "avx512_bf16", "amx_tile", "amx_bf16"},
    }
    return [name for name, needed in needs.items() if needed <= flags]


@functools.cache
def _sets() -> list[str]:
    return native.instruction_sets()


@pytest.fixture(params=["baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each set in turn; the choice is undone afterwards."""
    require("native")
    name = str(request.param)
    if name not in _sets():
        pytest.skip(f"this processor does not run {name}")
    native.use_instruction_set(name)
    yield name
    native.use_instruction_set(None)
    native.use_decoder(True)


def test_every_set_of_the_processor_is_there() -> None:
    require("native")
    assert native.instruction_sets() == _expected_sets()


def test_the_chosen_set_serves(instruction_set: str) -> None:
    assert native.instruction_set(torch.bfloat16) == instruction_set
    bfloat16_alone = instruction_set in ("avx512_bf16", "avx512_amx")
    single = "avx512" if bfloat16_alone else instruction_set
    assert native.instruction_set(torch.float32) == single


_compute = checks.run
_reference = functools.cache(checks.run)


def _run(case: Case, dtype: torch.dtype, backend: str) -> mh.AttentionResult:
    """`checks.run`, which computes what all sets are compared with once."""
    return (_reference if backend == "reference" else _compute)(case, dtype, backend)


@pytest.mark.parametrize("decoder", [True, False], ids=["few rows decode", "all in tiles"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_case(
    instruction_set: str, dtype: torch.dtype, decoder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype != torch.bfloat16 and instruction_set in ("avx512_bf16", "avx512_amx"):
        assert native.instruction_set(dtype) == "avx512"  # these sets hold bfloat16 alone
        return
    assert native.instruction_set(dtype) == instruction_set
    monkeypatch.setattr(checks, "run", _run)
    native.use_decoder(decoder)
    for case in (*CASES, *EDGES):
        try:
            checks.check_forward(case, dtype, "native")
        except AssertionError as error:
            pytest.fail(f"{case.name}: {error}")


def test_an_unknown_set_is_refused() -> None:
    require("native")
    with pytest.raises(mh.BackendError, match=r"'avx9'; this processor and build have baseline"):
        native.use_instruction_set("avx9")


def test_tiles_that_the_kernel_refuses_are_not_used() -> None:
    """Linux refuses them where a signal stack has no room for their 8 KiB."""
    require("native")
    if "avx512_amx" not in _sets():
        pytest.skip("this processor does not run avx512_amx")
    program = (
        "import ctypes, torch\n"
        "from multihead.ops.backends import native\n"
        "class Stack(ctypes.Structure):\n"
        "    _fields_ = [('at', ctypes.c_void_p), ('flags', ctypes.c_int), ('n', ctypes.c_size_t)]"
        "\n"
        "memory = ctypes.create_string_buffer(8192)\n"
        "stack = Stack(ctypes.addressof(memory), 0, 8192)\n"
        "assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0\n"
        "print(native.instruction_set(torch.bfloat16), native.peak('amx', 1))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MULTIHEAD_ISA"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["avx512", "None"]


def test_torch_and_the_kernels_take_turns_with_the_tiles() -> None:
    require("native")
    query, key, value = torch.randn(3, 2, 8, 131, 64).bfloat16().unbind()
    matrix = torch.randn(259, 259).bfloat16()
    ours = mh.attention(query, key, value, backend="native")
    theirs = matrix @ matrix
    for _ in range(3):
        assert torch.equal(mh.attention(query, key, value, backend="native"), ours)
        assert torch.equal(matrix @ matrix, theirs)
        torch.nn.functional.scaled_dot_product_attention(query, key, value)


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
