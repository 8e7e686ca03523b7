"""An inspection against the whole matrices of the same model, and what a beginner runs into."""

import gc
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import families
import multihead as mh
from close import assert_close
from multihead.heads.inspecting import capture
from multihead.heads.inspecting.inspection import Inspection, inspect_model
from multihead.heads.running import observing
from multihead.heads.text import SENTENCE
from multihead.heads.watching.statistics import STATISTICS
from multihead.ops.backends import native
from multihead.ops.pooling import bin_edges
from requires import require
from test_watch import of_matrices
from words import Words

LENGTH = 149
TOKEN = 41
TEXT = " ".join(f"w{(7 * i * i + i) % 83}" for i in range(LENGTH))


def inspect(model: nn.Module, **options: Any) -> Inspection:
    require("models")
    tokenizer = options.pop("tokenizer", None) or Words(families.VOCABULARY)
    return inspect_model(model, tokenizer, **options)


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    require("models")
    return inspect(families.build("llama"), text=TEXT, token=TOKEN, report=True)


@pytest.fixture(scope="module")
def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    """Eager's matrices [layers, heads, N, N] in float64 and in float32."""
    require("models")
    ids = torch.tensor(
        [Words(families.VOCABULARY)(TEXT, add_special_tokens=True, verbose=False)["input_ids"]]
    )
    found = []
    for dtype in (torch.float64, torch.float32):
        with torch.no_grad():
            model = families.build("llama").to(dtype)
            found.append(torch.cat(model(ids, output_attentions=True).attentions).to(dtype))
    return found[0], found[1]


def close_to(actual: np.ndarray, exact: torch.Tensor, plain: torch.Tensor, what: str) -> None:
    # Two layers deep, and means that can be exact by luck: the error of the model, not of a step.
    assert_close(torch.from_numpy(actual), exact, plain, factor=4.0, what=what)


def over_bins(rows: torch.Tensor, bins: int) -> torch.Tensor:
    edges = itertools.pairwise(bin_edges(rows.shape[-1], bins))
    return torch.stack([rows[..., a:b].mean(-1) for a, b in edges], -1)


def test_statistics_and_strips(inspection: Inspection, matrices: Any) -> None:
    exact, plain = (of_matrices(whole) for whole in matrices)
    assert (inspection.layers, inspection.heads, inspection.kv_heads) == (2, 6, 2)
    assert set(inspection.statistics) == set(STATISTICS)
    for name, rows in exact.items():
        close_to(inspection.statistics[name], rows.mean(-1), plain[name].mean(-1), name)
    assert set(inspection.strips) == {"entropy", "max_weight", "mean_distance", "sink_mass"}
    for name, strips in inspection.strips.items():
        close_to(strips, over_bins(exact[name], 128), over_bins(plain[name], 128), name)


def test_maps(inspection: Inspection, matrices: Any) -> None:
    edges = list(itertools.pairwise(bin_edges(LENGTH, 64)))
    visible = torch.ones(LENGTH, LENGTH).tril().bool()
    uniform = visible.double() / visible.sum(-1, keepdim=True)

    def pool(whole: torch.Tensor, peak: bool = False) -> torch.Tensor:
        cells = whole.new_full((*whole.shape[:-2], 64, 64), torch.nan)
        for (r, (top, bottom)), (c, (left, right)) in itertools.product(
            enumerate(edges), enumerate(edges)
        ):
            cell = whole[..., top:bottom, left:right]
            if visible[top:bottom, left:right].any():
                cells[..., r, c] = cell.amax((-1, -2)) if peak else cell.sum(-1).mean(-1)
        return cells

    close_to(inspection.maps["mass"], *(pool(whole) for whole in matrices), "mass")
    close_to(inspection.maps["peak"], *(pool(whole, peak=True) for whole in matrices), "peak")
    close_to(inspection.maps["uniform"], pool(uniform), pool(uniform.float()), "uniform")


def test_what_keys_receive_and_sinks(inspection: Inspection, matrices: Any) -> None:
    seen = LENGTH - torch.arange(LENGTH)
    received = [over_bins(whole.sum(-2) / seen, 128) for whole in matrices]
    assert inspection.received is not None
    assert inspection.sinks is not None
    close_to(inspection.received, *received, "received")
    mean = matrices[0].mean(-2)
    often_seen = torch.arange(LENGTH) <= LENGTH / 2
    strong = torch.nonzero((mean > 0.05).any(0).any(0) & often_seen)[:, 0]
    ranked = strong[mean[..., strong].mean((0, 1)).argsort(descending=True)][:8].sort().values
    columns = inspection.sinks.columns
    assert columns.tolist() == ranked.tolist()
    assert len(columns) > 0
    close_to(inspection.sinks.mean, *(whole.mean(-2)[..., columns] for whole in matrices), "mean")
    strips = [over_bins(whole[..., columns].mT, 64).mT for whole in matrices]
    close_to(inspection.sinks.strips, *strips, "sink strips")


