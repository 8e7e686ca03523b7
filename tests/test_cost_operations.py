"""Operations and visible pairs of `multihead.cost`, to the digit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from multihead.cost import (
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Model,
    Pass,
    backward,
    forward,
    visible_pairs,
)
from multihead.errors import ArgumentError


def one_layer(attention: Attention | LatentAttention, **options: object) -> Model:
    """A layer without embeddings and head, so that its own parts are all there is."""
    layer = Layer(attention, FeedForward(attention.embed_dim, 17))
    return Model((layer,), head=False, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "products"),
    [
        (1024, 134217728),
        (8192, 8589934592),
        (32768, 137438953472),
        (131072, 2199023255552),
    ],
)
def test_one_head_of_128_over_every_pair(tokens: int, products: int) -> None:
    model = one_layer(Attention.of(128, 1))
    counted = forward(model, Pass(tokens), counting="dense")
    assert counted.scores == counted.values == products
    # Both products in operations: four times Q K^T in multiply-adds.
    assert 2 * counted.attention == 4 * products
    # A causal mask shows half of the pairs, and half of the diagonal.
    assert forward(model, Pass(tokens)).scores == 128 * tokens * (tokens + 1) // 2


def brute(queries: int, keys: int, causal: bool, window: int | None, ahead: int, first: int) -> int:
    def sees(i: int, j: int) -> bool:
        p = keys - queries + i
        if causal and j > p:
            return False
        return window is None or p - window < j <= p + ahead or j < min(first, p - window + 1)

    return sum(sees(i, j) for i in range(queries) for j in range(keys))


def test_visible_pairs_equal_a_brute_force_count() -> None:
    draw = random.Random(5)
    for _ in range(600):
        queries, keys = draw.randrange(0, 19), draw.randrange(0, 19)
        causal = draw.random() < 0.5
        window = draw.choice([None, draw.randrange(1, 23)])
        ahead = 0 if causal or window is None else draw.randrange(0, 9)
        first = draw.choice([0, draw.randrange(0, 23)])
        counted = visible_pairs(
            queries,
            keys,
            causal=causal,
            window=window,
            window_ahead=ahead,
            keep_first=first,
        )
        case = (queries, keys, causal, window, ahead, first)
        assert counted == brute(*case), case


def test_visible_pairs_equal_those_of_the_masks() -> None:
    mh = pytest.importorskip("multihead")
    draw = random.Random(7)
    for _ in range(40):
        queries = draw.randrange(1, 19)
        keys = queries + draw.randrange(0, 9)
        window, first = draw.randrange(1, 12), draw.randrange(0, 5)
        mask = mh.Window(window - 1, 0, keep_first=first)
        counted = visible_pairs(queries, keys, window=window, keep_first=first)
        assert counted == mask.visible_pairs(queries, keys)
        assert visible_pairs(queries, keys) == mh.Causal().visible_pairs(queries, keys)


def test_a_window_for_each_head() -> None:
    mh = pytest.importorskip("multihead")
    torch = pytest.importorskip("torch")
    windows = (3, None, 5, 16)
    attention = Attention.of(32, 4, 2)
    attention = replace(attention, head_windows=windows, keep_first=2)
    counted = forward(one_layer(attention), Pass(16))
    lefts = torch.tensor([15 if window is None else window - 1 for window in windows])
    mask = mh.Window(lefts, 0, keep_first=2)
    assert counted.exponentials == mask.visible_pairs(16, 16)
    assert counted.scores == counted.values == 8 * counted.exponentials
    assert attention.kept_windows == (None, 18)
    with pytest.raises(ArgumentError, match="one a head"):
        replace(attention, head_windows=(3, 4))
    with pytest.raises(ArgumentError, match="not both"):
        replace(attention, window=3)


# Case A21: queries, keys, causal, window, pairs seen.
A21 = [
    (16, 16, False, None, 256),
    (16, 16, True, None, 136),
    (4, 10, True, None, 34),
    (16, 16, True, 3, 45),
    (1, 10, True, None, 10),
]


@pytest.mark.parametrize(("queries", "keys", "causal", "window", "pairs"), A21)
def test_flops_of_visible_pairs(
    queries: int, keys: int, causal: bool, window: int | None, pairs: int
) -> None:
    attention = Attention(32, 4, 2, 8, 16, window=window)
    model, step = one_layer(attention, causal=causal), Pass(queries, past=keys - queries)
    counted = forward(model, step)
    assert 2 * counted.attention == 2 * 4 * pairs * (8 + 16)
    assert counted.exponentials == 4 * pairs
    dense = forward(model, step, counting="dense")
    assert 2 * dense.attention == 2 * 4 * queries * keys * (8 + 16)
    assert replace(dense, scores=0, values=0, exponentials=0) == replace(
        counted, scores=0, values=0, exponentials=0
    )


def test_grouped_heads_do_not_change_operations_of_attention() -> None:
    counts = {forward(one_layer(Attention.of(32, 4, kv)), Pass(7)).attention for kv in (1, 2, 4)}
    assert len(counts) == 1


def test_heads_change_exponentials_and_no_product() -> None:
    counted = [forward(one_layer(Attention.of(64, heads)), Pass(13)) for heads in (1, 4, 64)]
    assert len({each.total for each in counted}) == 1
    assert [each.exponentials for each in counted] == [heads * 91 for heads in (1, 4, 64)]


def test_parts_of_a_layer() -> None:
    attention = Attention(22, 4, 2, 5, 7, sinks=True)
    counted = forward(one_layer(attention), Pass(13, past=6, batch=3))
    pairs = 13 * 6 + 91
    assert (counted.q, counted.k) == (39 * 22 * 20, 39 * 22 * 10)
    assert (counted.v, counted.o) == (39 * 22 * 14, 39 * 28 * 22)
    assert (counted.scores, counted.values) == (3 * 4 * pairs * 5, 3 * 4 * pairs * 7)
    assert counted.exponentials == 3 * 4 * (pairs + 13)
    assert counted.feed_forward == 39 * 3 * 22 * 17
    assert counted.flops == 2 * counted.total
    parts = [v for k, v in counted.as_dict().items() if k not in ("total", "flops", "exponentials")]
    assert sum(parts) == counted.total


def test_backward() -> None:
    model, step = one_layer(Attention.of(32, 4)), Pass(11)
    ahead, behind = forward(model, step), backward(model, step)
    assert behind.projections == 2 * ahead.projections
    assert behind.feed_forward == 2 * ahead.feed_forward
    assert 2 * behind.attention == 5 * ahead.attention
    assert behind.exponentials == ahead.exponentials
    kept = backward(model, step, recompute=False)
    assert kept.attention == 2 * ahead.attention
    assert kept.exponentials == 0
    # Q K^T again and its two gradients, P V's two: not 2.5 where the widths differ.
    wide = one_layer(Attention(32, 4, 4, 8, 16))
    pairs = 4 * 66
    assert backward(wide, step).attention == pairs * (3 * 8 + 2 * 16)


def test_decoding_step_by_step_sees_what_prefill_sees() -> None:
    model = one_layer(Attention.of(32, 4, window=5))
    steps = [forward(model, Pass(1, past=past)) for past in range(9)]
    whole = forward(model, Pass(9))
    assert sum((step.total for step in steps), 0) == whole.total
    assert sum(step.exponentials for step in steps) == whole.exponentials


def test_layers_with_different_windows() -> None:
    full = Layer(Attention.of(32, 4), FeedForward(32, 17))
    local = replace(full, attention=Attention.of(32, 4, window=3))
    model = Model((full, local, full), head=False)
    counted = forward(model, Pass(16))
    assert counted.exponentials == 4 * (136 + 45 + 136)
    assert forward(model, Pass(16, pairs=40)).exponentials == 4 * 3 * 40
    assert forward(model, Pass(16, pairs=(1, 2, 3))).exponentials == 4 * 6
    with pytest.raises(ArgumentError, match="3"):
        forward(model, Pass(16, pairs=(1, 2)))
    with pytest.raises(ArgumentError, match="visible_pairs"):
        Pass(16, pairs=257)


def test_pairs_of_any_mask() -> None:
    mh = pytest.importorskip("multihead")
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(3)
    model = one_layer(Attention.of(32, 4))
    for _ in range(5):
        visible = torch.rand(7, 11, generator=generator) < 0.4
        mask = mh.Dense(visible) & mh.Causal()
        seen = int((visible & mh.Causal().to_dense(7, 11)).sum())
        step = Pass(7, past=4, pairs=mask.visible_pairs(7, 11))
        assert forward(model, step).exponentials == 4 * seen


def test_latent_attention_takes_the_form_with_fewer_products() -> None:
    latent = LatentAttention(42, 3, 13, 7, 6, 5)
    prompt = forward(one_layer(latent), Pass(50))
    pairs = 50 * 51 // 2
    assert prompt.kv == 50 * (42 * 19 + 13 * 3 * 12)
    assert (prompt.scores, prompt.values) == (3 * pairs * 13, 3 * pairs * 5)
    step = forward(one_layer(latent), Pass(1, past=49))
    assert step.kv == 42 * 19 + 13 * 3 * 12
    assert (step.scores, step.values) == (3 * 50 * 19, 3 * 50 * 13)
    many = forward(one_layer(latent), Pass(40, past=10))
    assert latent.cheaper_form(40, 50) == "materialized"
    assert many.kv == 40 * 42 * 19 + 50 * 13 * 3 * 12


def test_experts() -> None:
    experts = Experts(FeedForward(10, 3), 7, 2, shared=FeedForward(10, 4, gated=False))
    model = Model((Layer(Attention.of(10, 2), experts),), head=False)
    counted = forward(model, Pass(6))
    assert counted.feed_forward == 6 * (2 * 90 + 80)
    assert counted.router == 6 * 70


def test_logits_of_some_rows() -> None:
    layer = Layer(Attention.of(32, 4), FeedForward(32, 17))
    model = Model((layer,), vocab=101)
    assert forward(model, Pass(13, batch=2)).head == 2 * 13 * 101 * 32
    assert forward(model, Pass(13, batch=2, logit_rows=1)).head == 2 * 101 * 32
    with pytest.raises(ArgumentError, match="logit_rows"):
        Pass(3, logit_rows=4)


def test_encoder_decoder_reads_its_source_once() -> None:
    attention = Attention.of(32, 4)
    encoder = Model((Layer(attention, FeedForward(32, 17)),), causal=False, head=False)
    crossing = Layer(attention, FeedForward(32, 17), cross=replace(attention, context_dim=32))
    model = Model((crossing,), head=False, source=encoder)
    prompt = forward(model, Pass(3, source=11))
    own = forward(one_layer(attention), Pass(3))
    cross = 3 * 2 * 32 * 32 + 11 * 2 * 32 * 32 + 2 * 3 * 11 * 32
    source = 11 * (4 * 32 * 32 + 3 * 32 * 17) + 2 * 11 * 11 * 32
    assert prompt.total == own.total + cross + source
    step = forward(model, Pass(1, past=3, source=11))
    alone = forward(one_layer(attention), Pass(1, past=3))
    assert step.total == alone.total + 2 * 32 * 32 + 2 * 11 * 32


@pytest.mark.parametrize("counts", [{"queries": -1}, {"queries": 2.5}, {"queries": 1, "past": -1}])
def test_counts_that_cannot_be_are_refused(counts: dict[str, int]) -> None:
    with pytest.raises(ArgumentError):
        Pass(**counts)


def test_conventions_and_windows_are_checked() -> None:
    with pytest.raises(ArgumentError, match="visible, dense"):
        forward(one_layer(Attention.of(8, 2)), Pass(3), counting="half")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="causal=False"):
        visible_pairs(3, 3, window=2, window_ahead=1)
