"""Reading a corpus: statistics, links, sample, resuming, memory."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("safetensors")

import multihead as mh
import tiny
from corpora import TEXTS, Characters
from multihead.errors import ArgumentError, InputError
from multihead.heads import CorpusRecord, HeadRecord, read_corpus
from multihead.heads.corpora.links import AFTER, BEFORE, SAMPLED, STRONGEST, draw
from multihead.heads.corpora.text import Digest, Windows, documents

CONTEXT = 23
TOKENS = 10_000  # more than the texts have


def read(model=None, tokenizer=None, texts=TEXTS, **options):
    options = {"context": CONTEXT, "tokens": TOKENS} | options
    return read_corpus(model or tiny.language_model(), tokenizer or Characters(), texts, **options)


def windows_of(texts=TEXTS, tokenizer=None, context=CONTEXT):
    windows = Windows(tokenizer or Characters(), context)
    return [it for it in windows.of(documents(texts), Digest()) if len(it.ids) > 1]


def weights_of(model, window):
    """Every weight of a window, float64 [L, H, Lq, Lk], by another path than the reading's."""
    with mh.watch(model, keep="weights") as heads, torch.no_grad():
        model(torch.tensor([window.ids]))
    patterns = heads.record().patterns
    return np.stack(
        [np.asarray(patterns[name][0]) for name in patterns if "pattern" in name]
    ).astype(np.float64)


def equal(one: CorpusRecord, other: CorpusRecord) -> bool:
    """Whether two readings found the same, bit for bit."""
    facts = [dataclasses.replace(it.facts, seconds=0.0) for it in (one, other)]
    return (
        facts[0] == facts[1]
        and (one.names, one.pieces) == (other.names, other.pieces)
        and same_statistics(one.heads, other.heads)
        and np.array_equal(one.firsts, other.firsts)
        and all(
            np.array_equal(getattr(getattr(one, kind), name), getattr(getattr(other, kind), name))
            for kind in ("strongest", "sampled")
            for name in getattr(one, kind).names()
        )
    )


def same_statistics(one: HeadRecord, other: HeadRecord) -> bool:
    return one.names == other.names and all(
        np.array_equal(getattr(mine, array), getattr(other.totals[name], array))
        for name, mine in one.totals.items()
        for array in mine.arrays()
    )


def test_statistics_are_those_of_the_windows_one_by_one():
    model, record = tiny.language_model(), read()
    expected = None
    for window in windows_of():
        with mh.watch(model) as heads, torch.no_grad():
            model(torch.tensor([window.ids]))
        expected = heads.record() if expected is None else expected.merge(heads.record())
    assert same_statistics(record.heads, expected)
    assert record.tokens == sum(map(len, TEXTS)) - 1  # a window of one token is left out
    assert (record.facts.skipped, record.facts.documents) == (1, 3)
    assert record.facts.windows == len(windows_of())
    assert not record.one_text


def test_strongest_links_are_those_of_the_whole_matrices():
    model = tiny.language_model(dtype=torch.float64)
    record = read(model)
    found = []
    for window in windows_of():
        weights = weights_of(model, window)
        weights[..., 0] = 0
        for query in range(len(window.ids)):
            key = weights[:, :, query].argmax(-1)
            best = weights[:, :, query].max(-1)
            found.append((best, key, query, window))
    for layer in range(2):
        for head in range(6):
            ranked = sorted(found, key=lambda it: -it[0][layer, head])[:STRONGEST]
            links = record.strongest_links(layer, head)
            assert len(links) == STRONGEST
            for link, (best, key, query, window) in zip(links, ranked, strict=True):
                assert link.weight == pytest.approx(best[layer, head], rel=1e-6)
                assert link.query_position == window.start + query
                assert link.key_position == window.start + key[layer, head]
                assert (link.document, link.window) == (window.name, window.start)
                assert link.query == Characters().decode([window.ids[query]])


@pytest.mark.parametrize("family", ["gpt_oss", "bert", "gemma3"])
def test_links_of_other_families(family):
    """Learned sinks; no causal mask; layers with windows."""
    pytest.importorskip("transformers")
    import families

    model = families.build(family).double()
    record = read(model, texts=TEXTS[2:3])
    found = [weights_of(model, window)[..., 1:] for window in windows_of(TEXTS[2:3])]
    for layer, head in record.heads.places():
        best = np.concatenate([it[layer, head].max(-1) for it in found])
        links = record.strongest_links(layer, head)
        expected = np.sort(best[best > 0])[::-1][: len(links)]
        np.testing.assert_allclose([it.weight for it in links], expected, rtol=1e-6)
        assert len(links) == min(STRONGEST, (best > 0).sum())


