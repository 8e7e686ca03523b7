"""The suites of `multihead bench`: their rows, and what a row says."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

import multihead as mh
from bench_cases import FULL, SETTING
from multihead.bench import (
    contest,
    llama,
    memory_probe,
    resident,
    show,
    verify,
    whole,
)
from multihead.bench.case import Case
from multihead.bench.suites import (
    SUITES,
    agreement,
    decode,
    generation,
    grouped,
    layer,
    masked,
    memory,
    models,
    overhead,
    prefill,
    removal,
    restriction,
    small,
)
from multihead.cli.commands.bench import SUITES as LISTED
from multihead.errors import BackendError, ModelError
from multihead.ops.backends import native
from requires import require

# --- suites --------------------------------------------------------------------------------------


def test_names_of_suites_and_rows_differ() -> None:
    assert tuple(SUITES) == LISTED
    for suite in SUITES.values():
        for quick in (False, True):
            names = [row.name for row in suite.rows(quick=quick)]
            assert len(set(names)) == len(names) > 0


def test_the_suites_have_the_shapes_that_are_promised() -> None:
    names = {name: [row.name for row in suite.rows(quick=False)] for name, suite in SUITES.items()}
    for length, width, dtype in (
        (length, width, dtype)
        for length in (1024, 4096, 16384)
        for width in (64, 128)
        for dtype in ("float32", "bfloat16")
    ):
        for kind in ("full", "causal"):
            assert f"{kind}-{length}-d{width}-{dtype}" in names["prefill"]
    assert "full-4096-d64-float16" in names["prefill"]
    assert "window-256-8192-d64-bfloat16" in names["window"]
    assert "packed-16x512-8192-d64-float32" in names["packed"]
    for kind in ("32-8", "pages-32-8", "int8-32-8"):
        assert f"decode-{kind}-8192-d128-float32" in names["decode"]
    assert "small-32h-16q-128-d64-float32" in names["small"]
    assert names["layer"] == ["layer-2048-768-12h-float32", "layer-2048-768-12h-bfloat16"]
    assert {
        "modernbert-8192-bfloat16",
        "gemma3-8192-bfloat16",
        "bert-16x512-padded-bfloat16",
        *(f"smollm2-prefill-{n}-{t}" for n in (2048, 8000) for t in ("bfloat16", "float32")),
    } == set(names["models"])
    assert {
        "smollm2-generate-batch-16-float32",
        *(
            f"smollm2-decode-{batch}x{context}-{dtype}"
            for batch in (1, 8)
            for context in (128, 4096)
            for dtype in ("bfloat16", "float32")
        ),
    } == set(names["generation"])


def first(module: object, name: str, setting: contest.Setting = SETTING) -> dict[str, object]:
    """The entry of a suite's first quick row with this in its name."""
    row = next(row for row in module.rows(quick=True) if name in row.name)
    return {"name": row.name} | row.measure(setting)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (prefill, "causal-128-d64-float32"),
        (decode, "32-8"),
        (decode, "pages-32-8-256-d128-bfloat16"),
        (decode, "int8-32-8-256-d128-bfloat16"),
        (grouped, "bfloat16"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_row_is_timed_and_checked(module: object, name: str) -> None:
    require("native")
    entry = first(module, name)
    times = {name: timing["median"] for name, timing in entry["times"].items()}
    ours = times.pop(contest.OURS)
    assert entry["ratios"] == {name: t / ours for name, t in times.items()}
    assert contest.TORCH in times
    assert entry["errors"][contest.OURS] <= entry["bound"]
    lines = list(show.lines(entry))
    assert lines[0].strip().startswith(entry["name"])
    assert f"{100 * entry['limit_share']:.0f} % of {entry['limit']}" in lines[0]
    for name, line in zip(times, lines[1:], strict=True):
        assert name in line
        assert f"{entry['ratios'][name]:.2f}x" in line


def test_a_rate_is_work_over_time() -> None:
    require("native")
    entry = first(prefill, "full-128-d64-float32")
    median = entry["times"][contest.OURS]["median"]
    assert entry["gflops"] == pytest.approx(4 * 8 * 64 * 128**2 / median / 1e9)
    assert entry["limit_share"] == pytest.approx(entry["gflops"] / 100)


def test_decoding_is_held_to_memory_and_reads_what_left_the_cache() -> None:
    require("native")
    entry = first(decode, "8-8", replace(SETTING, read_gb_per_s=10.0))
    case = Case("decode", torch.float32, queries=1, keys=128)
    assert entry["limit"] == "memory read"
    assert entry["gb_per_s"] == pytest.approx(
        case.cache_bytes / entry["times"][contest.OURS]["median"] / 1e9
    )
    assert entry["buffers_bytes"] >= 2**24
    entry = first(decode, "int8", replace(SETTING, read_gb_per_s=10.0))
    assert entry["read_bytes"] == 2 * 8 * 256 * (128 + 4)
    assert entry["gb_per_s"] == pytest.approx(
        entry["read_bytes"] / entry["times"][contest.OURS]["median"] / 1e9
    )
    key, value = torch.ones(2, 1, 1, 3, 5)
    rotation = decode.Rotation(key, value, most_bytes=3 * 2 * key.nbytes)
    seen = [rotation.next()[0].data_ptr() for _ in range(6)]
    assert len(set(seen[:3])) == 3
    assert seen[:3] == seen[3:]


def test_a_small_call_tells_python_from_the_extension() -> None:
    require("native")
    entry = first(small, "8h-1q")
    times = {name: timing["median"] for name, timing in entry["times"].items()}
    assert entry["seconds_over_torch"] == times[contest.OURS] - times[contest.TORCH]
    assert entry["python_seconds"] == times[contest.OURS] - times[small.BARE]
    assert list(entry["ratios"]) == [contest.TORCH]
    assert "Python's share" in list(show.lines(entry))[-1]
    assert native._native is not None
    assert not isinstance(native._native, small._Recorder), "the extension is put back"


def test_a_bare_call_computes_again() -> None:
    require("native")
    query, key, value = FULL.inputs()
    bare = small.bare_call(contest.ours(query, key, value))
    assert bare is not None
    with torch.inference_mode():
        right = bare.result().clone()
        out = bare.call().zero_()
        assert torch.equal(bare.call(), right)
        assert out.data_ptr() == bare.call().data_ptr()
    assert small.bare_call(lambda: query) is None


@pytest.mark.parametrize(
    "name", ["row-statistics", "softcap", "sinks", "alibi", "keys-bias", "watch"]
)
def test_a_feature_is_weighed_against_the_plain_call(name: str) -> None:
    require("native")
    if name == "watch":
        require("models")
    entry = first(overhead, name)
    ours, plain = (entry["times"][n]["median"] for n in (contest.OURS, overhead.PLAIN))
    assert entry["overhead"] == ours / plain - 1
    (line,) = show.lines(entry)
    assert f"{100 * entry['overhead']:+.1f} %" in line


def test_the_kernels_for_avx2_run_on_later_processors_too() -> None:
    require("native")
    before = native.instruction_set()
    entry = first(overhead, "avx2")
    assert native.instruction_set() == before
    if "avx2" in native.instruction_sets():
        assert entry["ratios"].keys() == {contest.TORCH}
    else:
        assert "not measurable here" in next(show.lines(entry))


@pytest.mark.parametrize("rows", [masked.window_rows, masked.packed_rows])
def test_a_mask_meets_the_dense_one_and_the_rewrite(rows: object) -> None:
    require("native")
    entry = rows(quick=True)[0].measure(SETTING)
    assert list(entry["ratios"]) in ([contest.TORCH, masked.BLOCKS], [contest.TORCH, masked.BATCH])


def test_a_row_that_cannot_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "reasons", lambda problem: ["The kernels are on holiday."])
    entry = first(prefill, "float16")
    (line,) = show.lines(entry)
    assert "not measurable here: The kernels are on holiday." in line


