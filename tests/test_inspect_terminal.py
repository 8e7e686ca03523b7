"""What `multihead inspect` prints, from a made-up inspection."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")

from rich.cells import cell_len
from rich.console import Console

from multihead.cli.numbers import bar, measure, seconds, short_bytes, short_count, weight
from multihead.cli.statistics import RANKED, STATISTICS
from multihead.cli.terminal import print_inspection
from multihead.cli.terminal.grid import levels
from multihead.cli.terminal.links import choose_head, strongest_links
from multihead.cli.terminal.ranking import ranked
from multihead.cli.terminal.readers import readers
from multihead.cli.tokens import fit, fit_left, visible
from synthetic import inspection

HOSTILE = [
    "\x1b[31mred",
    "[bold]not bold[/bold]",
    "[/]",
    " \n\n",
    "\u202egnp.exe",
    "日本語のとても長いことば",
    "\u0301",
    "\ud800",
    "👩\u200d💻",
    "a" * 90,
    "\t",
    "",
    "\u2028",
    "</script><img src=x onerror=alert(1)>",
    "\x00",
    "\u00a0",
]


def printed(width: int, view: Any = None, **options: Any) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, markup=False, highlight=False, emoji=False, color_system=None
    )
    options.setdefault("sort", "entropy_share")
    print_inspection(console, view or inspection(), **options)
    return stream.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120, 200, 300])
@pytest.mark.parametrize("shape", [(30, 9, 3), (1, 1, 1), (48, 25, 25), (32, 64, 8), (80, 64, 8)])
def test_nothing_is_wider_than_the_terminal(width: int, shape: tuple[int, int, int]) -> None:
    layers, heads, kv_heads = shape
    text = printed(width, inspection(layers=layers, heads=heads, kv_heads=kv_heads))
    assert max(cell_len(line) for line in text.splitlines()) <= width


@pytest.mark.parametrize("width", [80, 200])
def test_the_sections_stand_in_order_with_nothing_cut(width: int) -> None:
    text = printed(width)
    places = [
        text.index(part)
        for part in (
            "SmolLM2-135M-Instruct",
            "Parameters",
            "Multiply-adds",
            "KV cache",
            "N x N",
            "What does this token read?",
            "[it]",
            "one softmax",
            "What does this head do?",
            "entropy share",
            "Ranked by",
            "Strongest links",
            "native avx512",
            "checked against",
            "start token: none added",
        )
    ]
    assert places == sorted(places)
    assert "…" not in text.replace("\n", " ").split("Strongest links")[0]


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", STATISTICS)
def test_every_statistic_can_be_chosen(width: int, name: Any) -> None:
    text = printed(width, sort=name)
    assert STATISTICS[name].meaning.split(",")[0].split(" of ")[0] in text
    assert f"Ranked by {STATISTICS[name].name}" in text


def test_the_grid_is_legible_without_color() -> None:
    view = inspection(layers=7, heads=3)
    shares = np.linspace(0, 1, 21, dtype=np.float32).reshape(7, 3)
    view.statistics["entropy_share"] = shares
    view.statistics["entropy_share"][6, 1] = np.nan
    rows = dict(re.findall(r"^  (H\d) +((?:[\d.<>-]+ +)+)$", printed(30, view), flags=re.M))
    expected = levels(shares, "unit")
    assert expected[0, 0] == 0
    assert expected[6, 2] == 9
    for head in range(3):
        steps = ["-" if step < 0 else str(step) for step in expected[:, head]]
        assert rows[f"H{head}"].split() == steps


def test_levels_cut_ranges() -> None:
    values = np.array([0.0, 1.0, 10.0, 100.0, np.nan, np.inf])
    assert levels(values[1:4], "log").tolist() == [0, 5, 9]
    assert levels(np.array([-3.0, 0.0, 3.0]), "linear").tolist() == [0, 5, 9]
    assert levels(values, "unit").tolist() == [0, 9, 9, 9, -1, -1]
    assert levels(np.array([2.0, 2.0]), "linear").tolist() == [0, 0]
    assert levels(np.array([np.nan]), "log").tolist() == [-1]


def test_readers_group_heads_by_the_key_they_rank_first() -> None:
    view = inspection(layers=5, heads=7)
    found = readers(view.token)
    assert sum(reader.heads for reader in found) == 5 * 7
    assert sum(reader.mean_layers for reader in found) == 5
    assert [reader.heads for reader in found] == sorted((r.heads for r in found), reverse=True)
    for reader in found:
        everywhere = view.token.top_weights[view.token.top_keys == reader.key]
        assert reader.weight == everywhere.max()
        slots = view.token.top_keys[reader.strongest] == reader.key
        assert view.token.top_weights[reader.strongest][slots] == reader.weight


def test_ranking_puts_missing_values_last() -> None:
    view = inspection(layers=3, heads=5)
    view.statistics["max_logit"][1, 2] = np.nan
    order = ranked(view, "max_logit")
    values = [view.statistics["max_logit"][place] for place in order]
    assert order[-1] == (1, 2)
    assert values[:-1] == sorted(values[:-1], reverse=True)
    assert len(set(order)) == 15


def test_links_of_a_chosen_head() -> None:
    view = inspection(layers=3, heads=5)
    links = strongest_links(view, 2, 4)
    assert [link.weight for link in links] == sorted((k.weight for k in links), reverse=True)
    assert all(0 <= link.key <= link.query for link in links)
    text = printed(80, view, head=(2, 4))
    assert "Strongest links of L2H4" in text
    assert "Chosen since" not in text


def test_the_rule_looks_for_heads_that_read_elsewhere() -> None:
    view = inspection(layers=2, heads=3)
    view.links.weights[:] = 0.0
    row = 3
    query = view.links.rows[row]
    places = {(0, 0): 0, (0, 1): query - 1, (0, 2): query, (1, 1): query - 2}
    for (layer, head), key in places.items():
        view.links.keys[row, layer, head, 0] = key
        view.links.weights[row, layer, head, 0] = 0.5 if (layer, head) == (1, 1) else 0.9
    assert choose_head(view) == (1, 1)
    assert "Strongest links of L1H1" in printed(80, view)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_hostile_tokens_stay_text(width: int) -> None:
    view = inspection(layers=2, heads=3, tokens=HOSTILE * 2, index=20)
    view.provenance["model"] = "\x1b]0;title\x07[red]model"
    text = printed(width, view)
    assert not set(text) & set("\x1b\x07\x00\u202e\u200d\u2028\ud800\t")
    assert "[red]model" in text
    assert max(cell_len(line) for line in text.splitlines()) <= width


def test_colored_output_has_the_same_text() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, color_system="truecolor")
    print_inspection(console, inspection(), sort="entropy_share")
    colored = stream.getvalue()
    assert "\x1b[" in colored
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == printed(80)


def test_visible_tokens() -> None:
    assert visible(" it") == "·it"
    assert visible(" it", spaces=False) == " it"
    assert visible("\n\n") == "⏎⏎"
    assert visible("\t") == "⇥"
    assert visible("\x1b") == "\\x1b"
    assert visible("\u202e") == "\\u202e"
    assert visible("") == "(empty)"
    assert visible("\u0301") == "◌\u0301"
    assert visible("日本") == "日本"


def test_cutting_counts_terminal_cells() -> None:
    assert fit("日本語", 6) == "日本語"
    assert fit("日本語", 5) == "日本…"
    assert fit_left("日本語", 5) == "…本語"
    assert fit_left("chased the", 6) == "…d the"
    assert fit_left("abc", 3) == "abc"
    assert cell_len(fit("日本語", 4)) <= 4


def test_numbers() -> None:
    assert short_count(134515008) == "135 M"
    assert short_count(999) == "999"
    assert short_count(999_950) == "1.00 M"
    assert short_count(2.26e18) == "2.26 E"
    assert short_bytes(34359738368) == "34.4 GB"
    assert short_bytes(2.26e18) == "2.26 EB"
    assert [weight(w) for w in (0, 0.001, 0.31, 0.999, 1)] == [
        "0.00",
        "<.01",
        "0.31",
        ">.99",
        "1.00",
    ]
    assert [measure(m) for m in (0.04, 9.94, 9.96, 1234.4, float("nan"))] == [
        "0.0",
        "9.9",
        "10",
        "1234",
        "-",
    ]
    assert seconds(25.26) == "25.3 s"
    assert seconds(187) == "3 min 7 s"


@pytest.mark.parametrize(
    ("share", "drawn"), [(0, "    "), (0.001, "▏   "), (0.5, "██  "), (1, "████")]
)
def test_bars(share: float, drawn: str) -> None:
    assert bar(share, 4) == drawn
    assert len(bar(float("nan"), 4)) == 4


def test_the_ranked_table_has_known_statistics() -> None:
    assert set(RANKED) <= set(STATISTICS)