def test_first_keys_are_counted_and_not_among_the_links():
    model = tiny.language_model()
    record = read(model)
    firsts = sum((weights_of(model, it)[:, :, 1:].argmax(-1) == 0).sum(-1) for it in windows_of())
    assert np.array_equal(record.firsts, firsts)
    assert_close_share(record, firsts)
    assert (record.strongest.key != 0).all()


def assert_close_share(record, firsts):
    expected = firsts / (record.tokens - record.facts.windows)
    np.testing.assert_array_equal(record.first_key_first, expected)


def test_context_stands_around_both_tokens():
    record = read()
    decode = Characters().decode
    windows = {(it.name, it.start): it.ids for it in windows_of()}
    for link in record.strongest_links(1, 2):
        ids = windows[link.document, link.window]
        for column, piece, before, after in (
            (link.query_position - link.window, link.query, link.query_before, link.query_after),
            (link.key_position - link.window, link.key, link.key_before, link.key_after),
        ):
            assert piece == decode([ids[column]])
            assert before == decode(ids[max(0, column - BEFORE) : column])
            assert after == decode(ids[column + 1 : column + 1 + AFTER])


def test_words_in_pieces_are_joined():
    class WordPieces(Characters):
        def decode(self, ids, **options):
            return ("" if ids[0] % 2 else "##") + super().decode(ids, **options)

    plain, pieces = Characters(), read(tokenizer=WordPieces(), texts=TEXTS[:1]).pieces
    assert len(pieces) > 5
    for token, text in pieces.items():
        assert text == (" " if token % 2 else "") + plain.decode([token])


def test_a_sample_that_holds_all_queries_has_their_strongest_keys():
    """Fewer queries than the sample takes: each is there, in every head."""
    model = tiny.language_model()
    record = read(model, texts=TEXTS[:4])
    places = {
        (window.document, window.start, query): weights[:, :, query]
        for window in windows_of(TEXTS[:4])
        for weights in [weights_of(model, window)]
        for query in range(1, len(window.ids))
    }
    drawn = record.sampled
    (there,) = np.nonzero(drawn.query >= 0)
    assert len(there) == len(places) == record.queries < SAMPLED
    for place in there:
        key = (drawn.document[place], drawn.start[place], drawn.query[place])
        weights = places.pop(tuple(map(int, key)))
        np.testing.assert_allclose(drawn.weight[..., place], weights.max(-1), rtol=1e-5)
        assert np.array_equal(drawn.key[..., place], weights.argmax(-1))
    assert not places


def test_deciles_are_even_parts_of_the_sorted_sample():
    record = read(texts=TEXTS[:4])
    for layer, head in ((0, 0), (1, 5)):
        drawn = record.sampled.query >= 0
        weights = np.sort(record.sampled.weight[layer, head, drawn])
        parts = np.array_split(weights, 10)
        deciles = record.deciles(layer, head)
        assert [len(it) for it in deciles] == [8] * 10
        for links, part in zip(deciles, parts, strict=True):
            found = [link.weight for link in links]
            assert found == sorted(found)
            assert set(np.float32(found)) <= set(part)
    assert [len(it) for it in record.deciles(0, 0, 3)] == [3] * 10


