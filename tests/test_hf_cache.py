"""PreallocatedCache in transformers' hands: the tokens of its own cache, without its copies."""

import copy
import sys

import pytest
import torch

import multihead as mh
from close import assert_close
from families import build, padded

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from transformers import DynamicCache, EncoderDecoderCache

from multihead.integrations.deferred import Scaled
from multihead.integrations.hf_cache import PreallocatedCache
from multihead.integrations.transformers import use

FAMILIES = ("llama", "mistral", "gemma3", "gpt2")
STEPS = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def models():
    built = {}

    def get(family, implementation="eager"):
        model = built.setdefault(family, build(family))
        use(model) if implementation == "multihead" else model.set_attn_implementation(
            implementation
        )
        return model

    return get


def _generate(model, cache, lengths=(5, 13, 11), **options):
    ids, mask = padded(lengths, "left")
    settings = STEPS | options
    return model.generate(input_ids=ids, attention_mask=mask, cache=cache, **settings)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "multihead"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generate(models, family, implementation):
    model = models(family, implementation)
    cache = PreallocatedCache(model.config)
    expected = _generate(model, DynamicCache(config=model.config))
    assert torch.equal(_generate(model, cache), expected)
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0
    assert torch.equal(_generate(model, cache), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beams(models, family):
    model = models(family)
    options = {"num_beams": 3, "num_return_sequences": 2}
    expected = _generate(model, DynamicCache(config=model.config), **options)
    assert torch.equal(_generate(model, PreallocatedCache(model.config), **options), expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_assisted_generation_crops(models, family):
    model = models(family, "multihead")
    ids = torch.tensor([[5, 6, 7, 8] * 3 + [5]])
    crops = []

    class Counting(PreallocatedCache):
        def crop(self, tokens_to_remove):
            crops.append(tokens_to_remove)
            super().crop(tokens_to_remove)

    settings = STEPS | {"max_new_tokens": 23}
    plain = model.generate(input_ids=ids, **settings)
    cache = Counting(model.config)
    assisted = model.generate(input_ids=ids, cache=cache, prompt_lookup_num_tokens=3, **settings)
    assert torch.equal(assisted, plain)
    assert any(crops)


def test_encoder_and_decoder():
    model = build("bart")
    ids, mask = padded((7, 5), "right")
    caches = [
        EncoderDecoderCache(*[kind(config=model.config) for _ in range(2)])
        for kind in (DynamicCache, PreallocatedCache)
    ]
    expected, actual = (
        model.generate(input_ids=ids, attention_mask=mask, cache=cache, num_beams=2, **STEPS)
        for cache in caches
    )
    assert torch.equal(actual, expected)


# --- one layer against transformers' own ---------------------------------------------------------


def _config(window=7):
    """What a cache asks of a config: two layers, one of them with a window."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        num_hidden_layers=2,
        sliding_window=window,
        layer_types=["full_attention", "sliding_attention"],
        max_position_embeddings=200,
    )


def _both(window=7, **options):
    config = _config(window)
    return PreallocatedCache(config, **options), DynamicCache(config=config)


def _feed(caches, length, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for layer in range(2):
        key = torch.randn(batch, 3, length, 5, generator=generator)
        value = torch.randn(batch, 3, length, 11, generator=generator)
        sizes = [cache.get_mask_sizes(length, layer) for cache in caches]
        results = [cache.update(key, value, layer) for cache in caches]
        assert sizes[0] == sizes[1]
        for ours, theirs in zip(*results, strict=True):
            assert type(ours) is torch.Tensor
            assert torch.equal(ours, theirs)
        assert caches[0].get_seq_length(layer) == caches[1].get_seq_length(layer)


OPERATIONS = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "keep": lambda cache: cache.reorder_cache(torch.tensor([0, 1])),
    "swap": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "select_bool": lambda cache: cache.batch_select_indices(torch.tensor([True, False])),
}
BATCHES = {"repeat": 4, "select": 1, "select_bool": 1}


@pytest.mark.parametrize("lengths", [(1,) * 90, (3, 5, 1, 71, 1, 1), (100, 1, 150, 1, 1)], ids=str)
@pytest.mark.parametrize("window", [2, 7, 300])
def test_updates(window, lengths):
    caches = _both(window)
    for step, length in enumerate(lengths):
        _feed(caches, length, seed=step)
    assert caches[0].nbytes <= 2 * 3 * 16 * 4 * (sum(lengths) + min(window, sum(lengths)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_batches_change(name):
    caches = _both()
    for seed, length in enumerate((11, 1)):
        _feed(caches, length, seed=seed)
    for cache in caches:
        OPERATIONS[name](cache)
    for seed, length in enumerate((1, 3, 1)):
        _feed(caches, length, BATCHES.get(name, 2), seed + 2)


def test_crop_goes_back():
    caches = _both()
    for cache in caches:
        cache.activate_past_recording()
    _feed(caches, 11)
    for seed, removed in enumerate((-2, 0, -3, -1)):
        _feed(caches, 4, seed=seed)
        for cache in caches:
            cache.crop(removed)
    _feed(caches, 1, seed=9)


def test_crop_refuses_what_is_dropped():
    cache, _ = _both()
    full, sliding = cache.layers
    for layer in cache.layers:
        layer.update(torch.randn(1, 1, 11, 3), torch.randn(1, 1, 11, 3))
    full.crop(-20)
    assert full.get_seq_length() == 0
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        sliding.crop(-1)
    with pytest.raises(mh.ArgumentError, match="minus the number"):
        full.crop(3)


def test_copies_stand_alone_and_hold_the_tokens_alone():
    caches = _both(capacity=100_000)
    _feed(caches, 11)
    copies = [copy.deepcopy(cache) for cache in caches]
    assert copies[0].layers[0]._memory[0].shape[2] == 11
    _feed(caches, 1, seed=1)
    _feed(copies, 1, seed=2)
    _feed(caches, 1, seed=3)


def test_gradients_reach_every_token():
    caches = _both()
    keys = [torch.randn(1, 1, 3, 5, requires_grad=True) for _ in range(4)]
    grads = []
    for cache in caches:
        for key in keys:
            for layer in range(2):
                out = cache.update(key, key, layer)[0]
        out.square().sum().backward()
        grads.append([key.grad for key in keys])
        for key in keys:
            key.grad = None
    for ours, theirs in zip(*grads, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("window", [7, 40])
def test_queries_may_be_trained_on_keys_that_are_not(window):
    """What the backward pass keeps of earlier steps is not written to by later ones."""
    query, key = torch.randn(2, 1, 3, 120, 5)

    def gradient(cache, dtype):
        leaf, keys = query.to(dtype, copy=True).requires_grad_(), key.to(dtype)
        outs = []
        for step in range(120):
            new = keys[:, :, step : step + 1]
            for layer in range(2):
                seen, values = cache.update(new, new, layer)
                outs.append((leaf[:, :, step : step + 1] @ seen.mT).softmax(-1) @ values)
        return torch.autograd.grad(torch.cat(outs, 2).square().sum(), leaf)[0]

    ours, theirs = _both(window)
    exact = gradient(DynamicCache(config=_config(window)), torch.float64)
    assert_close(gradient(ours, torch.float32), exact, gradient(theirs, torch.float32))


def test_inference_mode_may_end():
    caches = _both()
    with torch.inference_mode():
        _feed(caches, 3)
        for cache in caches:
            cache.reorder_cache(torch.tensor([1, 0]))
    with torch.no_grad():
        _feed(caches, 3, seed=1)


def test_tensors_of_others_are_not_written_to():
    cache, _ = _both()
    key = torch.randn(1, 1, 3, 5, requires_grad=True)
    layer = cache.layers[0]
    layer.update(key, key)
    with torch.no_grad():
        layer.crop(-1)
        layer.update(torch.zeros(1, 1, 1, 5), torch.zeros(1, 1, 1, 5))
    assert not (key == 0).any()
    assert (layer.keys[:, :, 2] == 0).all()


@pytest.mark.slow
def test_compiled_in_one_graph():
    def steps(cache, key, value):
        for layer in range(2):
            cache.update(key, value, layer)
            out = cache.update(key[:, :, :1], value[:, :, :1], layer)[0]
        return out

    inputs = torch.randn(1, 3, 9, 5), torch.randn(1, 3, 9, 11)
    compiled = torch.compile(steps, backend="eager", fullgraph=True)
    ours, theirs = _both()
    assert torch.equal(compiled(ours, *inputs), steps(theirs, *inputs))
    _feed((ours, theirs), 3, batch=1)


# --- what it costs -------------------------------------------------------------------------------


def _resident(tensor):
    """Bytes of the mapping that holds `tensor` which the system has provided."""
    address = tensor.data_ptr()
    inside = False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            head = line.split()[0]
            if "-" in head:
                begin, end = (int(part, 16) for part in head.split("-"))
                inside = begin <= address < end
            elif inside and head == "Rss:":
                return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_no_token_fills_is_not_used():
    cache = PreallocatedCache(_config(), capacity=500_000)
    key = torch.randn(1, 2, 1, 64)
    total, page = 2 * 500_000 * 64 * 4, 4096
    for length in (1, 1000):
        cache.update(key.expand(-1, -1, length, -1), key.expand(-1, -1, length, -1), 0)
        filled = cache.layers[0].nbytes // 2
        memory = cache.layers[0]._memory[0]
        assert memory.nbytes == total
        # Values may share the mapping with keys, and each head ends within a page.
        assert filled <= _resident(memory) <= 2 * filled + 8 * page
    place = memory.data_ptr()
    cache.update(key, key, 0)
    assert cache.layers[0]._memory[0].data_ptr() == place


def test_a_window_has_its_own_memory_alone():
    cache = PreallocatedCache(_config(window=128), capacity=500_000)
    key = torch.randn(1, 2, 1000, 5)
    cache.update(key, key, 1)
    for _ in range(300):
        cache.update(key[:, :, :1], key[:, :, :1], 1)
        assert cache.layers[1]._memory[0].shape[2] == 127 + 64


# --- int8 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_int8_reads_alike_in_every_implementation(models, family):
    ids, mask = padded((5, 13), "left")
    outs = []
    for implementation in ("multihead", "eager"):
        model = models(family, implementation)
        cache = PreallocatedCache(model.config, dtype=torch.int8)
        plain = PreallocatedCache(model.config)
        with torch.no_grad():
            for held in (cache, plain):
                model(input_ids=ids, attention_mask=mask, cache=held)
            wide = torch.nn.functional.pad(mask, (0, 1), value=1)
            options = {"input_ids": ids[:, :1], "attention_mask": wide}
            outs.append([model(**options, cache=held).logits for held in (cache, plain)])
        assert cache.nbytes < plain.nbytes / 2
        assert isinstance(cache.layers[0].keys, Scaled)
    (ours, ours_plain), (eager, _) = outs
    assert torch.allclose(ours, eager, atol=2e-4)
    assert (ours - ours_plain).abs().max() < 0.1 * ours_plain.abs().max()


def test_int8_keeps_what_a_token_was_stored_as():
    caches = [PreallocatedCache(_config(), dtype=torch.int8) for _ in range(2)]
    key = torch.randn(2, 3, 11, 5)
    key[:, 1] = 0
    key[0, 0, 0, 0] = 1000
    for layer in range(2):
        whole = caches[0].update(key, key, layer)[0].written()
        parts = [caches[1].update(part, part, layer)[0] for part in key.split(1, dim=2)]
        kept = parts[-1].written()
        assert torch.equal(kept, whole[:, :, -kept.shape[2] :])
        assert (kept[:, 1] == 0).all()
        step = key.abs().amax(-1, keepdim=True) / 127
        assert ((whole - key).abs() <= step * 0.5001).all()
    with pytest.raises(mh.ArgumentError, match="requires a gradient"):
        caches[0].update(key.requires_grad_(), key, 0)


def test_arguments():
    with pytest.raises(mh.ArgumentError, match=r"torch\.int8"):
        PreallocatedCache(_config(), dtype=torch.float16)
    with pytest.raises(mh.ArgumentError, match="at least 1"):
        PreallocatedCache(_config(), capacity=0)
