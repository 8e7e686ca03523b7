"""The page in a real browser, opened from its file: quiet, alone, usable by key, and readable."""

import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

import inspections
from requires import require

pytestmark = pytest.mark.slow

HOSTILE = "</script><img src=x onerror=alert(1)>"
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
SIZES = {390: 844, 1440: 900}


def hostile(made):
    """`made` with a text and a model name that try to be more than text."""
    tokens = list(made.tokens)
    tokens[:4] = [HOSTILE, "\u202eright to left", "x" * 300, "a\ud800b"]
    tokens[-12] = tokens[-11] = f" {HOSTILE}"
    provenance = {**made.provenance, "model": f"model {HOSTILE}"}
    return replace(made, tokens=tokens, provenance=provenance)


@pytest.fixture(scope="module")
def made():
    return hostile(inspections.made_up(149))


@pytest.fixture(scope="module")
def address(made, tmp_path_factory):
    require("browser")
    from multihead.report import render

    return render(made, tmp_path_factory.mktemp("page") / "heads.html").as_uri()


@pytest.fixture(scope="module")
def small_address(tmp_path_factory):
    """A page with few heads and every kind of part: axe takes its time over 270 rows."""
    require("browser")
    from multihead.report import render

    small = hostile(inspections.made_up(149, layers=4, heads=6))
    return render(small, tmp_path_factory.mktemp("page") / "small.html").as_uri()


@pytest.fixture(scope="module")
def browser(address):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = os.fspath(shutil.which("chromium"))
        started = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        yield started
        started.close()


