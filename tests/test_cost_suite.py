"""The suite `cost`: what it predicts, against the tensors of a pass and by hand."""

from dataclasses import replace

import pytest
import torch

import long_tables
import short_tables
from multihead import cost
from multihead.bench import contest, cost_prediction, cost_probe, show
from multihead.bench.cost_prediction import Work
from multihead.bench.cost_probe import DECODE, PREFILL, QUICK, TRAIN
from multihead.bench.limits import Limits
from multihead.bench.suites import SUITES
from multihead.bench.suites import cost as suite
from requires import require
from test_figures import document

SETTING = contest.Setting(1, 0.02, Limits(100.0, None, None), read_gb_per_s=10.0)

# Wide enough for the feed-forward network to be the widest moment, as in models that are used.
BLOCK = replace(QUICK.block, ffn_dim=4 * 48)
SHAPE = replace(QUICK, model=replace(QUICK.model, layers=(BLOCK,) * 4))


def tensor_peak(call):
    """The most bytes of tensors that were there at once beyond those that were there before."""
    call()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        call()
    events = [it for it in profile.profiler.kineto_results.events() if it.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda it: it.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize("tokens", [300, 700])
def test_a_prompt_holds_to_the_byte_what_is_predicted(tokens):
    require("native")
    work = Work(PREFILL, tokens, "float32", SHAPE)
    parts = cost_prediction.memory(work)
    room = cost.cache_bytes(work.model, tokens, dtype="float32", taken=True)
    found = tensor_peak(cost_probe._prefill(tokens, torch.float32, SHAPE))
    assert found == room + parts["in a layer"]
    assert parts["cache"] == cost.cache_bytes(work.model, tokens, dtype="float32")
    assert parts["weights"] == 4 * cost.parameters_of(work.model).total


def test_a_trained_layer_holds_to_the_byte_what_is_predicted():
    require("native")
    block = replace(BLOCK, ffn_dim=4096)  # a short text: attention's blocks hold less
    tokens, wide = 500, replace(QUICK, model=replace(QUICK.model, layers=(block,)))
    parts = cost_prediction.memory(Work(TRAIN, tokens, "float32", wide))
    stream = tokens * BLOCK.embed_dim * 4
    # The input and the gradient that comes in are there before.
    expected = sum(parts.values()) - parts["weights"] - 2 * stream
    assert tensor_peak(cost_probe._train(tokens, torch.float32, wide)) == expected


@pytest.mark.parametrize("kind", [PREFILL, TRAIN])
def test_at_the_length_of_calibration_a_prediction_is_the_sum_of_the_pieces(kind):
    pieces = {"qkv": 1.0, "o": 2.0, "up": 3.0, "down": 4.0, "attention": 5.0, "others": 6.0}
    length = QUICK.calibration if kind == PREFILL else QUICK.trained_calibration
    found = cost_prediction.seconds(Work(kind, length, "float32", QUICK), pieces | {"head": 7.0})
    layers = 2 if kind == PREFILL else 1
    assert found == {
        "projections": 3.0 * layers,
        "attention": 5.0 * layers,
        "feed-forward": 7.0 * layers,
        "everything else": 6.0 * layers,
    } | ({"head": 7.0} if kind == PREFILL else {})


def test_attention_grows_with_visible_pairs_and_all_else_with_tokens():
    pieces = dict.fromkeys(("qkv", "o", "up", "down", "attention", "others", "head"), 1.0)
    once, twice = (
        cost_prediction.seconds(Work(PREFILL, tokens, "float32", QUICK), pieces)
        for tokens in (48, 96)
    )
    assert twice["attention"] / once["attention"] == pytest.approx(97 * 96 / (49 * 48))
    assert twice["projections"] / once["projections"] == 2
    assert twice["everything else"] / once["everything else"] == 2
    assert twice["head"] == once["head"]


def test_a_step_reads_weights_and_cache():
    work = Work(DECODE, 64, "float32", QUICK)
    parameters = cost.parameters_of(work.model).total
    cached = 2 * 2 * 16 * 65  # layers, keys and values, a KV head of 16, the new token too
    assert cost_prediction.memory(work) == {"weights": 4 * parameters, "cache": 4 * cached}
    assert cost_prediction.moved_bytes(work) == 4 * (parameters + cached)
    pieces = {"products": 6.0, "head": 2.0, "keys": 1.0, "calls": 0.5}
    found = cost_prediction.seconds(work, pieces)
    assert found["weights"] == pytest.approx(6.0 * 2 / cost_probe.COLD_LAYERS)
    assert found["head"] == 2.0
    assert found["cache"] == pytest.approx(cached / (2 * 16 * 512))
    assert found["calls"] == 0.5


def test_operations_of_training_are_those_of_both_directions():
    work = Work(TRAIN, 64, "float32", QUICK)
    ahead = cost.forward(work.model, work.step)
    assert cost_prediction.flops(work) == 3 * ahead.flops + 2 * ahead.scores


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PREFILL, DECODE, TRAIN])
def test_a_row_is_measured_in_fresh_processes(kind):
    require("native")
    row = next(row for row in suite.rows(quick=True) if row.name.startswith(kind))
    entry = {"name": row.name} | row.measure(SETTING)
    if "not_measurable" in entry:
        pytest.skip(entry["not_measurable"])
    for what in ("memory", "seconds"):
        assert entry[what]["predicted"] == pytest.approx(sum(entry[what]["parts"].values()))
    assert entry["memory"]["measured"] > 0
    assert entry["limit"] == ("memory read" if kind == DECODE else "FMA")
    first, sizes, times, _ = show.lines(entry)
    assert f"= {entry['memory']['ratio']:.2f}, time" in first
    assert first.endswith(f"= {entry['seconds']['ratio']:.2f}")
    assert all(part in sizes for part in entry["memory"]["parts"])
    assert all(part in times for part in entry["seconds"]["parts"])
    found = document("cost", entry)
    assert f"| {entry['what']} |" in long_tables.cost_block([found])
    off = 100 * abs(entry["seconds"]["ratio"] - 1)
    assert f"**{off:.0f} %** ({entry['what']})" in short_tables.cost_block([found])


def test_the_suite_has_the_lengths_that_are_promised():
    names = [row.name for row in SUITES["cost"].rows(quick=False)]
    for kind, lengths in ((PREFILL, (512, 2048, 8192)), (DECODE, (512, 2048, 8192))):
        assert {f"{kind}-{tokens}-float32" for tokens in lengths} <= set(names)
    assert any(name.startswith(TRAIN) for name in names)
    smollm2 = Work(PREFILL, 512, "float32", cost_probe.FULL).model
    assert cost.parameters_of(smollm2).total == 134515008