def test_what_the_token_reads(inspection: Inspection, matrices: Any) -> None:
    exact, plain = (whole[:, :, TOKEN] for whole in matrices)
    token = inspection.token
    assert token.index == TOKEN
    assert token.text == inspection.tokens[TOKEN] == " w" + str((7 * TOKEN * TOKEN + TOKEN) % 83)
    assert token.top_keys.shape == (2, 6, 8)
    assert np.array_equal(token.top_keys, exact.topk(8).indices.numpy())
    close_to(token.top_weights, exact.topk(8).values, plain.topk(8).values, "token")
    close_to(
        token.mean_top_weights,
        exact.mean(1).topk(8).values,
        plain.mean(1).topk(8).values,
        "mean of the token's heads",
    )
    assert np.array_equal(token.mean_top_keys, exact.mean(1).topk(8).indices.numpy())


def test_links(inspection: Inspection, matrices: Any) -> None:
    rows, keys = inspection.links.rows, inspection.links.keys
    assert TOKEN in rows
    assert len(rows) == 17
    assert keys.shape == (17, 2, 6, 5)
    exact, plain = (
        whole[:, :, rows].topk(5).values.permute(2, 0, 1, 3).contiguous() for whole in matrices
    )
    close_to(inspection.links.weights, exact, plain, "links")
    few = rows < 4
    assert np.array_equal(
        (keys[few] >= 0).sum(-1), np.broadcast_to(rows[few, None, None] + 1, keys[few].shape[:3])
    )


def test_provenance_and_cost(inspection: Inspection) -> None:
    facts = inspection.provenance
    assert facts["tokens"] == LENGTH == len(inspection.tokens)
    assert facts["start_token"] == "none added"
    assert facts["chat_template"] == "not applied"
    assert facts["dtype"] == "float32"
    assert facts["dense_error_rows"] == 2 * 8
    assert 0 < facts["dense_error_max"] <= 2 * facts["dense_error_baseline"] + 1e-6
    assert facts["seconds"] >= facts["forward_seconds"] > 0
    assert inspection.cost["visible_pairs"] == LENGTH * (LENGTH + 1) // 2
    assert inspection.cost["products_head"] == 0


def test_the_instruction_set_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    require("native")
    asked = []
    monkeypatch.setattr(native, "instruction_set", lambda dtype: asked.append(dtype) or "the set")
    halves = inspect(families.build("llama").bfloat16(), text="one two three")
    assert asked == [torch.bfloat16]
    assert halves.provenance["instruction_set"] == "the set"
    monkeypatch.setattr(native, "reasons", lambda problem: ["not today"])
    others = inspect(families.build("llama"), text="one two three")
    assert (others.provenance["backend"], others.provenance["instruction_set"]) == ("chunked", None)


def test_no_layer_keeps_its_inputs_alive() -> None:
    kept = capture.Capture(13, 5, layers=2, maps=True)
    shape = (1, 2, 13, 23)
    with observing(kept):
        for _ in range(2):
            mh.attention(*(torch.randn(shape) for _ in range(3)), mask=mh.Causal())
    assert len(kept.layers) == 2
    gc.collect()
    alive = [it for it in gc.get_objects() if type(it) is torch.Tensor]
    assert not [it.shape for it in alive if it.shape == shape]


def test_json_is_json_and_small(inspection: Inspection) -> None:
    document = json.loads(json.dumps(inspection.to_json(), allow_nan=False))
    assert "maps" not in document
    np.testing.assert_allclose(
        document["statistics"]["entropy"], inspection.statistics["entropy"], rtol=1e-5
    )
    assert document["token"]["top_keys"] == inspection.token.top_keys.tolist()


def test_without_a_report_no_map_is_made(inspection: Inspection) -> None:
    done = []
    model = families.build("llama").train()
    plain = inspect(
        model, text=TEXT, token=TOKEN, progress=lambda layer, layers: done.append((layer, layers))
    )
    assert (plain.maps, plain.sinks, plain.received) == ({}, None, None)
    assert done == [(1, 2), (2, 2)]
    for name in STATISTICS:
        assert np.array_equal(plain.statistics[name], inspection.statistics[name])
    json.dumps(plain.to_json(), allow_nan=False)
    assert model.training
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "gemma2", "gemma3", "gpt_oss"])
def test_other_families(family: str) -> None:
    model = families.build(family)
    made = inspect(model, text=TEXT, max_tokens=53, report=True)
    assert made.maps["mass"].shape[-2:] == made.maps["uniform"].shape == (53, 53)
    assert all(np.isfinite(values).all() for values in made.statistics.values())
    hidden = np.isnan(made.maps["uniform"])
    assert np.isnan(made.maps["mass"][..., hidden]).all()
    assert made.cost["parameters_total"] == sum(p.numel() for p in model.parameters())


def test_a_model_whose_cost_is_not_known_has_none() -> None:
    model = families.build("llama")
    model.config.model_type = "unheard_of"
    assert inspect(model, text=TEXT, max_tokens=5).cost == {}


