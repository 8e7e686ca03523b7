"""Checkpoints of other libraries as models of ours: the same numbers, and the way back."""

import copy
from collections import Counter, UserDict

import pytest
import torch

import families
from close import assert_close
from multihead import KeyPadding, ModelError, generate
from multihead.models import Encoder, EncoderDecoder, LanguageModel, checkpoints
from requires import require

DECODERS = ("llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")
ROPES = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 13,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 13, "beta_fast": 4.0},
}


@pytest.fixture(autouse=True, scope="module")
def _transformers():
    require("models")


def compare(ours, theirs, inputs, what, *, key="logits", rows=...):
    """Hold what ours gives for `inputs` to eager in float64, beside eager in float32."""
    exact = families.output(copy.deepcopy(theirs).double(), **inputs)[key]
    plain = families.output(theirs, **inputs)[key]
    assert_close(ours[rows], exact[rows], plain[rows], what=what)


def from_theirs(theirs, **options):
    return checkpoints.from_checkpoint(theirs.config.to_dict(), theirs.state_dict(), **options)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_decoders_give_their_logits(family, side):
    theirs = families.build(family)
    ours = from_theirs(theirs)
    assert isinstance(ours, LanguageModel)
    ids, mask = families.padded((23, 14), side)
    with torch.no_grad():
        alone = ours(ids[:1])
        batch = ours(ids, mask=KeyPadding(mask.bool()))
    compare(alone, theirs, {"input_ids": ids[:1]}, family)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    compare(batch, theirs, inputs, f"{family}, padded {side}", rows=mask.bool())


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize(("side", "cache"), [("left", "growing"), ("right", "static")])
def test_greedy_tokens_are_those_of_eager(family, side, cache):
    """Wherever its two largest logits, in float64, differ by more than its error in float32."""
    theirs = families.build(family)
    exact = copy.deepcopy(theirs).double()
    ids, mask = families.padded((17, 9), side)
    padding = KeyPadding(mask.bool())
    new = generate(from_theirs(theirs), ids, max_new_tokens=6, padding=padding, cache=cache)
    for row, real, tokens in zip(ids, padding.visible, new, strict=True):
        text = torch.cat((row[real], torch.tensor(tokens)))[None]
        logits = families.output(exact, input_ids=text).logits[0, -len(tokens) - 1 : -1]
        plain = families.output(theirs, input_ids=text).logits[0, -len(tokens) - 1 : -1]
        first, second = logits.topk(2).values.T
        sure = first - second > 2 * (plain - logits).abs().max()
        assert bool(sure.any())
        assert logits.argmax(-1)[sure].tolist() == torch.tensor(tokens)[sure].tolist()


def test_bert_gives_its_hidden_states():
    theirs = families.build("bert")
    ours = from_theirs(theirs)
    assert isinstance(ours, Encoder)
    ids, mask = families.padded((23, 14), "right")
    types = (torch.arange(23) > 9).long().expand(2, -1)
    with torch.no_grad():
        hidden = ours(ids, mask=KeyPadding(mask.bool()), type_ids=types)
        pooled = ours.pool(hidden)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    compare(hidden, theirs, inputs, "bert", key="last_hidden_state", rows=mask.bool())
    compare(pooled, theirs, inputs, "pooler", key="pooler_output")


def test_bart_gives_its_logits():
    theirs = families.build("bart")
    with torch.no_grad():
        theirs.final_logits_bias.normal_()
    ours = from_theirs(theirs)
    assert isinstance(ours, EncoderDecoder)
    ids, mask = families.padded((23, 14), "right")
    target, _ = families.padded((7, 7), "right", seed=5)
    with torch.no_grad():
        logits = ours(target, ids, source_mask=KeyPadding(mask.bool()))
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": target}
    compare(logits, theirs, inputs, "bart")


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_rotary_positions(kind):
    rope = {"rope_type": kind, "rope_theta": 500.0, **ROPES[kind]}
    theirs = families.build("llama", rope_parameters=rope, max_position_embeddings=17)
    ours = from_theirs(theirs)
    assert ours.config.layers[0].rope.scaling is not None
    ids, _ = families.padded((31,), "right")
    with torch.no_grad():
        compare(ours(ids), theirs, {"input_ids": ids}, kind)
    fields, _ = checkpoints.to_checkpoint(ours, "llama")
    assert checkpoints.read_config(fields) == ours.config


