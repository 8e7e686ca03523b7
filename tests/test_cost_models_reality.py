"""Whole models: what cost says of them, against torch's counter, their caches and autograd."""

import dataclasses

import pytest
import torch

import families
from multihead import cost
from multihead.integrations.cost_sources import describe
from multihead.models.checkpoints import from_checkpoint
from test_cost_activations import saved_bytes
from test_cost_reality import counted

BATCH, LENGTH = 2, 9
SEQ2SEQ = ("bart", "t5")
FAMILIES = (*families.DECODERS, *families.ENCODERS, *SEQ2SEQ)
OWN = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "bert", "bart")


def tokens():
    return torch.randint(3, families.VOCABULARY, (BATCH, LENGTH))


def inputs(family):
    given = {"input_ids": tokens()}
    if family not in families.ENCODERS:
        given["use_cache"] = False
    return given | ({"decoder_input_ids": tokens()} if family in SEQ2SEQ else {})


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_of_transformers_models(family):
    """Their eager attention multiplies all pairs before it masks: the dense convention."""
    model, given = families.build(family), inputs(family)
    described, step = describe(model), cost.Pass(LENGTH, batch=BATCH)
    with torch.no_grad():
        found = counted(lambda: model(**given))
    assert found == cost.forward(described, step, counting="dense").flops
    assert found > cost.forward(described, step).flops or not described.causal


@pytest.mark.parametrize("family", OWN)
def test_operations_of_our_models(family):
    theirs = families.build(family)
    model = from_checkpoint(theirs.config.to_dict(), theirs.state_dict())

    def call():
        if family == "bert":
            return model.pool(model(tokens()))
        return model(tokens(), tokens()) if family == "bart" else model(tokens())

    described, step = describe(model), cost.Pass(LENGTH, batch=BATCH)
    expected = cost.forward(described, step)
    with torch.no_grad():
        assert counted(call) == expected.flops
    # A first layer's input is trained too, so that every product has both of its gradients.
    behind = cost.backward(described, step)
    assert counted(lambda: call().sum().backward()) == expected.flops + behind.flops


@pytest.mark.parametrize("length", [1, 5])
def test_operations_behind_a_cache(length):
    theirs = families.build("mistral")  # with a window
    model = from_checkpoint(theirs.config.to_dict(), theirs.state_dict())
    caches = model.make_caches()
    with torch.no_grad():
        model(tokens(), caches=caches)
        more = tokens()[:, :length]
        found = counted(lambda: model(more, caches=caches, rows="last"))
    step = cost.Pass(length, past=LENGTH, batch=BATCH, logit_rows=1)
    assert found == cost.forward(describe(model), step).flops


@pytest.mark.parametrize("kind", ["growing", "static", "window", "paged", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches_of_our_models(family, kind, dtype):
    theirs = families.build(family)
    model = from_checkpoint(theirs.config.to_dict(), theirs.state_dict()).to(dtype)
    caches = model.make_caches(kind, batch=BATCH, capacity=LENGTH)
    options = {"batch": BATCH, "dtype": dtype, "kind": kind}
    with torch.no_grad():
        model(tokens(), caches=caches)
    described = describe(model)
    taken = sum(cache.nbytes for cache in caches)
    assert cost.cache_bytes(described, LENGTH, taken=True, **options) == taken
    filled = sum(cache.filled_nbytes for cache in caches)
    assert cost.cache_bytes(described, LENGTH, **options) == filled
    if kind == "static":
        return
    with torch.no_grad():
        for _ in range(4):
            model(tokens()[:, :1], caches=caches)
    filled = sum(cache.filled_nbytes for cache in caches)
    assert cost.cache_bytes(described, LENGTH + 4, **options) == filled


@pytest.mark.parametrize("family", [*families.DECODERS, *SEQ2SEQ])
def test_caches_of_transformers(family):
    model = families.build(family)
    given = inputs(family) | {"use_cache": True}
    with torch.no_grad():
        cache = model(**given).past_key_values
    caches = [cache]
    if family in SEQ2SEQ:
        caches = [cache.self_attention_cache, cache.cross_attention_cache]
    found = sum(it.keys.nbytes + it.values.nbytes for one in caches for it in one.layers)
    described = describe(model)
    # transformers drops what the next token's window will not reach: one key fewer than it sees.
    reached = dataclasses.replace(described, layers=tuple(map(_reach, described.layers)))
    options = {"batch": BATCH, "dtype": torch.float32}
    expected = cost.cache_bytes(reached, LENGTH, **options, kind="window")
    columns = sum(4 * layer.attention.window for layer in reached.layers if layer.attention.window)
    assert found == expected - columns


def _reach(layer):
    window = layer.attention.window
    if window is None:
        return layer
    return dataclasses.replace(
        layer, attention=dataclasses.replace(layer.attention, window=window - 1)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [name for name in OWN if name not in ("bart", "bert")])
def test_what_training_keeps_of_our_models(family, dtype):
    theirs = families.build(family)
    model = from_checkpoint(theirs.config.to_dict(), theirs.state_dict()).to(dtype)
    ids, targets = tokens(), torch.randint(families.VOCABULARY, (BATCH * LENGTH,))

    def loss():
        return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets)

    found = saved_bytes(model, loss)
    kept = cost.activation_bytes(describe(model), LENGTH, batch=BATCH, dtype=dtype)
    # What no description tells: Gemma's factor on its embeddings.
    config = model.config
    kept += 0 if config.embedding_scale is None else dtype.itemsize
    # Layers whose rotations differ in base keep a table each.
    turns = {(layer.rope, layer.width) for layer in config.layers if layer.rope is not None}
    kept += max(0, len(turns) - 1) * 8 * LENGTH * config.layers[0].width
    assert found == kept