def test_the_built_in_text() -> None:
    require("models")
    made = inspect(families.build("llama"), max_tokens=61)
    assert made.token.text == " it"
    assert (
        "".join(made.tokens[: made.token.index + 3])
        == SENTENCE[: SENTENCE.index(" tired")] + " tired"
    )
    assert len(made.tokens) == 61


def test_a_start_token_is_told() -> None:
    tokenizer = Words(families.VOCABULARY, start="<s>")
    made = inspect(families.build("llama"), tokenizer=tokenizer, text="one two three", token=" two")
    assert made.tokens == ["<s>", "one", " two", " three"]
    assert made.provenance["start_token"] == "<s>"
    assert made.token.index == 2


@pytest.mark.parametrize(
    ("token", "index"),
    [
        (None, 5), (0, 0), (-1, 6), ("-2", 5), ("3", 3), (" it", 5), ("it", 5), ("ran", 2),
        (" cat ", 1), ("The", 0),
    ],
)  # fmt: skip
def test_which_token_is_meant(token: str | int | None, index: int) -> None:
    text = "The cat ran it and it slept"
    tokenizer = Words(families.VOCABULARY)
    assert (
        inspect(families.build("llama"), tokenizer=tokenizer, text=text, token=token).token.index
        == index
    )


def test_a_long_text_is_cut_to_the_positions_of_the_model() -> None:
    model = families.build("gpt2")
    assert len(inspect(model).tokens) == 61
    with pytest.raises(mh.InputError, match=r"62 tokens were asked for, but .* 61 positions"):
        inspect(model, max_tokens=62)


def test_two_tokens_are_enough() -> None:
    made = inspect(families.build("llama"), text="two words", report=True)
    assert made.token.top_keys.shape == (2, 6, 2)
    assert made.maps["mass"].shape == (2, 6, 2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "word"}, "1 token long.*longer text"),
        ({"text": " \n"}, "prompt is empty"),
        ({"text": "caf\udce9 au lait"}, "prompt is no UTF-8 text: character 3 is U.DCE9"),
        ({"text": "a b c", "token": "z"}, "begins with the tokens 'a', ' b', ' c'"),
        ({"text": "The mouse sat", "token": "mousse"}, "Near to it: ' mouse'"),
        ({"text": "The mouse sat", "token": "mouse sat"}, r"' mouse' \(1\), ' sat' \(2\)"),
        ({"text": "a b c", "token": 3}, "no token 3: the text has 3 tokens, 0 to 2"),
        ({"text": "a b c", "token": -4}, "-3 to -1 from the end"),
        ({"text": "a b c", "max_tokens": 1}, "at least 2"),
        ({"max_tokens": 4097}, "4,097 tokens.*2,048 positions"),
        ({"text": Path("/nowhere/text.txt")}, "no text file /nowhere/text.txt"),
        ({"text": Path("/")}, "is a folder"),
    ],
)
def test_what_a_beginner_runs_into(options: dict[str, Any], message: str) -> None:
    model = families.build("llama")
    with pytest.raises(mh.InputError, match=message) as caught:
        inspect(model, **options)
    assert "\n" not in str(caught.value)


def test_text_files(tmp_path: Path) -> None:
    model, file = families.build("llama"), tmp_path / "text.txt"
    file.write_bytes("\ufeffA na\u00efve cat".encode())
    assert inspect(model, text=file).tokens == ["A", " na\u00efve", " cat"]
    file.write_bytes(b"")
    with pytest.raises(mh.InputError, match="is empty"):
        inspect(model, text=file)
    file.write_bytes("na\u00efve".encode("latin1"))
    with pytest.raises(mh.InputError, match=r"not UTF-8.*byte 2 is 0xef.*iconv"):
        inspect(model, text=file)


def test_models_that_are_refused() -> None:
    require("models")
    with pytest.raises(mh.ModelError, match="Linear is not a transformers model"):
        inspect(nn.Linear(3, 5), text="a b")
    with pytest.raises(mh.ModelError, match="encoder with a decoder"):
        inspect(families.build("t5"), text="a b")


def test_a_sink_that_a_layer_did_not_keep_has_its_mean_there(
    inspection: Inspection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "SINK_CANDIDATES", 1)
    few = inspect(families.build("llama"), text=TEXT, report=True).sinks
    every = inspection.sinks
    assert few is not None
    assert every is not None
    assert set(few.columns) < set(every.columns)
    assert len(few.columns) == 2, "one a layer, or the other layer's is never filled in"
    exact = every.strips[..., np.isin(every.columns, few.columns)]
    for layer in range(2):
        kept = [np.array_equal(few.strips[layer, ..., s], exact[layer, ..., s]) for s in range(2)]
        assert sorted(kept) == [False, True]
        missing = kept.index(False)
        mean = few.mean[layer, :, None, missing]
        assert np.array_equal(few.strips[layer, ..., missing], np.broadcast_to(mean, (6, 64)))