# --- layers and whole models ---------------------------------------------------------------------


def test_a_layer_is_weighed_with_its_projections() -> None:
    require("native")
    entry = first(layer, "float32")
    assert {contest.TORCH, layer.LINEAR_SDPA} <= entry["ratios"].keys()
    assert entry["errors"][contest.OURS] <= entry["bound"]
    median = entry["times"][contest.OURS]["median"]
    projections = 4 * 2 * 96 * 48**2
    assert entry["gflops"] == pytest.approx((projections + 4 * 48 * 96**2) / median / 1e9)
    assert entry["shares"].keys() == {"projections", "attention"}
    *_, line = [line for line in show.lines(entry) if "of its time" in line]
    assert f"attention {100 * entry['shares']['attention']:.0f} %" in line
    assert ("packed, " in line) == (entry["packed_bytes"] > 0)


def test_a_layer_that_is_wrong_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    require("native")
    right = layer.MultiHeadAttention.forward
    monkeypatch.setattr(layer.MultiHeadAttention, "forward", lambda self, x: right(self, x) * 1.01)
    with pytest.raises(BackendError, match="multihead differs from float64"):
        first(layer, "float32")


@pytest.mark.parametrize("name", ["modernbert", "gemma3", "bert", "prefill-64-bf"])
def test_a_whole_model_is_timed_and_checked(name: str) -> None:
    require("native")
    require("models")
    entry = first(models, name)
    assert entry["errors"][contest.OURS] <= 2 * entry["errors"][contest.TORCH] + 2**-7
    assert entry["ratios"].keys() >= {contest.TORCH} | (
        {whole.OWN} if "smol" in entry["name"] else set()
    )
    rate = entry["tokens"] / entry["times"][contest.OURS]["median"]
    assert entry["tokens_per_second"][contest.OURS] == rate
    lines = list(show.lines(entry))
    assert f"{rate:.1f} tokens/s" in lines[0]
    assert contest.TORCH in lines[1]


