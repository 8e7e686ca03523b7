"""Hugging Face families: our logits against eager's, prefill and decoding, with every padding."""

import itertools

import pytest
import torch

from close import assert_close
from families import DECODERS, ENCODERS, build, output, padded, trio

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

LENGTHS = (5, 13, 11)
PADDINGS = ("none", "all_ones", "left", "right")


def _logits(model, **inputs):
    return output(model, **inputs)[0]


def _inputs(padding, lengths=LENGTHS):
    if padding == "none":
        ids, mask = padded((max(lengths),) * len(lengths), "right")
        return {"input_ids": ids}, mask.bool()
    if padding == "all_ones":
        ids, mask = padded((max(lengths),) * len(lengths), "right")
    else:
        ids, mask = padded(lengths, padding)
    return {"input_ids": ids, "attention_mask": mask}, mask.bool()


@pytest.fixture(scope="module")
def models():
    built = {}

    def get(family):
        if family not in built:
            built[family] = trio(family)
        return built[family]

    return get


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_prefill(models, family, padding):
    inputs, real = _inputs(padding)
    outputs = [_logits(model, **inputs)[real] for model in models(family)]
    assert_close(outputs[0], outputs[2], outputs[1])


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_encoder_and_decoder(models, family, padding):
    inputs, _ = _inputs(padding)
    decoder_ids, decoder_mask = padded((7, 3, 6), "right", seed=5)
    inputs |= {"decoder_input_ids": decoder_ids, "decoder_attention_mask": decoder_mask}
    real = decoder_mask.bool()
    outputs = [_logits(model, **inputs)[real] for model in models(family)]
    assert_close(outputs[0], outputs[2], outputs[1])


def _decode(model, cache, inputs, steps):
    """Logits of a prefill and then of `steps`, each a number of tokens."""
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    generator = torch.Generator().manual_seed(11)
    collected = []
    for size in (ids.shape[1], *steps):
        if collected:
            ids = torch.randint(3, 101, (ids.shape[0], size), generator=generator)
            if mask is not None:
                mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
        logits = _logits(model, input_ids=ids, attention_mask=mask, cache=cache)
        collected.append(logits)
    return collected


@pytest.mark.parametrize(
    ("padding", "kind"),
    [
        *itertools.product(("none", "left", "right"), ("dynamic", "static")),
        ("left", "preallocated"),
    ],
)
@pytest.mark.parametrize("family", DECODERS)
def test_decoding_continues_prefill(models, family, padding, kind):
    from transformers import DynamicCache, StaticCache

    from multihead.integrations.hf_cache import PreallocatedCache

    inputs, real = _inputs(padding)
    steps = (1, 1, 3, 1)
    outputs = []
    for model in models(family):
        if kind == "dynamic":
            cache = DynamicCache(config=model.config)
        elif kind == "preallocated":
            cache = PreallocatedCache(model.config)
        else:
            cache = StaticCache(config=model.config, max_cache_len=23)
        outputs.append(_decode(model, cache, inputs, steps))
    # A step of one token has few logits, all of which plain torch may have exact by luck.
    actual, baseline, expected = (
        torch.cat([prefill[real], *(step.flatten(0, 1) for step in steps)])
        for prefill, *steps in outputs
    )
    assert_close(actual, expected, baseline)


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_compiled_decoding_from_a_static_cache(models, family, padding):
    from transformers import StaticCache

    torch._dynamo.reset()
    inputs, real = _inputs(padding)
    ours, *_ = models(family)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    steps = (1,) * 5
    compiled, eager = (
        _decode(it, StaticCache(config=ours.config, max_cache_len=23), inputs, steps)
        for it in (torch.compile(ours, backend=keep), ours)
    )
    assert torch.equal(compiled[0][real], eager[0][real])
    for one, other in zip(compiled[1:], eager[1:], strict=True):
        assert torch.equal(one, other)
    assert 0 < len(graphs) < len(steps), "a graph for every step is none"


STATIC = {"cache_implementation": "static"}  # which transformers offers for decoders


@pytest.mark.parametrize(
    ("family", "options"),
    [(name, {}) for name in (*DECODERS, "bart", "t5")] + [(name, STATIC) for name in DECODERS],
    ids=lambda value: value if isinstance(value, str) else "static" if value else "dynamic",
)
def test_greedy_generation_equals_eager(models, family, options):
    ours, _, _ = models(family)
    inputs, _ = _inputs("left")
    settings = dict(max_new_tokens=9, do_sample=False, disable_compile=True, pad_token_id=0)
    eager = build(family)
    assert torch.equal(
        ours.generate(**inputs, **settings, **options),
        eager.generate(**inputs, **settings, **options),
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_padded_row_equals_the_prompt_alone(models, family):
    ours, _, expected = models(family)
    ids, mask = padded((3, 5), "left")
    for total in (5, 9):
        extra = total - 5
        wide_ids = torch.nn.functional.pad(ids, (extra, 0), value=17)
        wide_mask = torch.nn.functional.pad(mask, (extra, 0))
        positions = (wide_mask.cumsum(-1) - 1).clamp(min=0)
        inputs = {"attention_mask": wide_mask, "position_ids": positions}
        together = _logits(ours, input_ids=wide_ids, **inputs)
        other_pad = torch.where(wide_mask.bool(), wide_ids, 42)
        moved = _logits(ours, input_ids=other_pad, **inputs)
        for row, length in enumerate((3, 5)):
            assert torch.equal(together[row, -length:], moved[row, -length:])
            alone = ids[row : row + 1, -length:]
            assert_close(
                together[row, -length:],
                _logits(expected, input_ids=alone)[0],
                _logits(ours, input_ids=alone)[0],
                factor=4,
            )