@pytest.mark.parametrize("family", [*DECODERS, "bert", "bart"])
def test_the_way_back_is_exact(family):
    """The same bits under the same names, and a config from which transformers builds the same."""
    import transformers

    theirs = families.build(family)
    ours = from_theirs(theirs)
    fields, state = checkpoints.to_checkpoint(ours, theirs.config.model_type)
    assert checkpoints.read_config(fields) == ours.config
    own = theirs.state_dict()
    assert state.keys() <= own.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in state.items())
    config = transformers.AutoConfig.for_model(**fields)
    config._attn_implementation = "eager"
    again = type(theirs)(config).eval()
    assert not again.load_state_dict(state, strict=False).unexpected_keys
    again.tie_weights()
    key = "last_hidden_state" if family == "bert" else "logits"
    ids, _ = families.padded((19,), "right")
    got, want = (families.output(model, input_ids=ids)[key] for model in (again, theirs))
    assert torch.equal(got, want)


def test_names_of_base_models_and_of_larger_ones():
    theirs = families.build("gpt2")
    state = theirs.transformer.state_dict() | {"h.0.attn.bias": torch.ones(1, 1, 3, 3)}
    bare = checkpoints.from_checkpoint(theirs.config.to_dict(), state)
    ids, _ = families.padded((11,), "right")
    assert torch.equal(bare(ids), from_theirs(theirs)(ids))
    bert = families.build("bert")
    state = {f"bert.{name}": tensor for name, tensor in bert.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if "pooler" not in name}
    larger = checkpoints.from_checkpoint(bert.config.to_dict(), state | {"cls.bias": ids})
    assert larger.pooler is None
    assert torch.equal(larger(ids), from_theirs(bert)(ids))
    _, back = checkpoints.to_checkpoint(larger, "bert")
    assert back.keys() == {name.removeprefix("bert.") for name in state}


def test_norms_by_their_first_names():
    """Those of BERT's first checkpoints, which transformers renames as it loads them."""
    bert = families.build("bert")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    state = {
        next((name.replace(new, first) for new, first in old.items() if new in name), name): tensor
        for name, tensor in bert.state_dict().items()
    }
    assert not any("LayerNorm.weight" in name for name in state)
    ids, _ = families.padded((11,), "right")
    named_so = checkpoints.from_checkpoint(bert.config.to_dict(), state)
    assert torch.equal(named_so(ids), from_theirs(bert)(ids))


def test_a_bart_that_was_saved_without_its_head():
    """transformers then takes its logits' bias for zero."""
    theirs = families.build("bart")
    theirs.final_logits_bias.zero_()
    bare = checkpoints.from_checkpoint(theirs.config.to_dict(), theirs.model.state_dict())
    ids, _ = families.padded((11,), "right")
    got, want = (model(ids[:, :5], ids) for model in (bare, from_theirs(theirs)))
    # A product without a bias may be summed in another order than one with zeros.
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    _, back = checkpoints.to_checkpoint(bare, "bart")
    assert "final_logits_bias" not in back


def test_each_tensor_is_looked_up_once():
    """Which may read it from a file, and dequantize it."""

    class Counting(UserDict):
        def __getitem__(self, name):
            looked_up[name] += 1
            return super().__getitem__(name)

    looked_up = Counter()
    theirs = families.build("llama")
    state = Counting(theirs.state_dict())
    checkpoints.from_checkpoint(theirs.config.to_dict(), state)
    assert looked_up == Counter(state.keys())


def test_tied_weights_stay_one():
    ours = from_theirs(families.build("gpt2"))
    assert ours.head.weight is ours.embedding.weight
    half = from_theirs(families.build("gpt2"), dtype=torch.bfloat16)
    assert half.head.weight is half.embedding.weight
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    bart = from_theirs(families.build("bart"))
    assert bart.encoder.embedding.weight is bart.decoder.head.weight


def test_checkpoints_that_do_not_fit():
    theirs = families.build("llama")
    fields, state = theirs.config.to_dict(), theirs.state_dict()
    with pytest.raises(ModelError, match=r"1 tensors that .* does not have, model\.x first"):
        checkpoints.from_checkpoint(fields, state | {"model.x": torch.ones(1)})
    without = {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}
    with pytest.raises(ModelError, match=r"lacks 1 tensors, model\.norm\.weight"):
        checkpoints.from_checkpoint(fields, without)
    with pytest.raises(ModelError, match=r"feed_forward\.gate_up_proj\.weight as \(74, 42\)"):
        checkpoints.from_checkpoint(fields | {"intermediate_size": 36}, state)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "'mamba' are not supported"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"hidden_act": "tanh"}, "'tanh' is not supported"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "proportional"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ],
)
def test_configs_that_are_not_supported(change, named):
    fields = families.build("llama").config.to_dict()
    with pytest.raises(ModelError, match=named):
        checkpoints.read_config(fields | change)


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("qwen2", "not built as one of type 'qwen2'"),
        ("gpt2", "not built as GPT-2"),
        ("bart", "LanguageModelConfig does not describe"),
        ("mamba", "'mamba' are not supported"),
    ],
)
def test_models_that_are_no_such_checkpoint(model_type, named):
    ours = from_theirs(families.build("llama"))
    with pytest.raises(ModelError, match=named):
        checkpoints.to_checkpoint(ours, model_type)
