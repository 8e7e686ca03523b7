"""The suite `inspect`: the whole inspection against its rivals, each in a process of its own."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multihead.bench.fresh import Usage, run_fresh

TOKENS = 8192


@dataclass(frozen=True)
class Contestant:
    """A program to run, what it is called in a table, and how often it runs."""

    name: str
    what: str
    arguments: tuple[str, ...]
    runs: int
    page: Path | None = None


def contestants(page: Path, tokens: int = TOKENS) -> tuple[Contestant, ...]:
    """Ours first. All load the same model in float32 and read the same tokens.

    `page` is where the one that writes the report may put it.
    """
    rivals = ("-m", "multihead.bench.rivals")
    inspect = ("-m", "multihead", "inspect", "--max-tokens", str(tokens), "--json")
    return (
        Contestant(
            "multihead",
            f"`multihead inspect --max-tokens {tokens}`: every statistic of every head",
            inspect,
            3,
        ),
        Contestant(
            "multihead --report",
            "the same with `--report`: maps, sinks and what every key receives, in one page",
            (*inspect, "--report", str(page)),
            3,
            page,
        ),
        Contestant(
            "sdpa",
            "plain forward with torch's SDPA: no statistics at all",
            (*rivals, "sdpa", str(tokens)),
            3,
        ),
        Contestant(
            "dense",
            "one head's matrix formed and freed at a time: entropy, largest weight, its key",
            (*rivals, "dense", str(tokens)),
            1,
        ),
    )


def measure(contestant: Contestant, *, threads: int) -> dict[str, Any]:
    """Run it to its end as often as it says; the median time and the largest peak.

    Raises:
        MultiheadError: it failed.
    """
    usages = [run_fresh(contestant.arguments, threads=threads) for _ in range(contestant.runs)]
    entry = {"name": contestant.name, "what": contestant.what, **_summary(usages)}
    if contestant.page is not None:
        entry["page_bytes"] = contestant.page.stat().st_size
    return entry


def _summary(usages: list[Usage]) -> dict[str, Any]:
    seconds = [usage.seconds for usage in usages]
    return {
        "seconds": statistics.median(seconds),
        "low": min(seconds),
        "high": max(seconds),
        "n": len(seconds),
        "peak_rss_bytes": max(usage.peak_rss_bytes for usage in usages),
    }
