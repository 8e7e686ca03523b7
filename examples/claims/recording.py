"""Where results and pictures of claims are kept, and what stands in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from multihead import MissingExtraError
from multihead.bench import machine, results

if TYPE_CHECKING:
    from claim import Claim, Verdict

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "claims"
IMAGES = ROOT / "docs" / "images" / "claims"
DRAFTS = ROOT / "build" / "claims"

# The same numbers give the same file: ids from a constant, no date, text as text.
_STYLE: dict[str, Any] = {
    "svg.hashsalt": "multihead",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.3,
    "figure.figsize": (7.2, 3.4),
    "figure.constrained_layout.use": True,
}


def document(claim: Claim, verdict: Verdict, seconds: float) -> results.Document:
    """The verdict with the command, commit, processor and versions that it came from."""
    return {
        "claim": claim.name,
        "title": claim.title,
        "text": claim.text,
        "method": claim.method,
        "budget_seconds": claim.seconds,
        "quick_budget_seconds": claim.quick_seconds,
        "seconds": round(seconds, 1),
        "outcome": str(verdict.outcome),
        "finding": verdict.finding,
        "n": verdict.n,
        "seeds": verdict.seeds,
        "spread": verdict.spread,
        "table": asdict(verdict.table),
        "figures": json.loads(json.dumps(verdict.figures)),  # names of numbers become text
        "command": f"python examples/claims/{claim.name}.py",
        "commit": machine.commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine.describe(torch.get_num_threads()),
        "versions": machine.versions(),
    }


def save(result: results.Document) -> Path:
    """Keep the result under its claim's name; the file appears whole or not at all."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    return results.write(result, RESULTS / f"{result['claim']}.json")


def load_all() -> dict[str, results.Document]:
    """Every kept result by its claim's name, in the order of the names."""
    return {result["claim"]: result for result in results.load_all(RESULTS)}


def picture(
    result: Mapping[str, Any], draw: Callable[[Any, Mapping[str, Any]], None], folder: Path
) -> Path:
    """Draw the result's figures as NAME.svg into `folder`, with `digest` as its description.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError(
            "a claim's picture needs matplotlib, which is not installed: "
            "pip install 'multihead[plot]'."
        ) from error
    matplotlib.use("svg")
    from matplotlib import pyplot

    path = folder / f"{result['claim']}.svg"
    folder.mkdir(parents=True, exist_ok=True)
    with pyplot.rc_context(_STYLE):
        figure = pyplot.figure()
        draw(figure, result["figures"])
        figure.savefig(path, metadata={"Date": None, "Description": digest(result)})
        pyplot.close(figure)
    return path


def digest(result: Mapping[str, Any]) -> str:
    """What the picture of these figures carries in its description."""
    return hashlib.sha256(json.dumps(result["figures"]).encode()).hexdigest()[:16]