def test_a_processor_without_products_of_bfloat16_runs_no_long_text_in_it() -> None:
    without = contest.Limits(fma=1.0, dpbf16=None, amx=None)
    assert "no products of bfloat16" in (whole.too_slow(torch.bfloat16, without) or "")
    for dtype, dpbf16 in ((torch.float32, None), (torch.bfloat16, 2.0)):
        assert whole.too_slow(dtype, contest.Limits(fma=1.0, dpbf16=dpbf16, amx=None)) is None


@pytest.mark.parametrize("name", ["decode-8x16-float32", "decode-1x24-bfloat16"])
def test_decoding_is_timed_and_checked(name: str) -> None:
    require("native")
    require("models")
    entry = first(generation, name)
    assert entry["tokens"] == entry["kind"].count("8x") * 56 + 8
    assert entry["errors"][contest.OURS] <= 2 * entry["errors"][contest.TORCH] + 2**-7
    assert llama.NAME not in entry["ratios"], "its file has other weights than a small model"


def test_a_decoder_forgets_what_it_read() -> None:
    require("models")
    model = whole.smollm2(torch.float32, quick=True)
    ids = whole.text(13, quick=True)
    with torch.inference_mode():
        expected = model(ids).logits[:, 9:].expand(3, -1, -1)
        for decoder in (
            generation.Transformers(model, "sdpa", ids, batch=3, context=9),
            generation.Own(whole.own(model), ids, batch=3, context=9),
        ):
            once = decoder.run()
            assert torch.equal(decoder.run(), once)
            assert once.shape == (3, 4, model.config.vocab_size)
            torch.testing.assert_close(once, expected)


def test_llama_cpp_is_tried_before_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, declined = torch.arange(9)[None], {}
    monkeypatch.setattr(llama, "is_installed", lambda: False)
    with pytest.raises(contest.Declined, match="llama-cpp-python is not installed"):
        generation._llama(ids, 1, 5, 1, declined)
    made = []
    monkeypatch.setattr(llama, "is_installed", lambda: True)
    monkeypatch.setattr(llama, "Llama", lambda *_, reordered: made.append(reordered))
    for failure in ("does not run here: its process ends with signal 11", None):
        monkeypatch.setattr(llama, "fails_reordered", lambda threads, failure=failure: failure)
        generation._llama(ids, 1, 5, 1, declined)
    assert made == [False, True]
    assert declined == {llama.REORDERED: "does not run here: its process ends with signal 11"}


def test_requests_in_one_batch_give_the_same_tokens() -> None:
    require("native")
    require("models")
    entry = first(generation, "generate-batch")
    assert entry["same_tokens"] >= 0.9
    assert f"{100 * entry['same_tokens']:.1f} % of the tokens the same" in next(show.lines(entry))


