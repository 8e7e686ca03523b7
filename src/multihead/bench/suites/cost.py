"""The suite `cost`: peak memory and time as predicted, beside what fresh processes measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from multihead.bench import cost_prediction
from multihead.bench.case import Entry
from multihead.bench.contest import Setting
from multihead.bench.cost_prediction import Work
from multihead.bench.cost_probe import DECODE, FULL, PREFILL, QUICK, TRAIN
from multihead.bench.suites.row import Row
from multihead.errors import MultiheadError

# Blocks beyond this come from the system and go back to it at once. By default the C library
# keeps what was freed, up to a size that it finds out as it goes: its own choice, shown apart.
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

_DTYPE = "float32"


def rows(*, quick: bool) -> list[Row]:
    """A prompt, a step of decoding, and a layer's training, each at several lengths."""
    shape = QUICK if quick else FULL
    lengths = {
        PREFILL: (64, 96) if quick else (512, 2048, 8192),
        DECODE: (64, 96) if quick else (512, 2048, 8192),
        TRAIN: (64,) if quick else (1024, 2048, 4096),
    }
    works = [Work(kind, tokens, _DTYPE, shape) for kind in lengths for tokens in lengths[kind]]
    return [Row(work.name, partial(_measure, work)) for work in works]


def _measure(work: Work, setting: Setting) -> Entry:
    entry: Entry = {"name": work.name, "kind": work.kind, "tokens": work.tokens}
    entry |= {"dtype": work.dtype, "what": _what(work)}
    lean = _probe(work, setting, 0.0, _GIVE_BACK)
    usual = _probe(work, setting, setting.seconds, {})
    for found in (lean, usual):
        if "not_measurable" in found:
            return entry | {"not_measurable": found["not_measurable"]}
    return entry | _memory(work, lean, usual) | _time(work, usual, setting)


def _what(work: Work) -> str:
    layers, width = work.shape.layers, work.shape.block.embed_dim
    model = f"{layers} layers of {width}"
    return {
        PREFILL: f"{model}, a prompt of {work.tokens} tokens",
        DECODE: f"{model}, one token behind {work.tokens}",
        TRAIN: f"one layer of {width}, forward and backward, {work.tokens} tokens",
    }[work.kind]


def _memory(work: Work, lean: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    parts = cost_prediction.memory(work)
    predicted = sum(parts.values())
    return {
        "memory": {
            "predicted": predicted,
            "measured": lean["grown_bytes"],
            "ratio": predicted / max(1, lean["grown_bytes"]),
            "parts": parts,
            "usual_allocator": usual["grown_bytes"],
            "python_and_torch": lean["base_bytes"],
        }
    }


def _time(work: Work, found: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    parts = cost_prediction.seconds(work, found["pieces"])
    predicted, measured = sum(parts.values()), found["time"]["median"]
    if work.kind == DECODE:
        assert setting.read_gb_per_s is not None
        limit, rate = "memory read", cost_prediction.moved_bytes(work) / measured / 1e9
        share = rate / setting.read_gb_per_s
    else:
        limit, rate = "FMA", cost_prediction.flops(work) / measured / 1e9
        share = rate / setting.limits.fma
    return {
        "seconds": {
            "predicted": predicted,
            "measured": found["time"],
            "ratio": predicted / measured,
            "parts": parts,
        },
        "pieces": found["pieces"],
        "limit": limit,
        "limit_share": share,
    }


def _probe(
    work: Work, setting: Setting, seconds: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    size = "full" if work.shape is FULL else "quick"
    command = [
        *(sys.executable, "-m", "multihead.bench.cost_probe", work.kind, str(work.tokens)),
        *(work.dtype, str(setting.threads), str(seconds), size),
    ]
    variables = {**os.environ, "OMP_NUM_THREADS": str(setting.threads), **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise MultiheadError(f"{work.name} was not measured: {done.stderr.strip()[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found
