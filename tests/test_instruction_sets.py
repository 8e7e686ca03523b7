"""The kernel in every instruction set that this processor runs."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import checks
import multihead as mh
from cases import CASES, EDGES, Case
from multihead.ops.backends import native
from requires import require

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _flags() -> set[str]:
    """The processor's own, and its maker."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        pytest.skip("/proc/cpuinfo is needed")
    lines = cpuinfo.read_text().splitlines()
    told = ("flags", "vendor_id")
    return {
        word for name in told for line in lines if line.startswith(name) for word in line.split()
    }


def _expected_sets() -> list[str]:
    """What the processor's own flags say that it runs."""
    flags = _flags()
    needs = {
        "baseline": set[str](),
        "avx2": {"avx2", "fma"},
        "avx512": {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "avx512_bf16": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"},
        "avx512_amx": {"avx512f", "avx512_bf16", "amx_tile", "amx_bf16"},
    }
    return [name for name, needed in needs.items() if needed <= flags]


def test_every_set_of_the_processor_is_there() -> None:
    require("native")
    assert native.instruction_sets() == _expected_sets()


def test_pairs_are_multiplied_where_that_is_the_fastest() -> None:
    """Intel's processors with tiles are slow at it, also where a virtual machine hides them."""
    require("native")
    sets = native.instruction_sets()
    slow = {"GenuineIntel", "avx512_fp16"} <= _flags()
    expected = [name for name in sets if not (slow and name == "avx512_bf16")][-1]
    assert native.instruction_set(torch.bfloat16) == expected


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
    if "avx512_amx" not in native.instruction_sets():
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
