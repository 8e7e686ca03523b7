"""Traffic, times, fits, variants and the whole report of `multihead.cost`."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from multihead.cost import (
    DEVICES,
    VASWANI_3A,
    Attention,
    Device,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Model,
    Pass,
    Setting,
    Widths,
    cache_bytes,
    crossover,
    device,
    estimate,
    forward,
    head_size_remarks,
    largest_batch,
    largest_context,
    largest_training_batch,
    measures,
    parameters_of,
    report,
    serving_bytes,
    sweep_head_dims,
    sweep_heads,
    traffic,
    training_memory,
    weight_bytes,
    what_if,
    with_head_windows,
    with_kind,
)
from multihead.cost.operations import model_pairs
from multihead.errors import ArgumentError

TWO = Widths(2, 2, 2)


def model_of(attention: Attention | LatentAttention, layers: int = 2, vocab: int = 101) -> Model:
    layer = Layer(attention, FeedForward(attention.embed_dim, 36))
    return Model((layer,) * layers, vocab=vocab, tied=True)


GROUPED = model_of(Attention.of(24, 4, 2))
LATENT = model_of(LatentAttention(42, 3, 13, 7, 6, 5))
EXPERTS = Model((Layer(Attention.of(24, 4), Experts(FeedForward(24, 9), 8, 2)),) * 2, vocab=101)


def test_traffic_of_a_pass() -> None:
    moved = traffic(GROUPED, Pass(5, past=3, batch=2, logit_rows=1), TWO)
    tokens = 10
    q, kv, o = 24 * 24, 24 * 12, 24 * 24
    projections = q + 2 * kv + o + tokens * (24 + 24 + 2 * (24 + 12) + 24 + 24)
    assert moved.projections == 2 * 2 * projections
    # Queries and output of every head, and 8 keys and values of each row's two KV heads.
    assert moved.attention == 2 * 2 * (tokens * 4 * (6 + 6) + 2 * 8 * 2 * (6 + 6))
    assert moved.feed_forward == 2 * 2 * (3 * 24 * 36 + tokens * 3 * (24 + 36))
    assert moved.head == 2 * (24 * 101 + 2 * (24 + 101))
    assert moved.embeddings == 2 * tokens * 24
    assert moved.total == sum(v for k, v in moved.as_dict().items() if k != "total")


def test_a_step_reads_every_weight_and_the_whole_cache() -> None:
    plain = replace(GROUPED, tied=False)
    moved = traffic(plain, Pass(1, past=499), TWO)
    norms = parameters_of(plain).norms + parameters_of(plain).embeddings
    read = weight_bytes(plain, "bfloat16") - 2 * norms + cache_bytes(plain, 500)
    assert 0 < moved.total - read < 0.1 * read
    quantized = traffic(plain, Pass(1, past=499), Widths(2, 2, 1))
    assert moved.total - quantized.total == cache_bytes(plain, 500) // 2


def test_windows_bound_what_is_read() -> None:
    local = model_of(Attention.of(24, 4, window=7))
    assert traffic(local, Pass(1, past=99), TWO) == traffic(local, Pass(1, past=9), TWO)
    assert traffic(local, Pass(5, past=0), TWO) == traffic(
        model_of(Attention.of(24, 4)), Pass(5), TWO
    )


def test_what_heads_with_windows_read() -> None:
    attention = Attention(24, 4, 2, 6, 6, head_windows=(3, 5, None, 7))
    moved = traffic(model_of(attention, layers=1), Pass(1, past=99), TWO)
    assert moved.attention == 2 * (4 * 12 + (5 + 100) * 12)
    with pytest.raises(ArgumentError, match="window too"):
        what_if(model_of(attention), {"heads": 8})
    assert what_if(model_of(attention), {"heads": 8, "window": 0}).layers[0].attention.heads == 8


def test_latents_are_read_once_for_all_heads() -> None:
    step = traffic(LATENT, Pass(1, past=99), TWO)
    queries = 3 * (19 + 13)
    assert step.attention == 2 * 2 * (queries + 100 * 19)
    prompt = traffic(LATENT, Pass(100), TWO)
    made = 100 * 3 * (7 + 5)
    assert prompt.attention == 2 * 2 * (100 * 3 * (13 + 5) + made + 100 * 6)


def test_experts_that_are_read() -> None:
    one = traffic(EXPERTS, Pass(1), TWO).feed_forward
    many = traffic(EXPERTS, Pass(100), TWO).feed_forward
    weights, numbers, router = 3 * 24 * 9, 3 * (24 + 9), 24 * 8
    assert one == 2 * 2 * (2 * weights + 2 * numbers + router + 24 + 8)
    assert many == 2 * 2 * (8 * weights + 200 * numbers + router + 100 * (24 + 8))


def test_a_roofline_takes_the_longer_of_both() -> None:
    slow_memory = Device("slow", flops=1e15, bandwidth=1e6)
    fast_memory = Device("fast", flops=1e6, bandwidth=1e15)
    step = Pass(9, logit_rows=1)
    by_bytes = estimate(GROUPED, step, device=slow_memory)
    by_flops = estimate(GROUPED, step, device=fast_memory)
    assert by_bytes.seconds == pytest.approx(by_bytes.bytes / 1e6)
    assert by_flops.seconds == pytest.approx(by_flops.flops / 1e6 + by_flops.parts[0].bytes / 1e15)
    assert by_flops.flops == forward(GROUPED, step).flops
    assert {part.bound for part in by_bytes.parts} == {"memory"}
    assert estimate(GROUPED, step).seconds is None
    assert slow_memory.ridge == 1e9


def test_presets() -> None:
    assert device("RTX-4090") is DEVICES["rtx4090"]
    assert DEVICES["h100"].flops == 989.5e12
    assert DEVICES["h200"].bandwidth == 4.8e12
    assert all(preset.source and preset.memory for preset in DEVICES.values())
    with pytest.raises(ArgumentError, match="a100"):
        device("tpu")
    with pytest.raises(ArgumentError, match="float32"):
        Setting(5, dtype="float32", device=device("l4"))
    with pytest.raises(ArgumentError, match="above 0"):
        Device("none", 0, 1)


@pytest.mark.parametrize("model", [GROUPED, LATENT, EXPERTS])
def test_what_fits_is_the_most_that_fits(model: Model) -> None:
    draw = random.Random(3)
    weights = weight_bytes(model, "bfloat16")
    for _ in range(20):
        memory = weights + draw.randrange(0, 200_000)
        context = largest_context(model, memory, batch=3)
        assert context is not None
        assert serving_bytes(model, context + 1, batch=3) > memory
        assert context == 0 or serving_bytes(model, context, batch=3) <= memory
        rows = largest_batch(model, memory, 17)
        assert rows is not None
        assert serving_bytes(model, 17, batch=rows + 1) > memory


def test_what_fits_at_the_ends() -> None:
    assert largest_context(GROUPED, 5) == 0
    local = model_of(Attention.of(24, 4, window=7))
    assert largest_context(local, weight_bytes(local, "bfloat16") * 2, kind="window") is None
    memory = training_memory(GROUPED, 9, batch=4).total
    assert largest_training_batch(GROUPED, memory, 9) == 4
    assert largest_training_batch(GROUPED, memory - 1, 9) == 3


def test_crossover() -> None:
    # 4 d^2 a token against d (n + 1): plain attention overtakes its projections at n = 4 d.
    plain = model_of(Attention.of(64, 4))
    assert crossover(plain) == 4 * 64
    assert crossover(plain, counting="dense") == 2 * 64 + 1
    rest = crossover(plain, "rest")
    assert rest is not None
    for tokens, over in ((rest - 1, False), (rest, True)):
        counted = forward(plain, Pass(tokens))
        assert (counted.attention > counted.projections + counted.feed_forward) is over
    assert crossover(model_of(Attention.of(64, 4, window=3))) is None


def test_kinds_side_by_side() -> None:
    model = model_of(Attention.of(64, 8, 4))
    kept = {
        kind: cache_bytes(with_kind(model, kind), 10) for kind in ("mha", "gqa:2", "mqa", "mla")
    }
    assert kept == {"mha": 2 * 10 * 2 * 128, "gqa:2": 1280, "mqa": 640, "mla": 2 * 10 * 2 * 36}
    latent = with_kind(model, "mla:12+4").layers[0].attention
    assert isinstance(latent, LatentAttention)
    assert (latent.latent_dim, latent.nope_dim, latent.rope_dim) == (12, 8, 4)
    back = with_kind(with_kind(model, "mla"), "gqa:4")
    assert parameters_of(back) == parameters_of(model)
    for wrong in ("gqa", "gqa:3", "gqa:x", "mha:2", "mla:5", "linear", ""):
        with pytest.raises(ArgumentError):
            with_kind(model, wrong)


def test_other_heads_at_the_same_width_change_neither_parameters_nor_cache() -> None:
    normed = Attention(64, 8, 4, 8, 8, qk_norm=16, rotary_dim=8)
    for attention in (Attention.of(64, 8, 4), Attention.of(64, 8), normed):
        model = model_of(attention)
        for heads in (4, 16, 32):
            other = what_if(model, {"heads": heads})
            first = other.layers[0].attention
            assert (first.heads, first.head_dim) == (heads, 64 // heads)
            assert parameters_of(other).attention == parameters_of(model).attention
            assert cache_bytes(other, 9) == cache_bytes(model, 9)
            ours, theirs = forward(model, Pass(9)), forward(other, Pass(9))
            assert ours.total == theirs.total
            assert Fraction(theirs.exponentials, ours.exponentials) == Fraction(heads, 8)
    assert parameters_of(what_if(model_of(normed), {"heads": 4})).norms == 2 * (128 + 32) + 64


def test_what_if() -> None:
    model = model_of(Attention.of(64, 8, 4))
    first = what_if(model, {"heads": 4, "head_dim": 8, "kv_heads": 1}).layers[0].attention
    assert (first.heads, first.kv_heads, first.head_dim, first.embed_dim) == (4, 1, 8, 64)
    assert what_if(model_of(Attention.of(64, 8, 1)), {"heads": 4}).layers[0].attention.kv_heads == 1
    wide = what_if(model, {"d_model": 128, "ffn": 50, "layers": 3, "vocab": 7, "window": 5})
    assert wide.embed_dim == wide.layers[2].feed_forward.embed_dim == 128
    assert wide.layers[0].attention.head_dim == 16
    assert (len(wide.layers), wide.vocab, wide.layers[0].attention.window) == (3, 7, 5)
    assert what_if(wide, {"window": 0}).layers[0].attention.window is None
    assert what_if(LATENT, {"heads": 6}).layers[0].attention.heads == 6
    for changes, named in (
        ({"heads": 6}, "head_dim too"),
        ({"heads": 5}, "kv_heads too"),
        ({"heads": 0}, "heads"),
        ({"depth": 3}, "depth"),
        ({"kv_heads": 3}, "divide"),
    ):
        with pytest.raises(ArgumentError, match=named):
            what_if(model, changes)
    with pytest.raises(ArgumentError, match="latent"):
        what_if(LATENT, {"kv_heads": 3})


def test_a_window_of_an_encoder_reaches_both_ways() -> None:
    encoder = replace(model_of(Attention.of(24, 4)), causal=False, head=False, tied=False)
    local = what_if(encoder, {"window": 3})
    assert model_pairs(local, Pass(5)) == [4 * (3 + 4 + 5 + 4 + 3)] * 2
    assert model_pairs(what_if(local, {"window": 0}), Pass(5)) == [4 * 25] * 2
    windows = [(3, None, 2, 5), None]
    for model in (local, with_head_windows(model_of(Attention.of(24, 4)), windows)):
        with pytest.raises(ArgumentError, match="one window for all heads, and none ahead"):
            with_kind(model, "mla")


def test_what_if_of_an_encoder_decoder_changes_both() -> None:
    attention = Attention.of(32, 4)
    encoder = Model((Layer(attention, FeedForward(32, 17)),), causal=False, head=False)
    crossing = Layer(attention, FeedForward(32, 17), cross=replace(attention, context_dim=32))
    both = Model((crossing,), head=False, source=encoder)
    wide = what_if(both, {"d_model": 64, "heads": 8})
    assert wide.source is not None
    assert wide.source.embed_dim == 64
    assert wide.layers[0].cross is not None
    assert (wide.layers[0].cross.context_dim, wide.layers[0].cross.heads) == (64, 8)
    assert report(both, Setting(5))["training"] is None


def test_sweeps() -> None:
    heads = dict(sweep_heads(model_of(Attention.of(48, 6, 3))))
    assert list(heads) == [2, 4, 6, 8, 16]
    threes = sweep_heads(model_of(Attention.of(576, 9, 3)))
    assert [count for count, _ in threes] == [3, 6, 9, 12, 24, 48, 96, 192]
    assert len({parameters_of(model).total for model in heads.values()}) == 1
    dims = dict(sweep_head_dims(model_of(Attention.of(48, 6))))
    assert list(dims) == [8, 16, 32, 64, 128, 256]
    assert {model.layers[0].attention.heads for model in dims.values()} == {6}


@pytest.mark.parametrize("model", [GROUPED, LATENT, EXPERTS])
def test_reports_are_plain_values_that_agree(model: Model) -> None:
    setting = Setting(33, batch=2, device=DEVICES["a100"], memory=2**20)
    document = json.loads(json.dumps(report(model, setting)))
    assert document["prefill"]["operations"]["flops"] == document["prefill"]["estimate"]["flops"]
    assert document["decode"]["operations"]["flops"] == document["decode"]["estimate"]["flops"]
    assert document["memory"]["cache"] == cache_bytes(model, 33, batch=2)
    flat = measures(model, setting)
    assert flat["kv_cache_bytes"] == document["memory"]["cache"]
    assert flat["prefill_products"] == document["prefill"]["operations"]["total"]
    assert flat["decode_seconds"] == document["decode"]["estimate"]["seconds"]
    assert flat["largest_context"] == document["memory"]["fit"]["context"]


def test_an_encoder_decodes_nothing_and_keeps_no_cache() -> None:
    encoder = replace(GROUPED, causal=False, head=False)
    document = report(encoder, Setting(9))
    assert document["decode"] is document["memory"]["cache"] is None
    assert measures(encoder, Setting(9))["kv_cache_bytes"] is None
    weights = document["memory"]["weights"]
    for memory, batch in ((weights, None), (weights - 1, 0)):
        fit = report(encoder, Setting(9, memory=memory))["memory"]["fit"]
        assert fit == {"context": batch, "batch": batch, "training_batch": 0}
    assert report(encoder, Setting(9, memory=2**30))["memory"]["fit"]["training_batch"] > 0


def test_a_pooler_is_read_too() -> None:
    encoder = replace(GROUPED, causal=False, head=False)
    found = traffic(replace(encoder, pooler=True), Pass(9, batch=2), TWO)
    width = encoder.embed_dim
    assert found.head == 2 * (width * (width + 1) + 2 * 2 * width)
    assert found.total - found.head == traffic(encoder, Pass(9, batch=2), TWO).total


def test_latents_in_int8_are_refused_or_left_empty_beside_others() -> None:
    with pytest.raises(ArgumentError, match="int8"):
        report(LATENT, Setting(9, cache="int8"))
    assert report(LATENT, Setting(9))["memory"]["caches"]["int8"] is None
    flat = measures(LATENT, Setting(9, cache="int8", memory=2**40))
    for empty in ("kv_cache_bytes", "decode_bytes", "largest_context", "largest_batch"):
        assert flat[empty] is None


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_remarks_name_their_evidence(heads: int) -> None:
    remarks = head_size_remarks(model_of(Attention.of(72, heads)))
    assert all(remark.text and remark.evidence for remark in remarks)
    assert ("registers" in " ".join(r.text for r in remarks)) == (72 // heads % 16 != 0)
    assert all(trial.heads * trial.head_dim == 512 for trial in VASWANI_3A)


@pytest.mark.parametrize(
    ("dim", "trial"), [(63, 64), (56, 64), (120, 128), (96, 128), (20, 16), (1, 16), (4096, 512)]
)
def test_a_remark_is_of_the_nearest_trial(dim: int, trial: int) -> None:
    attention = Attention.of(8 * dim, 8)
    model = Model((Layer(attention, FeedForward(8 * dim, 4)),), head=False)
    text = head_size_remarks(model)[0].text
    assert f"of {trial}, nearest to yours" in text
    assert ("1 head of" in text) == (trial == 512)