def test_tokens_are_compared_up_to_the_first_other_one() -> None:
    assert generation._same([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == 1
    assert generation._same([[1, 9, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == pytest.approx(3 / 5)
    assert generation._same([[1]], [[1, 2]]) == 0.5


def test_a_whole_model_that_is_wrong_has_no_time() -> None:
    right = torch.randn(2, 5, 7, dtype=torch.float64)
    visible = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    padded = right.clone()
    padded[0, 3:] = torch.nan
    assert verify.differing(padded, right, visible) == 0
    assert verify.differing(1.5 * right, right) == pytest.approx(0.5)
    verify.judge_whole("a row", {"ours": 0.021, "torch": 0.01}, torch.bfloat16, "torch")
    for error in (0.03, float("nan")):
        with pytest.raises(BackendError, match="a row: the result of ours"):
            verify.judge_whole("a row", {"ours": error, "torch": 0.01}, torch.bfloat16, "torch")


def test_packed_weights_that_are_wrong_have_no_time_and_end_no_suite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require("native")
    require("models")
    errors = iter([0.0, 0.0, 0.0, 1.0, 0.0])
    monkeypatch.setattr(generation, "differing", lambda *_: next(errors))
    monkeypatch.setattr(mh.Prepacked, "serves", lambda *_: True)
    case = generation.Decoding(torch.float32, 1, 16)
    entry = generation._decode(case, True, SETTING)
    assert set(entry["declined"]) == {whole.PREPACKED}
    assert "differs by 1.00e+00 of its size" in entry["declined"][whole.PREPACKED]
    for field in ("times", "ratios", "errors", "tokens_per_second"):
        assert whole.PREPACKED not in entry[field]
        assert field == "ratios" or whole.OWN_PREPACKED in entry[field]


def test_a_model_that_is_absent_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise ModelError("The model is not here.")

    monkeypatch.setattr(whole, "smollm2", absent)
    for suite, name in (
        (models, "prefill-64-bf"),
        (generation, "decode-1x16-bf"),
        (generation, "generate-batch"),
    ):
        entry = first(suite, name)
        assert "not measurable here: The model is not here." in next(show.lines(entry))


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reading", agreement.readings(True), ids=lambda reading: reading.kind)
def test_a_reading_is_set_beside_the_own_error(reading: agreement.Reading) -> None:
    require("models")
    entry = first(agreement, f"{reading.kind}-float32")
    assert entry["tokens"] == agreement.QUICK_TOKENS
    assert entry["exact"] == (reading.kind != "tokens-int8")
    assert (entry["largest_difference"] <= 3 * entry["own_error"]) == entry["exact"]
    assert "differs by" in next(show.lines(entry))


def test_a_reading_that_changes_the_logits_is_an_error() -> None:
    require("models")

    def blind(subject: agreement.Subject) -> torch.Tensor:
        return subject.model(subject.ids, mask=mh.SlidingWindow(3))[0]

    reading = agreement.Reading("blind", "three tokens back", blind)
    with pytest.raises(BackendError, match=r"blind-float32: logits differ by .*own error"):
        agreement._measure(reading, torch.float32, True, SETTING)


def test_a_removal_is_set_beside_chance() -> None:
    entries = {name: first(removal, name) for name in removal.ORDERS}
    gradient, random = entries["gate-gradient"], entries["random"]
    assert gradient["removed"] == random["removed"]
    assert gradient["removed"][0] == 0
    (curve,), draws = gradient["removal_losses"], random["removal_losses"]
    assert len(draws) == len(random["rank_correlations"]) == len(removal.SEEDS)
    assert all(draw[0] == curve[0] for draw in draws)  # nothing removed
    assert all(abs(it) <= 1 for it in entries["leave-one-out"]["rank_correlations"])
    assert (gradient["scored_tokens"], random["scored_tokens"]) == (64, 0)
    line = next(show.lines(random))
    assert f"of {gradient['units']} KV groups  0: {curve[0]:.2f}, " in line


def test_a_restriction_is_set_beside_chance() -> None:
    entries = {name: first(restriction, name) for name in restriction.ORDERS}
    mass, random = entries["far-mass"], entries["random"]
    assert mass["restricted"] == random["restricted"]
    assert mass["restricted"][0] == 0
    assert mass["restricted"][-1] == mass["units"]
    (curve,), draws = mass["restriction_losses"], random["restriction_losses"]
    assert len(draws) == len(restriction.SEEDS)
    # Nothing restricted, and everything: the order does not matter.
    assert all(draw[0] == curve[0] and draw[-1] == curve[-1] for draw in draws)
    assert curve[-1] != curve[0]
    assert (mass["measured_tokens"], mass["tested_tokens"]) == (32, 32)
    line = next(show.lines(random))
    assert f"of {mass['units']} KV groups  0: {curve[0]:.3f}, " in line


def test_every_two_features_meet() -> None:
    calls = memory.cover(memory_probe.FEATURES)
    for a, b in combinations(memory_probe.FEATURES, 2):
        met = {(values[a], values[b]) for values in calls}
        both = any({a, b} <= group for group in memory._EXCLUSIVE)
        assert met == {(True, False), (False, True), (False, False)} | (
            set() if both else {(True, True)}
        )
    assert len(calls) <= 16
    assert all(memory._allowed(values) for values in calls)


@pytest.mark.slow
def test_a_call_of_each_row_is_one_that_can_be_made() -> None:
    require("native")
    for values in memory.cover(memory_probe.FEATURES):
        features = {name for name, on in values.items() if on}
        found = memory_probe.probe(512, 8, 16, 1, features)
        assert found["output_bytes"] >= 512 * 8 * 16 * 2


def test_growth_is_seen_and_outputs_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if resident.lowered_peak() is None:
        pytest.skip("the system does not tell the peak of a process")

    def call(length: int, *_: object) -> object:
        def make() -> list[torch.Tensor]:
            torch.ones(length * 2**10)  # 4 KiB for each of `length`
            return [torch.ones(length * 2**8)]

        return make

    monkeypatch.setattr(memory_probe, "_call", call)
    found = memory_probe.probe(2**14, 1, 1, torch.get_num_threads(), set())
    assert found["output_bytes"] == 2**24
    assert 0.7 * 2**26 < found["grown_bytes"] < 1.3 * 2**26
