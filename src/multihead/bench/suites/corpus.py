"""The suite `corpus`: every head over a whole corpus, at two sizes, each in a fresh process."""

from __future__ import annotations

import json
import sysconfig
import tempfile
import tokenize
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from multihead.bench.case import Entry
from multihead.bench.contest import Setting
from multihead.bench.fresh import run_fresh, summary
from multihead.bench.suites.row import Row
from multihead.heads import CorpusRecord

TOKENS, QUICK_TOKENS = (2**17, 2**20), (2**9, 2**10)


def rows(*, quick: bool) -> list[Row]:
    """A row for each size: what grows with the corpus, and what does not."""
    return [
        Row(f"corpus-{tokens}", partial(measure, tokens))
        for tokens in (QUICK_TOKENS if quick else TOKENS)
    ]


def measure(tokens: int, setting: Setting) -> Entry:
    """`multihead inspect --text` over the modules of Python's library.

    In bfloat16 where the processor multiplies it faster than float32.

    Raises:
        MultiheadError: it failed.
    """
    _, peak = setting.limits.of(torch.bfloat16)
    dtype = "bfloat16" if peak > setting.limits.fma else "float32"
    with tempfile.TemporaryDirectory() as name:
        text, out = Path(name) / "library.jsonl", Path(name) / "heads.safetensors"
        write_library(text)
        command = ["inspect", "--text", str(text), "--tokens", str(tokens), "--dtype", dtype]
        usage = run_fresh(
            ["-m", "multihead", *command, "--out", str(out), "--json"], threads=setting.threads
        )
        found = CorpusRecord.load(out)
        return {
            "name": f"corpus-{tokens}",
            "dtype": dtype,
            "tokens": found.tokens,
            "documents": found.facts.documents,
            "context": found.facts.context,
            "sha256": found.facts.sha256,
            "record_bytes": out.stat().st_size,
            **summary([usage]),
        }


def write_library(path: Path) -> None:
    """The modules of Python's standard library, one a line, in the order of their names."""
    with path.open("w", encoding="utf-8") as file:
        for text in _modules(Path(sysconfig.get_path("stdlib"))):
            file.write(json.dumps({"text": text}) + "\n")


def _modules(folder: Path) -> Iterator[str]:
    """Not those that others installed, nor tests, of which some are no text on purpose."""
    for file in sorted(folder.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"} & set(file.parts):
            with tokenize.open(file) as opened:
                yield opened.read()
