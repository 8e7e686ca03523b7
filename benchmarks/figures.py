"""Fill the tables of README and docs/benchmarks.md, and draw the pictures: `make figures`.

A block stands between `<!-- figures: NAME -->` and `<!-- end figures -->`; what is between them is
replaced from benchmarks/results, so nothing there is written by hand. tests/test_figures.py
compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import long_tables
import loss_plot
import plot
import short_tables
from multihead.bench.results import Document, load_all

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
LONG = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"

BLOCKS: dict[Path, dict[str, Callable[[Sequence[Document]], str]]] = {
    README: short_tables.BLOCKS,
    LONG: long_tables.BLOCKS,
}

_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end figures -->)", re.DOTALL)


def fill(
    text: str,
    documents: Sequence[Document],
    blocks: dict[str, Callable[[Sequence[Document]], str]],
) -> str:
    """`text` with every block rewritten from the documents; an unknown block's name raises."""

    def rewrite(match: re.Match[str]) -> str:
        head, name, tail = match.groups()
        return f"{head}{blocks[name](documents)}{tail}"

    return _BLOCK.sub(rewrite, text)


def plot_of(suite: str) -> ModuleType | None:
    """The module that draws the documents of a suite; None where they have no picture."""
    if suite == "prefill":
        return plot
    return loss_plot if suite in loss_plot.PLOTS else None


def main() -> int:
    """Rewrite both files, then draw the pictures where matplotlib and a browser are installed."""
    documents = load_all(RESULTS)
    for path, blocks in BLOCKS.items():
        path.write_text(fill(path.read_text(encoding="utf-8"), documents, blocks), encoding="utf-8")
        print(f"Tables: {path.relative_to(ROOT)}")
    import picture

    for document in documents:
        drawn = plot_of(document["suite"])
        if drawn is not None:
            print(drawn.draw(document, IMAGES))
    print(picture.take(IMAGES / "heads.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
