"""transformers' continuous batching on multihead's attention: the same tokens, no table twice."""

import pytest
import torch

import multihead as mh
from families import VOCABULARY, build
from multihead.integrations import deferred, sdpa_calls, sdpa_masks

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

LENGTHS = (5, 17, 41, 3, 29, 11)
STEPS = 5


def _generate(model):
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS
    ]
    results = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(
            max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=8, num_blocks=64, max_batch_tokens=64, use_cuda_graph=False
        ),
        warmup=False,
    )
    return [results[name].generated_tokens for name in sorted(results)]


@pytest.mark.slow
def test_the_same_tokens(monkeypatch):
    model = build("mistral")
    model.set_attn_implementation("sdpa")
    expected = _generate(model)
    assert [len(tokens) for tokens in expected] == [STEPS] * len(LENGTHS)
    # The model is so small that its masks and heads would be cheaper to copy.
    monkeypatch.setattr(sdpa_masks, "_SMALL", 0)
    monkeypatch.setattr(sdpa_masks, "_PAIRS_WORTH_A_CALL", 0)
    monkeypatch.setattr(deferred, "_LEAST", 0)
    lowered, calls = [], []
    lower, attention = sdpa_masks.lower, sdpa_calls.attention

    def spy_lower(mask):
        lowered.append(lower(mask))
        return lowered[-1]

    def spy(query, key, value, **options):
        calls.append((key.shape[1], options["mask"], options.get("bias")))
        return attention(query, key, value, **options)

    monkeypatch.setattr(sdpa_calls, "lower", spy_lower)
    monkeypatch.setattr(sdpa_calls, "attention", spy)
    with mh.replace_sdpa(model):
        assert _generate(model) == expected
    assert len(lowered) == STEPS + 1  # the prompts are more than one batch holds
    assert len(calls) == model.config.num_hidden_layers * sum(len(it.blocks) for it in lowered)
    assert {heads for heads, _, _ in calls} == {model.config.num_key_value_heads}
    assert all(bias is None for _, _, bias in calls)
    assert {type(mask) for _, mask, _ in calls} == {type(None), mh.Causal, mh.Window}