def test_the_sample_is_even_over_windows():
    """Late windows are drawn as often as early ones, though none knew how many there would be."""
    priority, at = np.full(SAMPLED, np.inf), np.full(SAMPLED, -1)
    for window in range(200):
        drawn = draw(priority, window, 1 + 50, seed=7)
        priority[drawn.slots], at[drawn.slots] = drawn.priority, window
        assert drawn.columns.min(initial=1) >= 1
        assert drawn.columns.max(initial=1) <= 50
    counts = np.bincount(at // 50, minlength=4)
    assert counts.sum() == SAMPLED
    assert abs(counts - SAMPLED / 4).max() < 4 * np.sqrt(SAMPLED / 4 * 3 / 4)


def test_documents_are_never_joined():
    model = tiny.language_model()
    both, alone = read(model, texts=TEXTS[::4]), [read(model, texts=[it]) for it in TEXTS[::4]]
    assert same_statistics(both.heads, alone[0].heads.merge(alone[1].heads))


def test_one_document_is_one_text():
    record = read(texts=TEXTS[:1])
    assert record.one_text
    assert record.heads.one_text
    assert "one text" in repr(record)


def test_counts_may_be_those_of_numpy():
    counted = read(tokens=np.int64(90), context=np.int32(CONTEXT), seed=np.int64(3))
    assert equal(counted, read(tokens=90, seed=3))
    json.dumps(counted.to_json())


def test_tokens_bound_the_reading():
    record = read(tokens=100)
    assert record.tokens == 100
    assert record.facts.asked == 100
    seen = []
    read(tokens=60, progress=lambda done, asked: seen.append((done, asked)))
    assert seen == [(23, 60), (46, 60), (60, 60)]


def test_special_tokens_stand_in_every_window():
    tokenizer = Characters(special=True)
    record = read(tokenizer=tokenizer, texts=TEXTS[:1])
    windows = windows_of(TEXTS[:1], tokenizer)
    assert all(it.ids[0] == 1 and it.ids[-1] == 2 and len(it.ids) <= CONTEXT for it in windows)
    assert sum(len(it.ids) - 2 for it in windows) == len(TEXTS[0])
    assert record.facts.special == (1, 1)
    text = TEXTS[0]
    shift = Characters().decode(Characters()(text)["input_ids"])
    for link in record.strongest_links(0, 3):
        if link.query not in ("<s>", "</s>"):
            assert shift[link.query_position] == link.query


def test_the_hash_depends_on_order_text_and_tokens():
    texts = tuple(it[:60] for it in TEXTS)
    variants = (
        {},
        {"texts": texts[::-1]},
        {"texts": ["".join(texts)]},
        {"texts": [*texts[:-1], texts[-1] + "!"]},
        {"context": 24},
        {"tokens": 99},
    )
    hashes = {read(**({"texts": texts} | it)).facts.sha256 for it in variants}
    assert len(hashes) == len(variants)
    assert read(texts=texts).facts.sha256 in hashes


def test_saved_and_loaded(tmp_path):
    record = read()
    record.save(tmp_path / "corpus.safetensors")
    loaded = CorpusRecord.load(tmp_path / "corpus.safetensors")
    assert equal(record, loaded)
    assert loaded.to_json() == record.to_json()
    assert loaded.strongest_links(1, 1) == record.strongest_links(1, 1)
    record.heads.save(tmp_path / "heads")
    with pytest.raises(InputError, match="no record of a corpus"):
        CorpusRecord.load(tmp_path / "heads")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-1], "is no JSON object"),
        (lambda text: "[]", "is no JSON object"),
        (lambda text: text.replace('"facts"', '"fact"'), "'facts'"),
        (lambda text: text.replace('"asked"', '"aske"'), "'aske'"),
        (lambda text: text.replace('"special": [0, 0]', '"special": 0'), "another kind"),
        (lambda text: text.replace('"names": {', '"names": {"x": "", '), "'x'"),
        (lambda text: text.replace('"format": 1', '"format": 0'), "another version"),
    ],
)
def test_a_file_whose_words_are_damaged_is_refused(tmp_path, change, message):
    from safetensors.numpy import save_file

    arrays, metadata = parts(tmp_path / "corpus")
    key = "multihead.corpus"
    assert change(metadata[key]) != metadata[key]
    save_file(arrays, tmp_path / "corpus", metadata | {key: change(metadata[key])})
    with pytest.raises(InputError, match=f"corpus .*{message}"):
        CorpusRecord.load(tmp_path / "corpus")


@pytest.mark.parametrize("name", ["firsts", "strongest.key", "sampled.priority", "entropy.sum"])
def test_a_file_of_other_tables_is_refused(tmp_path, name):
    from safetensors.numpy import save_file

    arrays, metadata = parts(tmp_path / "corpus")
    for change in (arrays | {name: arrays[name][:1]}, {k: arrays[k] for k in arrays if k != name}):
        save_file(change, tmp_path / "corpus", metadata)
        with pytest.raises(InputError, match=f"corpus is damaged.*{name}"):
            CorpusRecord.load(tmp_path / "corpus")


def parts(path):
    """The arrays and the metadata of a record that is saved at `path`."""
    from safetensors import safe_open

    read(texts=TEXTS[:1]).save(path)
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


class _Stop(Exception):
    pass


def interrupted(state: Path, windows: int, **options) -> None:
    """A reading that ends by an error after some windows."""
    seen = []

    def progress(done: int, asked: int) -> None:
        seen.append(done)
        if len(seen) > windows:
            raise _Stop

    with pytest.raises(_Stop):
        read(progress=progress, state=state, save_seconds=0.0, **options)


@pytest.mark.parametrize("windows", [1, 5, 9, 15])
def test_a_reading_goes_on_bit_for_bit(tmp_path, windows):
    state = tmp_path / "state"
    interrupted(state, windows)
    seen = []
    resumed = read(state=state, progress=lambda done, asked: seen.append(done))
    assert len(seen) == resumed.facts.windows - windows
    assert equal(resumed, read())
    assert equal(read(state=state), resumed)  # the state stays until the result is saved


@pytest.mark.parametrize("name", [None, "other"])
def test_a_reading_goes_on_under_another_name(tmp_path, name):
    interrupted(tmp_path / "state", 5, name="one")
    resumed = read(state=tmp_path / "state", name=name)
    assert resumed.heads.model == (name or "LanguageModel")
    assert equal(resumed, read())


