"""What a claim is, and what running it gives: the frame of every script in this folder.

A script has a `CLAIM`, a function `measure(quick) -> Verdict` and a function `draw(figure,
figures)`, and ends in `main(CLAIM, measure, draw)`. Then

    python examples/claims/NAME.py             runs it and draws its picture into build/claims
    python examples/claims/NAME.py --quick     the same, smaller: seconds instead of minutes
    python examples/claims/NAME.py --record    also keeps result and picture, for docs/claims.md

"Does not hold" is a result like any other: the exit status is 1 only if the script fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

import recording
from multihead import MultiheadError

WIDTH = 80

Figures = Mapping[str, Any]


class Outcome(StrEnum):
    """What came of a claim."""

    HOLDS = "holds"
    LIMITS = "holds with limits"
    FAILS = "does not hold"


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence of the textbook, how it is tried, and how long that may take.

    Args:
        name: the script's, without its ending.
        title: a few words for headings and pictures.
        text: what the textbook says.
        method: how that is tried, and against what.
        seconds: the budget of the full run on two cores.
        quick_seconds: the budget of the quick run on one core.
    """

    name: str
    title: str
    text: str
    method: str
    seconds: float
    quick_seconds: float


@dataclass(frozen=True, slots=True)
class Table:
    """Columns, and rows of as many cells, already formatted."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells under {len(self.columns)} columns")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found, with everything that makes it believable.

    Args:
        outcome: holds, holds with limits, or does not hold.
        finding: one to three sentences with the figures that decide, computed and not typed.
        table: the figures a reader wants to see side by side.
        figures: the numbers that `draw` needs, as JSON has them.
        n: what was counted and how often, such as "12 layers" or "64 sequences x 5 lengths".
        seeds: how many seeds; 0 where nothing is random.
        spread: how far the figures lie apart, and in what sense; or why there is no spread.
    """

    outcome: Outcome
    finding: str
    table: Table
    figures: Figures
    n: str
    seeds: int
    spread: str


Measure = Callable[[bool], Verdict]
Draw = Callable[[Any, Figures], None]


def check_equal(what: str, got: object, expected: object) -> None:
    """Fail unless two ways to the same figure agree to the digit.

    Raises:
        MultiheadError: they do not.
    """
    if got != expected:
        raise MultiheadError(f"{what}: {got!r} instead of {expected!r}.")


def main(claim: Claim, measure: Measure, draw: Draw) -> None:
    """Run a script as a program: measure, print the verdict, draw the picture, exit."""
    options = _options(claim)
    try:
        sys.exit(_run(claim, measure, draw, options))
    except MultiheadError as error:
        print(f"{claim.name}: {error}", file=sys.stderr)
        sys.exit(1)


def lines(claim: Claim, verdict: Verdict) -> list[str]:
    """The verdict for a terminal of 80 columns."""
    shown = [
        claim.title,
        _paragraph("Claim    ", claim.text),
        _paragraph("Method   ", claim.method),
        "",
        *_table_lines(verdict.table),
        "",
        _paragraph("Verdict  ", f"{verdict.outcome.upper()}. {verdict.finding}"),
        _paragraph("n        ", verdict.n),
        _paragraph("Seeds    ", str(verdict.seeds) if verdict.seeds else "none: nothing is random"),
        _paragraph("Spread   ", verdict.spread),
    ]
    return shown


def _options(claim: Claim) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"{claim.text} Takes about {claim.seconds:.0f} s on two cores, "
        f"{claim.quick_seconds:.0f} s with --quick."
    )
    parser.add_argument("--quick", action="store_true", help="a smaller run with the same finding")
    parser.add_argument(
        "--record",
        action="store_true",
        help="keep the result in benchmarks/results/claims and the picture in docs/images/claims",
    )
    parser.add_argument("--threads", type=int, help="threads; torch's number without it")
    options = parser.parse_args()
    if options.quick and options.record:
        parser.error("--record keeps full runs, and --quick is less. Leave out one of the two.")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be 1 or more, got {options.threads}.")
    return options


def _run(claim: Claim, measure: Measure, draw: Draw, options: argparse.Namespace) -> int:
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    start = time.perf_counter()
    verdict = measure(options.quick)
    seconds = time.perf_counter() - start
    print("\n".join(lines(claim, verdict)))
    budget = claim.quick_seconds if options.quick else claim.seconds
    print(f"Time     {seconds:.1f} s of a budget of {budget:.0f} s")
    result = recording.document(claim, verdict, seconds)
    if options.record:
        print(f"Recorded {_shown(recording.save(result))}")
    folder = recording.IMAGES if options.record else recording.DRAFTS
    print(f"Picture  {_shown(recording.picture(result, draw, folder))}")
    return 0


def _shown(path: Path) -> str:
    return str(path.relative_to(recording.ROOT))


def _paragraph(label: str, text: str) -> str:
    return fill(text, WIDTH, initial_indent=label, subsequent_indent=" " * len(label))


def _table_lines(table: Table) -> list[str]:
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