@pytest.fixture
def opened(browser, address):
    """`opened(width, scheme, hash)` is a loaded page; at the end nothing may have gone wrong."""
    contexts, files, requests, messages = [], [], [], []

    def open_page(width=1440, scheme="light", fragment="", file=address):
        context = browser.new_context(
            viewport={"width": width, "height": SIZES[width]}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("dialog", lambda dialog: (messages.append(dialog.message), dialog.dismiss()))
        files.append(file)
        page.goto(file + fragment)
        page.locator(".head-page h3").wait_for(timeout=10_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [url.partition("#")[0] for url in requests] == files
    assert messages == []


def test_nothing_but_the_page_is_asked_for_and_nothing_is_said(opened):
    page = opened()
    assert page.locator("h2").all_text_contents() == [
        "What does this token read?",
        "What does this head do?",
        "How was this made?",
    ]
    assert page.locator(".cell").count() == 270


def test_a_head_opens_by_click(opened):
    page = opened()
    page.get_by_role("gridcell", name="L3H8:").click()
    assert page.locator("#head-title").text_content() == "Layer 3, head 8"
    assert page.evaluate("location.hash") == "#L3H8"
    page.get_by_role("link", name="L4H8").first.click()
    assert page.locator("#head-title").text_content() == "Layer 4, head 8"
    page.go_back()
    assert page.locator("#head-title").text_content() == "Layer 3, head 8"


def test_a_head_opens_by_keys_alone(opened):
    page = opened(fragment="#L2H7")
    page.keyboard.press("Escape")
    for key in ("ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.dataset.layer") == "3"
    assert page.locator(".tip strong").text_content() == "Layer 3, head 8"
    assert page.locator('.cell[tabindex="0"]').count() == 1
    page.keyboard.press("Enter")
    assert page.locator("#head-title").text_content() == "Layer 3, head 8"
    assert page.evaluate("document.activeElement.id") == "head-title"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.head") == "8"


def test_the_address_names_a_head(opened):
    assert opened(fragment="#L3H8").locator("#head-title").text_content() == "Layer 3, head 8"
    beyond = opened(fragment="#L30H0").locator("#head-title").text_content()
    assert beyond != "Layer 30, head 0"


def test_hostile_text_stays_text(opened):
    page = opened()
    assert page.locator("img").count() == 0
    assert page.title() == f"Every head of model {HOSTILE}"
    assert page.locator("h1").text_content() == f"model {HOSTILE}"
    assert page.locator(".context mark").text_content() == f" {HOSTILE}"
    for option in page.locator(".links select option").all():
        page.locator(".links select").select_option(option.get_attribute("value"))
    page.get_by_role("button", name=re.compile("Show the other")).click()
    assert page.locator("img").count() == 0


def test_the_map_reads_out_the_values_of_the_inspection(opened, made):
    page = opened(fragment="#L2H1")
    page.locator(".map").focus()
    row, column = len(made.maps["uniform"]) - 1, 0
    for key, times in (("ArrowUp", 4), ("ArrowRight", 7)):
        for _ in range(times):
            page.keyboard.press(key)
    row, column = row - 4, column + 7
    said = page.locator("#map-readout").text_content()
    mass, peak = map(float, re.search(r"mass ([\d.]+) %, peak ([\d.]+) %", said).groups())
    assert mass == pytest.approx(100 * made.maps["mass"][2, 1, row, column], rel=0.02, abs=0.01)
    assert peak == pytest.approx(100 * made.maps["peak"][2, 1, row, column], rel=0.05, abs=0.01)
    uniform = made.maps["uniform"][row, column]
    lift = np.clip(np.log2(made.maps["mass"][2, 1, row, column] / uniform), -6, 6)
    written = re.search(r"lift (.)([\d.]+) bits", said)
    assert float(written[2]) * (1 if written[1] == "+" else -1) == pytest.approx(lift, abs=0.06)


def test_every_pool_and_statistic_can_be_shown(opened, made):
    page = opened()
    for pool in ("peak", "lift", "mass"):
        page.locator(".map-controls select").select_option(pool)
        assert page.locator(".words details li").first.text_content(timeout=1000).count(pool) == 1
    for name, values in made.statistics.items():
        page.locator(".overview select").select_option(name)
        label = page.locator(".cell").first.get_attribute("aria-label")
        shown = float(re.search(r"([\d.,]+) ?\D*$", label)[1].replace(",", ""))
        scale = 100 if label.endswith("%") else 1
        assert shown == pytest.approx(scale * values[0, 0], rel=0.01, abs=0.05)


def test_the_table_ranks_by_the_pressed_column(opened, made):
    page = opened()
    page.get_by_role("button", name="Sink mass").click()
    layer, head = np.unravel_index(np.argmax(made.statistics["sink_mass"]), (30, 9))
    first = page.locator(".ranked tbody tr").first
    assert first.locator("a").text_content() == f"L{layer}H{head}"
    page.get_by_role("button", name="Sink mass").click()
    layer, head = np.unravel_index(np.argmin(made.statistics["sink_mass"]), (30, 9))
    assert first.locator("a").text_content() == f"L{layer}H{head}"


def test_groups_count_the_heads_that_rank_a_key_first(opened, made):
    page = opened()
    keys, numbers = np.unique(made.token.top_keys[..., 0], return_counts=True)
    first = page.locator(".groups li").first
    assert f"{numbers.max()} heads" in first.locator(".group-bar").text_content()
    assert page.locator(".groups > li").count() == len(keys)
    first.locator("summary").click()
    assert first.locator("a").count() == numbers.max()


def test_unusual_inspections_open(opened, tmp_path):
    """A short text, no sinks, a model that the cost does not cover, a layer with its own mask."""
    from multihead.report import render

    made = inspections.made_up(13, layers=2, heads=2)
    made.statistics["entropy_share"][0, 1] = np.nan
    for name in ("mass", "peak"):
        made.maps[name][1, :, 7:, :3] = np.nan
    none = np.zeros((2, 2, 13, 0), dtype=np.float32)
    made = replace(
        made,
        sinks=replace(made.sinks, columns=np.array([], int), mean=none[..., 0, :], strips=none),
        cost={},
        provenance={**made.provenance, "file": None, "dense_error_baseline": None},
    )
    page = opened(fragment="#L1H1", file=render(made, tmp_path / "odd.html").as_uri())
    assert "shows all of the mass" in page.locator(".remaining").text_content()
    assert "does not cover this model" in page.locator("#made").text_content()
    page.locator(".map").press("Home")
    page.locator(".map").press("ArrowUp")
    assert "hidden by the mask" in page.locator("#map-readout").text_content()
    assert "not defined" in page.get_by_role("gridcell", name="L0H1:").get_attribute("aria-label")


@pytest.mark.parametrize("width", SIZES)
def test_nothing_overflows(opened, width):
    page = opened(width)
    for details in page.locator("details").all()[:3]:
        details.evaluate("node => { node.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", SIZES)
def test_no_serious_violation_of_accessibility(opened, small_address, width, scheme):
    from axe_playwright_python.sync_playwright import Axe

    page = opened(width, scheme, file=small_address)
    page.evaluate("document.querySelector('.words details').open = true")
    found = Axe().run(page).response["violations"]
    serious = [
        (one["id"], one["help"], [node["html"][:120] for node in one["nodes"]][:3])
        for one in found
        if one["impact"] in {"serious", "critical"}
    ]
    assert serious == []
