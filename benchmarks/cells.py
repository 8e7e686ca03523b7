"""What tables are made of: where a document was measured, times, ratios, Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from multihead.bench.contest import OURS, TORCH
from multihead.bench.results import Document
from multihead.bench.show import duration

NOTHING = "Not measured yet: `benchmarks/results` has no file for it.\n"

_MOST_NAMED = 3
_INSTRUCTIONS = ("FMA", "dpbf16", "AMX")


def of_suite(documents: Sequence[Document], suite: str) -> list[Document]:
    """The documents of one suite, one for each machine."""
    return [document for document in documents if document["suite"] == suite]


def where(document: Document) -> str:
    """Class, processor, threads, instruction sets, versions and command of a document."""
    machine, versions = document["machine"], document["versions"]
    threads = f"{machine['threads']} threads" if machine["threads"] != 1 else "1 thread"
    sets = [f"{dtype} on {name}" for dtype, name in machine["instruction_sets"].items() if name]
    return (
        f"**{machine['class']}**: {machine['processor']}, {threads}, {', '.join(sets)}, torch "
        f"{versions['torch']}, commit {document['commit'] or 'unknown'}: `{document['command']}`."
    )


def limits(document: Document) -> str:
    """The limits that were measured in the same run."""
    values = document["limits"]
    parts = [
        f"{name} {values[name]:.0f} GF/s" for name in _INSTRUCTIONS if values[name] is not None
    ]
    if "memory read" in values:
        parts.append(f"memory read {values['memory read']:.1f} GB/s{_cold(values)}")
    parts += [f"{name} not measurable here" for name in _INSTRUCTIONS if values[name] is None]
    return f"Limits measured in the same run: {', '.join(parts)}."


def _cold(values: Mapping[str, Any]) -> str:
    """A warning where the buffers are smaller than they should be."""
    cache, cold = values["cache_bytes"], values["cold_bytes"]
    if cache is not None and cold >= 4 * cache:
        return ""
    size = "of unknown size" if cache is None else f"of {cache / 2**20:.0f} MiB"
    return f" (buffers of {cold / 2**30:.1f} GiB, a cache {size}: some may still be in it)"


def peers(document: Document) -> str:
    """Which peers took part, and why the others did not."""
    found = document["peers"]
    parts = [f"{name} {peer.get('absent') or peer['version']}" for name, peer in found.items()]
    return f"Peers: torch {document['versions']['torch']}, {', '.join(parts)}." if parts else ""


def call(row: Mapping[str, Any]) -> str:
    """The kind and shape of a row's call."""
    if "what" in row:
        return str(row["what"])
    grouped = row["heads"] != row["kv_heads"]
    heads = f"{row['heads']}/{row['kv_heads']}" if grouped else str(row["heads"])
    kind = row["kind"]
    if kind == "layer":
        wide = row["heads"] * row["width"]
        return f"layer, {row['keys']} tokens, {wide} wide, {row['heads']} heads"
    if kind.startswith("decode"):
        held = {"pages": " from pages", "int8": " from int8"}.get(kind.split("-")[1], "")
        return f"decode{held}, {heads} heads, {row['keys']} keys, D {row['width']}"
    if kind.startswith("small"):
        return f"{heads} heads, {row['queries']} on {row['keys']}"
    if kind.startswith("grouped"):
        return f"{heads} heads, {row['keys']}"
    if kind.startswith("window"):
        return f"window of {kind.rpartition('-')[2]} in {row['keys']}"
    if kind.startswith("packed"):
        return f"{kind.rpartition('-')[2].replace('x', ' documents of ')}"
    return f"{kind}, {row['keys']}, D {row['width']}"


def ratio(row: Mapping[str, Any], name: str) -> str:
    """How many times as long another takes; in bold where ours is the slower one."""
    value = row["ratios"][name]
    return f"{value:.2f}x" if value >= 1 else f"**{value:.2f}x**"


def best_peer(row: Mapping[str, Any]) -> str | None:
    """The fastest contestant that is neither ours nor torch's own function; None without any."""
    others = {
        name: value
        for name, value in row["ratios"].items()
        if name != TORCH and not name.startswith(OURS)
    }
    return min(others, key=others.__getitem__) if others else None


def best(row: Mapping[str, Any]) -> str:
    """The ratio to the fastest of the others, by name."""
    name = best_peer(row)
    return "" if name is None else f"{ratio(row, name)} {name}"


def rate(row: Mapping[str, Any], name: str) -> str:
    """Tokens a second of one contestant of a whole model."""
    value = row["tokens_per_second"][name]
    return f"{value:.0f} tokens/s" if value >= 100 else f"{value:.1f} tokens/s"


def parts(row: Mapping[str, Any]) -> str:
    """What of a layer's time its parts take, and whether its weights are packed."""
    shares = [f"{name} {100 * share:.0f} %" for name, share in row["shares"].items()]
    packed = row["packed_bytes"]
    weights = f"{packed / 2**20:.1f} MiB of packed weights" if packed else "no weight packed"
    return f"{', '.join(shares)}; {weights}"


def share(row: Mapping[str, Any]) -> str:
    """The share of the limit."""
    return f"{100 * row['limit_share']:.0f} % of {row['limit']}"


def ours(row: Mapping[str, Any]) -> str:
    """Our time with its quartiles."""
    return duration(row["times"][OURS])


def measured(document: Document) -> list[dict[str, Any]]:
    """The rows that the processor could run."""
    return [row for row in document["rows"] if "not_measurable" not in row]


def not_measurable(document: Document) -> str:
    """The rows that it could not, with the reasons; empty if there are none."""
    rows = [row for row in document["rows"] if "not_measurable" in row]
    parts = [f"{row['name']} ({row['not_measurable'].rstrip('.')})" for row in rows]
    return f"Not measurable here: {'; '.join(parts)}.\n" if parts else ""


def losses(rows: Iterable[Mapping[str, Any]]) -> str:
    """Sentences on the rows in which another, or another form of ours, is faster.

    Each by name where they are few, else how many: the tables have them in bold.
    """
    measured = list(rows)
    others = _slower("another", measured, own=False)
    forms = _slower("another form of our own", measured, own=True)
    return " ".join(filter(None, (others or "Slower than no other here.", forms))) + "\n"


def _slower(than: str, rows: Sequence[Mapping[str, Any]], *, own: bool) -> str:
    """What is faster in which rows, of our own forms or of others; empty where nothing is."""
    faster = {
        f"{call(row)}, {row['dtype']}": names
        for row in rows
        if (
            names := [
                name
                for name, ratio in row["ratios"].items()
                if ratio < 1 and name.startswith(OURS) == own
            ]
        )
    }
    if not faster:
        return ""
    if len(faster) <= _MOST_NAMED:
        named = (f"{row} ({', '.join(names)})" for row, names in faster.items())
        return f"Slower than {than}: {'; '.join(named)}."
    counts = Counter(name for names in faster.values() for name in names)
    by = ", ".join(f"{name} in {count}" for name, count in counts.most_common())
    return f"Slower than {than} in {len(faster)} of {len(rows)} rows: {by}."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
