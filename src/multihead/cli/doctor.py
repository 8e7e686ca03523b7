"""`multihead doctor`: what this machine and this installation can do, and what is missing."""

from __future__ import annotations

import os
import platform
from typing import Any

from multihead.cli.extras import EXTRAS, extra_problems, install_command, installed_version
from multihead.cli.output import print_json, stdout_console
from multihead.errors import BackendError, ModelError

_PACKAGES = ("torch", "numpy", "transformers", "gguf", "typer", "rich")
_ISA_VARIABLE = "MULTIHEAD_ISA"
_NOT_BUILT = (
    "Attention works all the same, exact and in linear memory, by torch's operations (chunked), "
    "but slower. To build the kernels, install multihead again where there is a C++ compiler: "
    "pip install --force-reinstall --no-deps multihead"
)


def run(*, as_json: bool) -> None:
    """Print what `examine` finds, as text or as one JSON document."""
    findings = examine()
    if as_json:
        print_json(findings)
        return
    from multihead.cli.terminal.doctor import print_findings

    print_findings(stdout_console(), findings)


def examine() -> dict[str, Any]:
    """Everything that doctor says, as JSON values."""
    import torch

    from multihead import __version__
    from multihead.machine import processor_name, usable_processors

    return {
        "versions": {
            "multihead": __version__,
            "python": platform.python_version(),
            **{package: installed_version(package) for package in _PACKAGES},
        },
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "usable_processors": usable_processors(),
        "threads": torch.get_num_threads(),
        "native": _native(),
        "backends": {name: _backends(name) for name in ("float32", "bfloat16")},
        "extras": [_extra(name) for name in EXTRAS],
        "sample_model": _sample_model(),
    }


def _native() -> dict[str, Any]:
    """The extension: the build, the instruction sets it can run here, and the one that serves."""
    import torch

    from multihead.ops.backends import native

    held, left_out = native.built_sets()
    found: dict[str, Any] = {
        "built": native.is_built(),
        "build": native.build_info(),
        "built_sets": held,
        "sets_left_out": left_out,
        "instruction_sets": native.instruction_sets(),
        "chosen": {},
        "requested": os.environ.get(_ISA_VARIABLE) or None,
        "problem": None,
    }
    if not native.is_built():
        found["problem"] = f"not built. {_NOT_BUILT}"
        return found
    try:
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            found["chosen"][name] = native.instruction_set(dtype)
    except BackendError as error:
        found["problem"] = f"built, but cannot run: {error}"
    return found


def _backends(dtype: str) -> list[dict[str, Any]]:
    """Every backend's answer to a small causal call on the CPU."""
    import torch

    from multihead import Causal, explain

    query = torch.zeros(1, 2, 3, 5, dtype=getattr(torch, dtype))
    answer = explain(query, query, query, mask=Causal())
    return [
        {"name": name, "chosen": name == answer.backend, "reasons": list(reasons)}
        for name, reasons in answer.reasons.items()
    ]


def _extra(name: str) -> dict[str, Any]:
    problems = extra_problems(name)
    return {
        "name": name,
        "packages": list(EXTRAS[name]),
        "problems": problems,
        "install": install_command(name) if problems else None,
    }


def _sample_model() -> dict[str, Any]:
    from multihead.integrations.loading import SMOLLM2, smollm2_file

    try:
        path = smollm2_file()
    except ModelError as error:
        return {"name": SMOLLM2, "file": None, "bytes": None, "problem": str(error)}
    return {"name": SMOLLM2, "file": str(path), "bytes": path.stat().st_size, "problem": None}