def test_the_state_is_of_whole_windows(tmp_path, monkeypatch):
    """An interruption while a window is read leaves nothing of it."""
    state = tmp_path / "state"
    interrupted(state, 3)
    before = state.read_bytes()
    monkeypatch.setattr("multihead.heads.corpora.window.layer_links", _raise_at_call(2))
    with pytest.raises(_Stop):
        read(state=state, save_seconds=0.0)
    assert state.read_bytes() == before
    monkeypatch.undo()
    assert equal(read(state=state), read())


def _raise_at_call(number):
    calls = []

    def stop(*_):
        calls.append(1)
        if len(calls) == number:
            raise _Stop
        return calls

    return stop


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"texts": ("something else " * 30, *TEXTS)}, "another corpus"),
        ({"texts": TEXTS[:1]}, "a corpus that goes on"),
        ({"model": tiny.language_model(seed=12)}, "another model"),
        ({"model": tiny.language_model(dtype=torch.float64)}, "another model"),
        ({"model": tiny.language_model(window=5)}, "another model"),
        ({"context": 24}, "context 23, not 24"),
        ({"tokens": 9_000}, "tokens 10000, not 9000"),
        ({"seed": 1}, "seed 0, not 1"),
        ({"statistics": "entropy"}, "statistics"),
    ],
)
def test_what_changed_refuses_to_go_on(tmp_path, changed, message):
    state = tmp_path / "state"
    interrupted(state, 9)
    with pytest.raises(InputError, match=message):
        read(state=state, **changed)
    assert state.exists()


def test_an_unfinished_reading_is_no_record(tmp_path):
    interrupted(tmp_path / "state", 2)
    with pytest.raises(InputError, match="state of an unfinished reading"):
        CorpusRecord.load(tmp_path / "state")
    read().save(tmp_path / "done")
    with pytest.raises(InputError, match="finished record"):
        read(state=tmp_path / "done")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"texts": "some text"}, ArgumentError, r"\[text\] for one text"),
        ({"texts": [3]}, ArgumentError, "number 0 is a int"),
        ({"texts": [""]}, InputError, "no text"),
        ({"texts": []}, InputError, "no text"),
        ({"tokens": 1}, ArgumentError, "2 or more"),
        ({"tokens": 1e6}, ArgumentError, "tokens must be an integer"),
        ({"context": 23.0}, ArgumentError, "context must be an integer"),
        ({"context": True}, ArgumentError, "context must be an integer"),
        ({"context": 1}, ArgumentError, "two tokens of text"),
        ({"model": tiny.language_model("learned"), "context": 62}, ArgumentError, "61 positions"),
        ({"statistics": "entropie"}, ArgumentError, "Unknown statistic"),
    ],
)
def test_what_cannot_be_read(options, error, message):
    with pytest.raises(error, match=message):
        read(**options)


def test_the_context_is_no_longer_than_the_positions_of_a_model():
    record = read(tiny.language_model("learned"), context=None)
    assert record.facts.context == 61


def test_roberta_begins_to_count_behind_its_padding_token():
    """Of 61 rows its positions have, the first two stand for none."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(num_hidden_layers=2, num_attention_heads=3, hidden_size=33, intermediate_size=37)
    config = transformers.RobertaConfig(
        **sizes, vocab_size=101, max_position_embeddings=61, pad_token_id=1
    )
    model = transformers.RobertaModel(config).eval()
    assert read(model, context=None).facts.context == 59
    with pytest.raises(ArgumentError, match="60 tokens are needed, but the model has 59 positions"):
        read(model, context=60)


def test_a_head_that_is_not_there():
    with pytest.raises(ArgumentError, match="no head 6 in layer 1"):
        read().strongest_links(1, 6)


_PEAK = """
import sys
import torch
torch.set_num_threads(1)
import tiny
from corpora import Characters
from multihead.heads import read_corpus

texts = (("words of document %d " % number) * 20 for number in range(10**9))
read_corpus(tiny.language_model(), Characters(), texts, tokens=int(sys.argv[1]), context=61)
"""


def _peak(tokens: int) -> int:
    fresh = pytest.importorskip("multihead.bench.fresh")
    return int(fresh.run_fresh(["-c", _PEAK, str(tokens)], threads=1).peak_rss_bytes)


@pytest.mark.slow
def test_memory_does_not_grow(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(it for it in sys.path if it))
    assert _peak(6_000) - _peak(3_000) < 3 * 2**20


@pytest.mark.proof
def test_memory_does_not_grow_over_many_windows(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ":".join(it for it in sys.path if it))
    assert _peak(80_000) - _peak(40_000) < 3 * 2**20
