"""The page of a report: its data within the stated precision, its text safe, its file whole."""

import base64
import hashlib
import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import inspections
from multihead.errors import InputError
from multihead.report import page, render
from multihead.report.pack import pack_linear, pack_log, pack_raw, without_sinks
from multihead.report.render import SCRIPTS, STYLES, contents

HOSTILE = "</script><img src=x onerror=alert(1)>"
ASSETS = Path(render.__code__.co_filename).parent / "assets"


@pytest.fixture(scope="module")
def made():
    return inspections.made_up(149, layers=5, heads=3)


def unpack(packed):
    """The values of a packed array, by the rules in `report.pack`, as float64."""
    kind = f"<{packed['type']}"
    codes = np.frombuffer(base64.b64decode(packed["data"]), kind).reshape(packed["shape"])
    if packed["rule"] == "raw":
        return codes
    known = codes.astype(np.float64)
    if packed["rule"] == "linear":
        values = packed["low"] + packed["step"] * known
    else:
        values = np.where(codes, packed["low"] * 2 ** (packed["step"] * (known - 1)), 0)
    return np.where(codes == np.iinfo(kind).max, np.nan, values)


def assert_within(packed, expected):
    """Decoded values are as near to `expected` as the packed array says."""
    values, expected = unpack(packed), np.asarray(expected, dtype=np.float64)
    assert values.shape == expected.shape
    np.testing.assert_array_equal(np.isnan(values), np.isnan(expected))
    error = np.abs(values - expected)
    if packed["rule"] == "log":
        bound = np.where(expected < packed["low"], packed["low"], packed["error"] * expected)
    else:
        bound = np.full_like(expected, packed["error"])
    assert np.all((error <= bound * 1.001 + 1e-15) | np.isnan(expected))


