"""Windows of single heads, from models that are restricted to what they cost."""

import pytest
import torch

import families
import multihead as mh
from multihead import cost
from multihead.errors import ArgumentError
from multihead.heads import HeadWindows, restrict, restricted
from multihead.integrations.cost_sources import describe
from multihead.models import BlockConfig, Encoder, EncoderConfig, LanguageModel, LanguageModelConfig
from test_cost_reality import counted

LENGTH, BATCH = 17, 2
WINDOWS = HeadWindows(
    5,
    2,
    {"blocks.0.attention": 6, "blocks.1.attention": 6, "blocks.2.attention": 6},
    {"blocks.0.attention": (0, 1, 4), "blocks.2.attention": (2, 3, 4, 5)},
)


def own_model():
    return LanguageModel(LanguageModelConfig(41, (BlockConfig(24, 6, 37, num_kv_heads=3),) * 3))


def llama(**changes):
    windows = HeadWindows(
        changes.pop("window", 5),
        changes.pop("keep_first", 2),
        {"model.layers.0.self_attn": 6, "model.layers.1.self_attn": 6},
        {"model.layers.1.self_attn": (0, 3)},
    )
    return families.build(changes.pop("family", "llama")), windows


def test_a_restricted_model_costs_what_its_heads_see():
    model = own_model()
    plain, ids = describe(model), torch.randint(41, (BATCH, LENGTH))
    planned = cost.with_head_windows(plain, WINDOWS.by_layer(), WINDOWS.keep_first)
    with restricted(model, WINDOWS):
        described = describe(model)
        caches = model.make_caches("window")
        with torch.no_grad():
            found = counted(lambda: model(ids, caches=caches))
    assert described == planned
    assert describe(model) == plain
    step = cost.Pass(LENGTH, batch=BATCH)
    assert found == cost.forward(described, step).flops < cost.forward(plain, step).flops
    pairs = cost.forward(described, step).exponentials
    assert pairs == BATCH * WINDOWS.visible_pairs(LENGTH, LENGTH)
    options = {"batch": BATCH, "dtype": "float32", "kind": "window"}
    filled = sum(cache.filled_nbytes for cache in caches)
    assert filled == cost.cache_bytes(described, LENGTH, **options)
    assert filled < cost.cache_bytes(plain, LENGTH, **options)


def test_restricted_heads_of_transformers_are_counted():
    model, windows = llama()
    plain = describe(model)
    planned = cost.with_head_windows(plain, windows.by_layer(), windows.keep_first)
    with restricted(model, windows), torch.no_grad():
        assert describe(model) == planned != plain
        found = counted(lambda: model(torch.randint(101, (BATCH, LENGTH)), use_cache=False))
        assert found == cost.forward(planned, cost.Pass(LENGTH, batch=BATCH)).flops
    assert describe(model) == plain


def test_a_window_of_the_layer_itself_stays():
    model, windows = llama(family="mistral", window=7, keep_first=0)  # its own is 5
    restrict(model, windows)
    attention = describe(model).layers[1].attention
    assert attention.head_windows == (5,) * 6
    assert attention.window is None
    model, windows = llama(family="mistral", window=3, keep_first=1)
    restrict(model, windows)
    with pytest.raises(ArgumentError, match="own window is 5 drops the first 1 keys"):
        describe(model)


def test_windows_of_a_layer():
    def window_of(window, heads=2):
        attention = describe(mh.MultiHeadAttention(24, heads, window=window))
        return attention.window, attention.window_ahead, attention.keep_first

    assert window_of(mh.Window(3, 2)) == (4, 2, 0)
    assert window_of(mh.Window(3, keep_first=4)) == (4, 0, 4)
    assert window_of(mh.Window(3, None)) == (4, 0, 0)
    attention = describe(mh.MultiHeadAttention(24, 2, window=mh.Window(torch.tensor([3]))))
    assert attention.head_windows == (4, 4)
    empty = mh.MultiHeadAttention(24, 2, window=mh.Window(torch.tensor([3, 4]).to("meta")))
    with pytest.raises(ArgumentError, match="none on the meta device"):
        describe(empty)


def test_a_causal_model_sees_nothing_ahead():
    model = own_model()
    model.blocks[1].attention.window = mh.Window(3, 2)
    with torch.no_grad():
        found = counted(lambda: model(torch.randint(41, (BATCH, LENGTH))))
    assert found == cost.forward(describe(model), cost.Pass(LENGTH, batch=BATCH)).flops


def test_an_encoder_with_restricted_heads_is_refused():
    model = Encoder(EncoderConfig(41, (BlockConfig(24, 6, 37),) * 3))
    model.blocks[0].attention.window = mh.Window(3, 3)
    with torch.no_grad():
        found = counted(lambda: model(torch.randint(41, (BATCH, LENGTH))))
    assert found == cost.forward(describe(model), cost.Pass(LENGTH, batch=BATCH)).flops
    restrict(own := Encoder(model.config), WINDOWS)
    theirs = families.build("bert")
    name = "encoder.layer.1.attention.self"
    restrict(theirs, HeadWindows(5, 0, {name: 3}, {name: (1,)}))
    for refused, words in ((own, "in an encoder a window"), (theirs, "in decoders alone")):
        with pytest.raises(ArgumentError, match=words):
            describe(refused)


def test_latent_attention_has_no_windows_of_heads():
    model = families.build("deepseek_v3")
    name = "model.layers.1.self_attn"
    restrict(model, HeadWindows(5, 0, {name: 3}, {name: (1,)}))
    with pytest.raises(ArgumentError, match="heads of latent attention share one latent"):
        describe(model)
