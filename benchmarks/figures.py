"""Fill README's tables from benchmarks/results, and take its picture: `make figures`.

A block stands between `<!-- figures: NAME -->` and `<!-- end figures -->`; what is between them is
replaced, so nothing there is written by hand. tests/test_figures.py compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from multihead.bench.machine import CLASSES
from multihead.bench.results import Document, load_all

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"

_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end figures -->)", re.DOTALL)
_NOTHING = "Not measured yet: `benchmarks/results` has no file for it.\n"


def fill(text: str, documents: Sequence[Document]) -> str:
    """`text` with every block rewritten from the documents; an unknown block's name raises."""

    def rewrite(match: re.Match[str]) -> str:
        head, name, tail = match.groups()
        suite = [document for document in documents if document["suite"] == name]
        return f"{head}{BLOCKS[name](suite)}{tail}"

    return _BLOCK.sub(rewrite, text)


def attention_block(documents: Sequence[Document]) -> str:
    """A section for each machine: one call, native against torch."""
    if not documents:
        return _NOTHING
    return "\n".join([*map(_attention_section, documents), _not_measured(documents)])


def inspect_block(documents: Sequence[Document]) -> str:
    """A section for each machine: the whole inspection against its rivals."""
    if not documents:
        return _NOTHING
    return "\n".join(map(_inspect_section, documents))


BLOCKS: dict[str, Callable[[Sequence[Document]], str]] = {
    "attention": attention_block,
    "inspect": inspect_block,
}


def _attention_section(document: Document) -> str:
    rows = [
        (
            f"{row['kind']}, {row['length']}",
            row["dtype"],
            _milliseconds(row["times"]["native"]),
            _milliseconds(row["times"]["torch"]),
            f"{row['ratio']:.2f}x",
            f"{row['gflops']:.0f}",
            f"{100 * row['limit_share']:.0f} % of {row['limit']}",
            f"{row['check']['error'] / row['check']['peer_error']:.1f}x",
        )
        for row in document["rows"]
        if "ratio" in row
    ]
    table = _table(
        (
            "call",
            "dtype",
            "native ms",
            "torch ms",
            "ratio",
            "GF/s",
            "of the limit",
            "error, ours / torch's",
        ),
        rows,
    )
    return f"{_where(document)} {_limits(document)}\n\n{table}\n{_statistics(document)}\n"


def _statistics(document: Document) -> str:
    parts = [
        f"{100 * row['usual_overhead']:+.0f} % for lse, entropy and max logit and "
        f"{100 * row['all_overhead']:+.0f} % for all nine in {row['dtype']}"
        for row in document["rows"]
        if "usual_overhead" in row
    ]
    return f"Statistics in the same pass, full, 4096 tokens: {'; '.join(parts)}."


def _limits(document: Document) -> str:
    limits = document["limits"]
    parts = [f"{name} {value:.0f} GF/s" for name, value in limits.items() if value is not None]
    parts += [f"{name} not measurable here" for name, value in limits.items() if value is None]
    return f"Limits measured in the same run: {', '.join(parts)}."


def _inspect_section(document: Document) -> str:
    first = document["rows"][0]
    rows = [
        (
            row["what"] + (f" of {row['page_bytes'] / 1e6:.1f} MB" if "page_bytes" in row else ""),
            f"{row['seconds']:.1f} s",
            f"{row['peak_rss_bytes'] / 1e9:.2f} GB",
            f"{row['seconds'] / first['seconds']:.1f}x",
        )
        for row in document["rows"]
    ]
    table = _table(("fresh process", "time", "peak memory", "time against ours"), rows)
    return f"{_where(document)}\n\n{table}"


def _where(document: Document) -> str:
    machine, versions = document["machine"], document["versions"]
    threads = f"{machine['threads']} threads" if machine["threads"] != 1 else "1 thread"
    return (
        f"**{machine['class']}**: {machine['processor']}, {threads}, "
        f"bfloat16 on {machine['instruction_set']}, torch {versions['torch']}, commit "
        f"{document['commit'] or 'unknown'}: `{document['command']}`."
    )


def _not_measured(documents: Sequence[Document]) -> str:
    measured = {document["machine"]["class"] for document in documents}
    missing = [name for name in CLASSES.values() if name not in measured]
    return f"Not measured: {', '.join(missing)}.\n" if missing else ""


def _milliseconds(timing: dict[str, Any]) -> str:
    low, median, high = (1e3 * timing[key] for key in ("low", "median", "high"))
    digits = 2 if median < 10 else 1 if median < 100 else 0
    return f"{median:.{digits}f} ({low:.{digits}f}-{high:.{digits}f}, n {timing['n']})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> int:
    """Rewrite README, then its picture where a browser is installed."""
    text = README.read_text(encoding="utf-8")
    README.write_text(fill(text, load_all(RESULTS)), encoding="utf-8")
    print(f"Tables: {README.name}")
    from picture import take

    print(take(ROOT / "docs" / "images" / "heads.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
