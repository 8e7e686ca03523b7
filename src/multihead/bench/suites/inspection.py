"""The suite `inspect`: the whole inspection against its rivals, each in a process of its own."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from multihead.bench.case import Entry
from multihead.bench.contest import Setting
from multihead.bench.fresh import run_fresh, summary
from multihead.bench.suites.row import Row
from multihead.machine import memory_bytes

TOKENS, QUICK_TOKENS = 8192, 256

# Of every N x N, over the layers and heads of SmolLM2 in float32.
_KEPT_BYTES = 30 * 9 * 4


@dataclass(frozen=True)
class Contestant:
    """A program to run, what it is called in a table, how much it reads and how often it runs."""

    name: str
    what: str
    arguments: tuple[str, ...]
    tokens: int
    runs: int = 1
    writes_page: bool = False


def rows(*, quick: bool) -> list[Row]:
    """A row for each program."""
    tokens = QUICK_TOKENS if quick else TOKENS
    programs = contestants(tokens)
    if quick:
        programs = tuple(replace(program, runs=1) for program in programs)
    return [Row(program.name, partial(measure, program)) for program in programs]


def contestants(tokens: int, memory: int | None = None) -> tuple[Contestant, ...]:
    """Ours first, and again before what reads fewer tokens than `tokens`.

    All load the same model in float32. `memory` is the machine's in bytes unless given.
    """
    rivals = ("-m", "multihead.bench.rivals")
    fit = most_kept(tokens, memory_bytes() if memory is None else memory)
    return (
        _ours("multihead", tokens),
        Contestant(
            "multihead maps",
            "every statistic and a map of 64 x 64 of every head, in the model's own pass",
            (*rivals, "maps", str(tokens)),
            tokens,
            runs=2,
        ),
        Contestant(
            "multihead --report",
            "`multihead inspect --report`: peaks, sinks and what every key receives too, in a page",
            (*_inspect(tokens), "--report"),
            tokens,
            writes_page=True,
        ),
        Contestant(
            "sdpa",
            "plain forward with torch's SDPA: no statistics at all",
            (*rivals, "sdpa", str(tokens)),
            tokens,
            runs=2,
        ),
        Contestant(
            "dense",
            "one head's matrix formed and freed at a time: entropy, largest weight, its key",
            (*rivals, "dense", str(tokens)),
            tokens,
        ),
        *([_ours("multihead-again", fit)] if fit < tokens else []),
        Contestant(
            "eager",
            f"transformers' eager path over {fit} tokens, every N x N kept, then the same three",
            (*rivals, "eager", str(fit)),
            fit,
        ),
    )


def most_kept(tokens: int, memory: int) -> int:
    """`tokens`, halved until the matrices that the eager path keeps fill at most half of memory."""
    while _KEPT_BYTES * tokens**2 > memory / 2:
        tokens //= 2
    return tokens


def measure(contestant: Contestant, setting: Setting) -> Entry:
    """Run it to its end as often as it says; the median time and the largest peak.

    Raises:
        MultiheadError: it failed.
    """
    entry: Entry = {
        "name": contestant.name,
        "what": contestant.what,
        "tokens": contestant.tokens,
    }
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "heads.html"
        arguments = contestant.arguments
        if contestant.writes_page:
            arguments = (*arguments, str(page))
        usages = [run_fresh(arguments, threads=setting.threads) for _ in range(contestant.runs)]
        if contestant.writes_page:
            entry["page_bytes"] = page.stat().st_size
    return entry | summary(usages)


def _ours(name: str, tokens: int) -> Contestant:
    what = f"`multihead inspect --max-tokens {tokens}`: every statistic of every head"
    return Contestant(name, what, _inspect(tokens), tokens, runs=2)


def _inspect(tokens: int) -> tuple[str, ...]:
    return ("-m", "multihead", "inspect", "--max-tokens", str(tokens), "--json")
