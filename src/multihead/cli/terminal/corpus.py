"""What a corpus says of a model's heads: how they rank, and one of them in all its links."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.text import Text

from multihead.cli.numbers import bar, short_bytes, weight
from multihead.cli.sizes import duration
from multihead.cli.statistics import STATISTICS, StatisticName
from multihead.cli.terminal.ranking import print_ranking
from multihead.cli.terminal.style import (
    BAR,
    HEAD,
    QUIET,
    TOKEN,
    flow,
    head_name,
    plain_table,
    print_question,
    room,
    show,
)
from multihead.cli.tokens import fit, fit_left, visible

if TYPE_CHECKING:
    from multihead.heads import CorpusRecord, Link

_LINKS = 10
_WIDE = 120
_MILLION = 2**20  # "1m" as --tokens takes it
_QUANTILES = (0.05, 0.5, 0.95)
_RULE = (
    "Chosen since its strongest links to keys other than the previous and the token's own weigh "
    "most; --head names another."
)


def print_corpus(
    console: Console,
    record: CorpusRecord,
    *,
    sort: StatisticName,
    head: tuple[int, int] | None = None,
) -> None:
    """Print what was read, the ranking by `sort`, and one head: distributions and links."""
    place = head or choose_head(record)
    _print_header(console, record)
    print_question(console, "What does each head do?")
    print_ranking(console, record.heads, sort)
    print_question(console, f"What does {head_name(*place)} do?")
    if head is None:
        show(console, Text(_RULE, style=QUIET))
        console.print()
    _print_distributions(console, record, place)
    _print_strongest(console, record, place)
    _print_deciles(console, record, place)
    _print_end(console, record)


def choose_head(record: CorpusRecord) -> tuple[int, int]:
    """The head whose strongest links reach furthest beyond its neighbors: (layer, head)."""
    links = record.strongest
    far = links.query - links.key
    mass = np.where(np.abs(far) > 1, links.weight, 0.0).sum(-1)
    layer, head = np.unravel_index(int(mass.argmax()), mass.shape)
    return int(layer), int(head)


def _print_header(console: Console, record: CorpusRecord) -> None:
    facts, heads = record.facts, record.heads
    console.print(Text(fit(visible(heads.model, spaces=False), room(console)), style="bold"))
    counts = sorted({len(it) for it in heads.heads})
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    total = sum(map(len, heads.heads))
    gone = total - int((heads.queries > 0).sum())
    left_out = f", {gone} of them pruned" if gone else ""
    show(console, f"{len(heads.layers)} layers x {each} heads = {total} heads{left_out}")
    texts = "one text" if record.one_text else f"{facts.documents:,} documents"
    many = "window" if facts.windows == 1 else "windows"
    read = (
        f"read {record.tokens:,} tokens of {texts}, in {facts.windows:,} {many} of at most "
        f"{facts.context:,}"
    )
    show(console, read)
    # A window of fewer than two tokens of text is not read, though the corpus may have them.
    if facts.asked - record.tokens >= 2 + sum(facts.special):
        show(console, f"{facts.asked:,} tokens were asked for: the corpus has no more")
    if record.one_text:
        show(console, "one text: what a head does here need not be what it does elsewhere")


def _print_distributions(console: Console, record: CorpusRecord, place: tuple[int, int]) -> None:
    share = weight(float(record.first_key_first[place]))
    show(
        console,
        Text.assemble(
            "Over all queries of ",
            (head_name(*place), HEAD),
            f"; a share of {share} gives most to the first token of its window",
        ),
    )
    console.print()
    table = plain_table()
    table.add_column("statistic", no_wrap=True)
    for title in ("mean", "lowest", "5 %", "median", "95 %", "highest"):
        table.add_column(title, justify="right", no_wrap=True)
    heads = record.heads
    for name in heads.names:
        statistic = STATISTICS[name]  # type: ignore[index]
        quantiles = [heads.quantile(name, it).value for it in _QUANTILES]
        tables = (heads.mean(name), heads.lowest(name), *quantiles, heads.highest(name))
        table.add_row(statistic.name, *(statistic.show(float(it[place])) for it in tables))
    show(console, table)
    console.print()


def _print_strongest(console: Console, record: CorpusRecord, place: tuple[int, int]) -> None:
    found = record.strongest_links(*place, _LINKS)
    show(
        console,
        Text.assemble(
            "Strongest links of ", (head_name(*place), HEAD), f" among all {record.queries:,}"
        ),
    )
    show(
        console,
        Text("of each query the key it gives most to, its window's first aside", style=QUIET),
    )
    console.print()
    _print_links(console, [("", link) for link in found], "")


def _print_deciles(console: Console, record: CorpusRecord, place: tuple[int, int]) -> None:
    console.print()
    show(console, Text.assemble("One link of each decile of the max weight of ", head_name(*place)))
    show(
        console,
        Text("of a sample of queries the key they give most to, whichever it is", style=QUIET),
    )
    console.print()
    deciles = record.deciles(*place, 1)
    rows = [(str(number), it) for number, part in enumerate(deciles, 1) for it in part]
    _print_links(console, rows[::-1], "decile")


def _print_links(console: Console, links: list[tuple[str, Link]], first: str) -> None:
    if not links:
        show(console, Text("none", style=QUIET))
        return
    wide = room(console) >= _WIDE
    table = plain_table()
    if first:
        table.add_column(first, justify="right", no_wrap=True)
    table.add_column("weight", no_wrap=True)
    table.add_column("token", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("reads", no_wrap=True)
    table.add_column("back", justify="right", no_wrap=True)
    if wide:
        table.add_column("in", no_wrap=True)
    fixed = 28 + (len(first) + 2 if first else 0) + (30 if wide else 0)
    width = (room(console) - fixed) // 2
    for number, link in links:
        cells: list[Text | str] = [number] if first else []
        cells += [
            Text.assemble(f"{weight(link.weight)} ", (bar(link.weight, 4), BAR)),
            in_context(link.query_before, link.query, link.query_after, width),
            Text("→", style=QUIET),
            in_context(link.key_before, link.key, link.key_after, width),
            str(link.query_position - link.key_position),
        ]
        if wide:
            where = f"{visible(link.document, spaces=False)} {link.query_position}"
            cells.append(Text(fit_left(where, 28), style=QUIET))
        table.add_row(*cells)
    show(console, table)


def in_context(before: str, token: str, after: str, width: int) -> Text:
    """A token, marked by ‹ ›, in `width` cells with as much as fits of what is around it."""
    own = f"‹{fit(visible(token), max(width - 4, 1))}›"
    left = width - Text(own).cell_len
    behind = fit(visible(after, spaces=False), left // 3) if after else ""
    ahead = visible(before, spaces=False) if before else ""
    ahead = fit_left(ahead, left - Text(behind).cell_len)
    pad = " " * (width - Text(ahead + own + behind).cell_len)
    return Text.assemble((ahead, QUIET), (own, TOKEN), (behind, QUIET), pad, no_wrap=True)


def _print_end(console: Console, record: CorpusRecord) -> None:
    facts = record.facts
    width = room(console)
    console.print()
    rate = f"{duration(facts.seconds * 10_000 / max(1, record.tokens))} per 10,000 tokens"
    parts = [duration(facts.seconds), rate]
    if record.tokens < _MILLION:
        parts.append(
            f"1m tokens at this pace: {duration(facts.seconds * _MILLION / record.tokens)}"
        )
    parts += [record.heads.backend, record.heads.dtype]
    show(console, Text(flow(parts, width), style="bold"))
    seen = [
        f"{short_bytes(facts.text_bytes)} of text",
        f"sha256 {facts.sha256[:16]}… (order, bytes and tokens)",
        "each window is read from position 0",
    ]
    if sum(facts.special):
        seen.append(f"special tokens in each: {facts.special[0]} before, {facts.special[1]} after")
    if facts.skipped:
        seen.append(f"{facts.skipped:,} windows of fewer than two tokens left out")
    show(console, Text(flow(seen, width), style=QUIET))
