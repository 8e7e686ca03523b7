"""Write what docs pages show of the examples: `python examples/write_docs.py`.

What stands between `<!-- written: NAME -->` and `<!-- end written -->` is replaced.
tests/test_docs_examples.py compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import common_mistakes
import concept_map
import worked_example

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

PAGES: Mapping[str, Callable[[], str]] = {
    "worked-example": worked_example.markdown,
    "common-mistakes": common_mistakes.markdown,
    "concept-map": concept_map.markdown,
}

_BLOCK = re.compile(r"(<!-- written: ([\w-]+) -->\n).*?(<!-- end written -->)", re.DOTALL)


def path_of(name: str) -> Path:
    """Where a page is."""
    return DOCS / f"{name}.md"


def fill(text: str) -> str:
    """The text with what is between its markers replaced."""
    return _BLOCK.sub(lambda found: f"{found[1]}{PAGES[found[2]]()}{found[3]}", text)


def main() -> None:
    """Fill every page, and say so."""
    for name in PAGES:
        path = path_of(name)
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"Written: {path.relative_to(ROOT)}")
    print(concept_map.draw())


if __name__ == "__main__":
    main()
