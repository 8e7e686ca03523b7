"""Write docs/claims.md from the kept results: `python examples/claims/page.py`.

What stands between its markers is never typed; `python examples/claims --record` writes it too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import recording
from multihead.bench.results import Document

PAGE = recording.ROOT / "docs" / "claims.md"

# In the order of the page: what can be counted, what has to be learned, what real models show.
ORDER = (
    "parameters",
    "reshape",
    "softmax_rows",
    "identical_heads",
    "linear_memory",
    "crossover",
    "one_ranking",
    "head_rank",
    "head_size",
    "language_heads",
    "kv_sharing",
    "cat_mat",
    "pruning",
)

_BLOCK = re.compile(r"(<!-- claims: (\w+) -->\n).*?(<!-- end claims -->)", re.DOTALL)
_SCRIPT = "CLAIM = Claim("


def names() -> list[str]:
    """The claims that there are: `ORDER`, then any other script of this folder by name."""
    here = Path(__file__).resolve().parent
    scripts = [
        path.stem
        for path in sorted(here.glob("*.py"))
        if f"\n{_SCRIPT}" in path.read_text(encoding="utf-8")
    ]
    return sorted(scripts, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def write() -> str:
    """Fill the page from the kept results; return its path in the checkout."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(fill_page(text, recording.load_all()), encoding="utf-8")
    return str(PAGE.relative_to(recording.ROOT))


def fill_page(text: str, results: Mapping[str, Document]) -> str:
    """The text with what is between its markers replaced."""
    kept = [results[name] for name in names() if name in results]
    blocks = {"summary": _summary, "each": _sections}
    return _BLOCK.sub(lambda found: found[1] + blocks[found[2]](kept) + found[3], text)


def _summary(results: Sequence[Document]) -> str:
    lines = ["| claim | verdict | finding |", "| --- | --- | --- |"]
    for result in results:
        title = f"[{result['title']}](#{_anchor(result['title'])})"
        lines.append(f"| {title} | **{result['outcome']}** | {result['finding']} |")
    missing = [name for name in names() if name not in {result["claim"] for result in results}]
    said = f"\nNot run yet: {', '.join(missing)}.\n" if missing else ""
    return "\n".join(lines) + f"\n{said}"


def _sections(results: Sequence[Document]) -> str:
    return "\n".join(_section(result) for result in results)


def _section(result: Document) -> str:
    machine, versions = result["machine"], result["versions"]
    seeds = f"{result['seeds']} seeds" if result["seeds"] else "nothing is random"
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return f"""## {result["title"]}

> {result["text"]}

{result["method"]}

**{result["outcome"].capitalize()}.** {result["finding"]}

{_table(result["table"])}
n: {result["n"]}; {seeds}. Spread: {result["spread"]}.

![{result["title"]}](images/claims/{result["claim"]}.svg)

`{result["command"]}`: {result["seconds"]:.0f} s of a budget of {result["budget_seconds"]:.0f} s \
on {machine["processor"]}, {threads}, torch {versions["torch"]}, commit \
{result["commit"]}, {result["date"]}.
"""


def _table(table: Document) -> str:
    columns = table["columns"]
    rows = [columns, ["---"] * len(columns), *table["rows"]]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _anchor(title: str) -> str:
    """The address that Markdown gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    print(f"Written {write()}")