class Seen(HTMLParser):
    """Collects what a browser would make elements of."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.blocks, self._open = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id", tag)

    def handle_data(self, data):
        self.blocks[self._open] = self.blocks.get(self._open, "") + data

    def handle_endtag(self, tag):
        self._open = None


def test_every_array_is_within_its_stated_precision(made):
    data = contents(made)
    visible = np.isfinite(made.maps["uniform"])
    strips = unpack(data["sinks"]["strips"])
    rest = unpack(data["map"]["rest"])
    mass = rest.copy()
    cells = np.cumsum(visible.ravel()).reshape(visible.shape) - 1
    for sink, column in enumerate(data["sinks"]["columns"]):
        bin_ = max(at for at, edge in enumerate(data["map"]["edges"]) if edge <= column)
        rows = np.flatnonzero(visible[:, bin_])
        mass[..., cells[rows, bin_]] += strips[:, :, rows, sink]
    assert len(data["sinks"]["columns"]) > 0
    np.testing.assert_allclose(mass, made.maps["mass"][..., visible], rtol=3e-4, atol=3e-6)
    assert_within(data["map"]["peak"], made.maps["peak"][..., visible])
    assert_within(data["sinks"]["strips"], made.sinks.strips)
    assert_within(data["received"]["mean"], made.received)
    assert_within(data["links"]["weights"], made.links.weights)
    np.testing.assert_array_equal(unpack(data["links"]["keys"]), made.links.keys)
    for name, values in made.strips.items():
        assert_within(data["strips"][name], values)
    for name, values in made.statistics.items():
        np.testing.assert_array_equal(unpack(data["statistics"][name]), values)
    np.testing.assert_array_equal(unpack(data["token"]["keys"]), made.token.top_keys)
    np.testing.assert_array_equal(unpack(data["token"]["meanWeights"]), made.token.mean_top_weights)
    np.testing.assert_array_equal(unpack(data["map"]["uniform"]), made.maps["uniform"])


@pytest.mark.parametrize("bits", [8, 16])
def test_codes_keep_zero_one_and_nan(bits):
    values = np.array([0.0, 1e-9, 1e-6, 0.013, 0.5, 1.0, np.nan])
    log = unpack(pack_log(values, bits))
    assert log[0] == 0
    assert log[1] == 0
    assert log[5] == pytest.approx(1, rel=1e-12)
    assert_within(pack_log(values, bits), values)
    assert_within(pack_linear(values * 700 - 3, bits), values * 700 - 3)
    assert pack_log(values, bits)["error"] < (0.03 if bits == 8 else 1.1e-4)


def test_arrays_without_a_range_are_packed():
    for values in (np.full((2, 3), 5.0), np.full(4, np.nan), np.zeros((0, 3))):
        assert_within(pack_linear(values), values)
    assert unpack(pack_raw(np.array([7, -1])))[1] == -1


def test_the_checker_of_precision_can_fail():
    with pytest.raises(AssertionError):
        assert_within(pack_log(np.array([0.5])), [0.501])


def test_sinks_leave_their_cell_and_no_other():
    mass = np.full((1, 4, 4), 0.25)
    rest = without_sinks(mass, np.full((1, 4, 2), 0.1), [1, 7], [0, 2, 4, 6, 8])
    assert rest[0, 2].tolist() == pytest.approx([0.15, 0.25, 0.25, 0.15])


def test_hostile_text_stays_text(made):
    texts = [HOSTILE, "{{script}}", "\u2028<!--", "\u202egnp.exe", "\x00", "a\ud800b"]
    tokens = texts + made.tokens[len(texts) :]
    made_hostile = inspections.made_up(
        149, layers=5, heads=3, tokens=tokens, provenance={**made.provenance, "model": HOSTILE}
    )
    text = page(made_hostile)
    seen = Seen(text)
    names = [tag for tag, _ in seen.tags]
    assert "img" not in names
    assert names.count("script") == 2
    assert text.count("</script") == 2
    assert json.loads(seen.blocks["data"])["tokens"] == tokens
    assert json.loads(seen.blocks["data"])["provenance"]["model"] == HOSTILE
    assert seen.blocks["title"] == f"Every head of {HOSTILE}"


def test_page_needs_nothing_else(made):
    text = page(made)
    seen = Seen(text)
    for tag, attributes in seen.tags:
        assert tag not in {"link", "iframe", "object", "embed", "base", "form"}
        assert "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, never fetched
    (policy,) = [
        attributes["content"]
        for _, attributes in seen.tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    script = text[text.index('<script type="module">') + 22 : text.rindex("</script>")]
    style = text[text.index("<style>") + 7 : text.index("</style>")]
    for part in (script, style):
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_scripts_import_only_what_stands_before_them():
    exported, names = {}, []
    for name in SCRIPTS:
        text = (ASSETS / name).read_text("utf-8")
        assert text.count("\n") < 400
        for wanted, source in re.findall(r'^import \{ ([^}]*) \} from "\./(.*)";$', text, re.M):
            assert set(wanted.split(", ")) <= exported[source], (name, source)
        assert len(re.findall(r"^import ", text, re.M)) == len(
            re.findall(r'^import \{ [^}]* \} from "\./[^"]*";$', text, re.M)
        )
        kinds = r"(?:function|const|let|class)"
        names += re.findall(rf"^(?:export )?{kinds} (\w+)", text, re.M)
        exported[name] = set(re.findall(rf"^export {kinds} (\w+)", text, re.M))
        assert "innerHTML" not in text
        assert "insertAdjacent" not in text
    assert len(names) == len(set(names)), "one scope in the page: names must differ"
    assert {path.name for path in ASSETS.glob("*.js")} == set(SCRIPTS)
    assert {path.name for path in ASSETS.glob("*.css")} == set(STYLES)


@pytest.mark.slow
def test_size_is_bounded_and_grows_by_the_text_alone():
    short, long = inspections.of_size(1024), inspections.of_size(8192)
    sizes = [len(page(made).encode()) for made in (short, long)]
    texts = [len(json.dumps(made.tokens, separators=(",", ":"))) for made in (short, long)]
    assert sizes[1] < 8_000_000
    assert sizes[1] - sizes[0] <= texts[1] - texts[0] + 2048


def test_values_that_json_has_no_word_for_become_null(made):
    provenance = {**made.provenance, "seconds": math.nan, "dense_error_max": np.float64("inf")}
    changed = inspections.made_up(149, layers=5, heads=3, provenance=provenance)
    data = json.loads(Seen(page(changed)).blocks["data"])
    assert data["provenance"]["seconds"] is None
    assert data["provenance"]["dense_error_max"] is None
    assert data["provenance"]["peak_rss_bytes"] == 1_234_567_890


def test_the_folders_of_the_model_file_stay_private(made):
    text = page(made)
    assert made.provenance["file"] == "/home/someone/made-up.gguf"
    assert "made-up.gguf" in text
    assert "someone" not in text


def test_render_writes_the_page(made, tmp_path):
    path = render(made, tmp_path / "heads.html")
    assert path.read_text("utf-8") == page(made)
    assert [entry.name for entry in tmp_path.iterdir()] == ["heads.html"]


def test_a_failed_write_keeps_what_was_there(made, tmp_path, monkeypatch):
    path = tmp_path / "heads.html"
    path.write_text("the old page")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(
        InputError, match=r"heads\.html cannot be written: No space left on device\.$"
    ):
        render(made, path)
    assert path.read_text() == "the old page"
    assert [entry.name for entry in tmp_path.iterdir()] == ["heads.html"]


def test_paths_that_cannot_be_written_are_told_in_a_sentence(made, tmp_path, monkeypatch):
    with pytest.raises(
        InputError, match=r"nowhere.heads\.html cannot be written: No such file or directory\.$"
    ):
        render(made, tmp_path / "nowhere" / "heads.html")
    with pytest.raises(InputError, match=r"cannot be written: Is a directory\.$"):
        render(made, tmp_path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(InputError, match="Permission denied"):
        render(made, tmp_path / "heads.html")


def test_an_inspection_without_maps_is_refused():
    with pytest.raises(InputError, match="maps"):
        page(inspections.made_up(31, layers=2, heads=2, maps={}, sinks=None, received=None))
