"""What heads write: contributions and logits add up to what the model computed, or are refused."""

import contextlib
import dataclasses

import pytest
import torch

import families
import multihead as mh
import tiny
from close import assert_close
from multihead import heads
from multihead.heads.output.linear_norm import linear_norm
from requires import require

LENGTH = 23
ROWS = (0, 7, LENGTH - 1)
TOKENS = (5, 11, 40)


def ours(kind, dtype):
    """Decoders of ours of several makes, with biases and grouped queries."""
    changes = {
        "rope": {},
        "learned": {"out_bias": True, "ffn_bias": True},
        "alibi": {"out_bias": True},
        "sandwich": {"norm_placement": "sandwich"},
        "sandwich layer norm": {"norm_placement": "sandwich", "norm": "layer", "out_bias": True},
        "offset": {"norm": "rms_offset"},
        "sinks": {"sinks": True},
        "softcap": {"softcap": 3.0, "window": 6},
    }[kind]
    positions = kind if kind in ("learned", "alibi") else "rope"
    return tiny.language_model(positions, dtype=dtype, **changes)


OURS = (
    "rope", "learned", "alibi", "sandwich", "sandwich layer norm", "offset", "sinks", "softcap",
)  # fmt: skip
LLAMA_LIKE = ("llama", "gpt2", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3")


def written_by_attention(model, token_ids, names):
    """What each of the modules `names` gave when the model ran, [1, L, C] each, and the logits."""
    kept, handles = {}, []
    for name, module in model.named_modules():
        if name in names:

            def keep(module, inputs, output, name=name):
                kept[name] = output[0] if isinstance(output, tuple) else output

            handles.append(module.register_forward_hook(keep))
    with torch.no_grad(), our_attention(model):
        result = model(token_ids)
    for handle in handles:
        handle.remove()
    return [kept[name][0] for name in names], getattr(result, "logits", result)[0]


def our_attention(model):
    """Eager's softmax is in float32 also where the model is in float64."""
    if isinstance(model, mh.LanguageModel):
        return contextlib.nullcontext()
    from multihead.integrations.transformers import using

    return using(model)


def names_of(model, layers):
    """The modules behind which attention has been written to the stream."""
    if isinstance(model, mh.LanguageModel):
        sandwich = model.blocks[0].norm_placement == "sandwich"
        part = "attention_out_norm" if sandwich else "attention"
        return [f"blocks.{layer}.{part}" for layer in range(layers)]
    if model.config.model_type == "gpt2":
        return [f"transformer.h.{layer}.attn" for layer in range(layers)]
    sandwich = model.config.model_type.startswith("gemma")
    part = "post_attention_layernorm" if sandwich else "self_attn"
    return [f"model.layers.{layer}.{part}" for layer in range(layers)]


def check_sums(build, rounding):
    """Heads and bias sum to what each layer wrote, in float64 and, by assert_close, in float32."""
    exact, plain = build(torch.float64), build(torch.float32)
    ids = tiny.tokens(1, LENGTH)
    for model, baseline in ((exact, exact), (plain, plain)):
        found = heads.writing(model, ids)
        names = names_of(model, len(found.layers))
        want, _ = written_by_attention(exact, ids, names)
        run, _ = written_by_attention(baseline, ids, names)
        assert found.error < (1e-12 if model is exact else 1e-5)
        for layer, (expected, ran) in enumerate(zip(want, run, strict=True)):
            total = found.outputs(layer, slice(None)).sum(0) + found.bias(layer, slice(None))
            if model is exact:
                torch.testing.assert_close(total, expected, rtol=rounding, atol=rounding)
            else:
                assert_close(total, expected, ran, factor=4.0, what=f"layer {layer}")


@pytest.mark.parametrize("kind", OURS)
def test_heads_sum_to_what_layers_of_ours_write(kind) -> None:
    check_sums(lambda dtype: ours(kind, dtype), 1e-9)


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_heads_sum_to_what_layers_of_transformers_write(family) -> None:
    require("models")
    # Norms of these models compute in float32 always, also that behind Gemma's attention.
    rounding = 1e-6 if family.startswith("gemma") else 1e-9
    check_sums(lambda dtype: families.build(family).to(dtype), rounding)


@pytest.mark.parametrize("kind", OURS)
def test_attributions_of_everything_sum_to_the_logits(kind) -> None:
    part = "feed_forward_out_norm" if kind.startswith("sandwich") else "feed_forward"
    names = [f"blocks.{layer}.{part}" for layer in range(2)]
    check_logits(ours(kind, torch.float64), "blocks.0", names, 1e-9)


@pytest.mark.parametrize(
    ("family", "layer", "part"),
    [
        ("llama", "model.layers", "mlp"),
        ("gpt2", "transformer.h", "mlp"),
        ("gemma3", "model.layers", "post_feedforward_layernorm"),
        ("gpt_oss", "model.layers", "mlp"),
        ("deepseek_v3", "model.layers", "mlp"),
    ],
)
def test_attributions_sum_to_the_logits_of_transformers(family, layer, part) -> None:
    require("models")
    names = [f"{layer}.{number}.{part}" for number in range(2)]
    check_logits(families.build(family).double(), f"{layer}.0", names, 1e-5)


def check_logits(model, first, feed_forwards, rounding):
    """Heads, biases, embeddings and feed-forwards add up to the logits, to rounding."""
    ids = tiny.tokens(1, LENGTH)
    found = heads.writing(model, ids)
    entered = []

    def enter(module, inputs, keywords):
        entered.append(inputs[0] if inputs else keywords["hidden_states"])

    handle = model.get_submodule(first).register_forward_pre_hook(enter, with_kwargs=True)
    fed, logits = written_by_attention(model, ids, feed_forwards)
    handle.remove()
    norm = found._unembedding.norm
    rest = norm.linear(entered[0][0] + sum(fed), torch.arange(LENGTH)) + norm.bias
    rest = rest @ found._unembedding.weight.T
    heads_and_biases = found.attribution(TOKENS, ROWS).sum((0, 1))
    heads_and_biases = heads_and_biases + found.bias_attribution(TOKENS, ROWS).sum(0)
    total = heads_and_biases + rest[list(ROWS)][:, list(TOKENS)]
    expected = logits[list(ROWS)]
    torch.testing.assert_close(total, expected[:, list(TOKENS)], rtol=rounding, atol=rounding)
    torch.testing.assert_close(found.logits(ROWS), expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("kind", ["rope", "learned", "sandwich layer norm", "sinks"])
def test_contributions_are_the_norms_of_weighted_values(kind) -> None:
    model = ours(kind, torch.float64)
    found = heads.writing(model, tiny.tokens(LENGTH))
    for layer in range(2):
        weights = found.weights(layer, ROWS)
        kept = found._kept[layer]
        value = kept.problem.value[0].repeat_interleave(kept.problem.group, 0)
        per_key = torch.einsum("hqk,hkv,hvc->hqkc", weights, value, kept.weight)
        if kept.norm is not None:
            scale = kept.norm.scale[list(ROWS)][:, None, None]
            centered = per_key - per_key.mean(-1, keepdim=True) * kept.norm.centers
            per_key = centered * kept.norm.gain * scale
        found_norms = found.contributions(layer, ROWS)
        torch.testing.assert_close(found_norms, per_key.norm(dim=-1), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(per_key.sum(-2), found.outputs(layer, ROWS))
        by_key = found.key_attribution(layer, 11, ROWS, against=5)
        whole = found.attribution(11, ROWS, against=5)[layer, :, :, 0]
        torch.testing.assert_close(by_key.sum(-1), whole, rtol=1e-9, atol=1e-12)


def test_weights_are_those_of_eager() -> None:
    require("models")
    model = families.build("llama").double()
    ids = tiny.tokens(1, LENGTH)
    found = heads.writing(model, ids)
    expected = families.output(model, input_ids=ids, output_attentions=True).attentions
    for layer in range(2):
        torch.testing.assert_close(
            found.weights(layer, slice(None)), expected[layer][0], rtol=1e-4, atol=1e-5
        )


def test_rows_of_the_vocabulary_and_differences_agree() -> None:
    found = heads.writing(ours("learned", torch.float64), tiny.tokens(LENGTH))
    whole = torch.stack([found.vocabulary(1, head, ROWS) for head in range(6)])
    some = found.attribution(TOKENS, ROWS)
    torch.testing.assert_close(whole[:, :, list(TOKENS)], some[1])
    one = found.attribution(TOKENS, ROWS, against=3)
    torch.testing.assert_close(one, some - found.attribution(3, ROWS))
    each = found.attribution(TOKENS, ROWS, against=(3, 5, 5))
    torch.testing.assert_close(each, some - found.attribution((3, 5, 5), ROWS))


def test_strongest_tokens_are_those_of_the_mean_row() -> None:
    found = heads.writing(ours("learned", torch.float64), tiny.tokens(LENGTH))
    mean = found.vocabulary(0, 2, slice(None)).mean(0)
    top = found.top_tokens(0, 2, k=4)
    values, tokens = (mean - mean.mean()).topk(4)
    assert torch.equal(top.tokens, tokens)
    torch.testing.assert_close(top.values, values)
    one = found.top_tokens(0, 2, -1, k=1)
    assert int(one.tokens) == int(found.vocabulary(0, 2, -1).argmax())


@pytest.mark.parametrize("rows", [slice(5, 2), slice(9, None, -3), slice(-4, None, 2), slice(0)])
def test_slices_choose_rows_as_they_do_of_a_list(rows) -> None:
    found = heads.writing(ours("rope", torch.float64), tiny.tokens(LENGTH))
    assert torch.equal(found.outputs(1, rows), found.outputs(1, list(range(LENGTH))[rows]))


def test_strongest_heads_are_those_of_the_attribution() -> None:
    found = heads.writing(ours("learned", torch.float64), tiny.tokens(LENGTH))
    added = found.attribution(5, -1, against=11)[..., 0, 0]
    strongest = found.strongest(5, -1, against=11, k=3)
    assert [value for _, _, value in strongest] == added.flatten().topk(3).values.tolist()
    assert all(value == added[layer, head] for layer, head, value in strongest)
    assert len(found.strongest(5, -1, k=99)) == 12


def test_a_copying_head_writes_the_token_that_it_reads() -> None:
    torch.manual_seed(0)
    block = mh.BlockConfig(31, 1, 8, head_dim=31, norm="rms", gated=False)
    model = mh.LanguageModel(mh.LanguageModelConfig(31, (block,), tied=False))
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            if parameter.ndim > 1:
                parameter.zero_()
        model.embedding.weight.copy_(torch.eye(31))
        model.head.weight.copy_(torch.eye(31))
        model.blocks[0].attention.qkv_proj.weight[62:].copy_(torch.eye(31))
        model.blocks[0].attention.out_proj.weight.copy_(torch.eye(31))
    ids = torch.tensor([4, 9, 9, 17])
    found = heads.writing(model, ids)
    assert found.top_tokens(0, 0, -1, k=1).tokens.tolist() == [9]  # seen twice
    by_key = found.key_attribution(0, 9, -1)[0, 0]
    assert by_key.argsort(descending=True)[:2].sort().values.tolist() == [1, 2]
    torch.testing.assert_close(
        found.contributions(0, -1)[0, 0], torch.full((4,), 31**0.5 / 4), rtol=1e-3, atol=0
    )


def test_post_norm_models_have_contributions_and_no_attributions() -> None:
    require("models")
    model = families.build("bert")
    found = heads.writing(model, tiny.tokens(LENGTH))
    name = "encoder.layer.1.attention.output.dense"
    [wrote], _ = written_by_attention(model, tiny.tokens(1, LENGTH), [name])
    total = found.outputs(1, slice(None)).sum(0) + found.bias(1, slice(None))
    torch.testing.assert_close(total, wrote, rtol=1e-4, atol=1e-4)
    assert found.contributions(0, -1).shape == (3, 1, LENGTH)
    with pytest.raises(mh.ModelError, match=r"not the sum of what its heads write: .*post-norm"):
        found.attribution(5, -1)


def test_post_norm_models_of_ours_are_refused_by_measurement() -> None:
    model = tiny.language_model("learned", norm_placement="post")
    found = heads.writing(model, tiny.tokens(LENGTH))
    with pytest.raises(mh.ModelError, match="it norms or scales the sum"):
        found.top_tokens(0, 0)


def test_streams_that_are_scaled_are_refused_by_measurement() -> None:
    require("models")
    import transformers

    config = transformers.GraniteConfig(
        vocab_size=101, hidden_size=42, intermediate_size=37, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, residual_multiplier=0.5, logits_scaling=3.0,
    )  # fmt: skip
    model = transformers.GraniteForCausalLM(config)
    found = heads.writing(model, tiny.tokens(LENGTH))
    with pytest.raises(mh.ModelError, match="it norms or scales the sum"):
        found.logits(0)
    config.residual_multiplier = 1.0
    found = heads.writing(transformers.GraniteForCausalLM(config), tiny.tokens(LENGTH))
    with pytest.raises(mh.ModelError, match="changes its logits behind the head"):
        found.logits(0)


def test_logits_before_a_softcap() -> None:
    model = tiny.language_model("rope", dtype=torch.float64)
    model.config = dataclasses.replace(model.config, logit_softcap=2.0)
    ids = tiny.tokens(1, LENGTH)
    found = heads.writing(model, ids)
    with torch.no_grad():
        expected = model(ids)[0]
    torch.testing.assert_close(2.0 * torch.tanh(found.logits(slice(None)) / 2.0), expected)


def test_half_precision_sums_to_its_rounding() -> None:
    model = tiny.language_model("learned", out_bias=True).bfloat16()
    found = heads.writing(model, tiny.tokens(LENGTH))
    assert 0 < found.error < 0.02
    assert found.attribution(5, ROWS).dtype == torch.float32


def test_layers_may_have_different_numbers_of_heads() -> None:
    blocks = tuple(mh.BlockConfig(24, count, 24, head_dim=6) for count in (4, 3))
    found = heads.writing(
        mh.LanguageModel(mh.LanguageModelConfig(101, blocks)), tiny.tokens(LENGTH)
    )
    assert found.heads == (4, 3)
    added = found.attribution(TOKENS, ROWS)
    assert (1, 3) not in {(layer, head) for layer, head, _ in found.strongest(5, 0, k=99)}
    assert added.shape == (2, 4, 3, 3)
    assert added[1, 3].isnan().all()
    assert added[:, :3].isfinite().all()


@pytest.mark.parametrize("centers", [False, True])
@pytest.mark.parametrize("width", [6, 7])
def test_norms_are_read_from_what_they_do(centers, width) -> None:
    torch.manual_seed(3)
    norm = (torch.nn.LayerNorm if centers else torch.nn.RMSNorm)(width).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    x = torch.randn(5, width, dtype=torch.float64)
    found = linear_norm(norm, x, norm(x), torch.float64)
    assert found.centers == centers
    parts = torch.randn(3, 5, width, dtype=torch.float64)
    parts[0] = x - parts[1:].sum(0)
    rows = torch.arange(5)
    torch.testing.assert_close(found.linear(parts, rows).sum(0) + found.bias, norm(x))
    direction = torch.randn(width, dtype=torch.float64)
    ahead = found.linear(parts[1], rows) @ direction
    torch.testing.assert_close(ahead, parts[1] @ found.backward(direction) * found.scale)


def test_what_is_no_norm_is_refused() -> None:
    x = torch.randn(5, 7)
    squash = torch.nn.Tanh()
    with pytest.raises(mh.ModelError, match="Tanh is no norm by gain, bias and centering"):
        linear_norm(squash, x, squash(x), torch.float32)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda it: it.attribution(101, 0), "tokens must be tokens from 0 to 100; got 101"),
        (lambda it: it.attribution("cat", 0), "tokens must be tokens from 0 to 100; got 'cat'"),
        (lambda it: it.attribution(TOKENS, 0, against=(1, 2)), "one for each of the 3 tokens"),
        (lambda it: it.attribution(5, LENGTH), f"rows must lie between -{LENGTH} and 22"),
        (lambda it: it.weights(0, 1.5), "rows must be integers or a slice"),
        (lambda it: it.outputs(2, 0), "layer must be from 0 to 1; got 2"),
        (lambda it: it.vocabulary(0, 6, 0), "head must be from 0 to 5 in layer 0; got 6"),
        (lambda it: it.top_tokens(0, 0, k=0), "k must be from 1 to 101"),
        (lambda it: it.top_tokens(0, 0, []), "rows must hold at least one query"),
        (lambda it: it.strongest(5, -1, k=-1), "k must be 0 or more heads; got -1"),
    ],
)
def test_what_there_is_not_is_refused(ask, message) -> None:
    found = heads.writing(ours("rope", torch.float32), tiny.tokens(LENGTH))
    with pytest.raises(mh.ArgumentError, match=message):
        ask(found)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.long), "tokens of one text"),
        (torch.zeros(0, dtype=torch.long), "tokens of one text"),
        (torch.tensor([1.0, 2.0]), "must be integers from 0 to 100"),
        ([1, 101], "must be integers from 0 to 100"),
        (torch.ones(62, dtype=torch.long), "62 tokens are needed, but the model has 61 positions"),
    ],
)
def test_texts_that_are_none_are_refused(ids, message) -> None:
    with pytest.raises(mh.ArgumentError, match=message):
        heads.writing(ours("learned", torch.float32), ids)


def test_modules_without_a_known_output_projection_are_refused() -> None:
    class Gated(mh.MultiHeadAttention):
        def _join(self, heads_bhqd):
            return super()._join(heads_bhqd * 2.0)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(31, 12), Gated(12, 3))
    with pytest.raises(mh.ModelError, match="does not pass its heads to the output projection"):
        heads.writing(model, tiny.tokens(5) % 31)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.slow
def test_smollm2_induction_heads_write_the_token_that_follows() -> None:
    require("models")
    from multihead.integrations import load_language_model

    loaded = load_language_model()
    period = 24
    once = torch.randperm(40_000, generator=torch.Generator().manual_seed(1))[:period] + 1000
    found = heads.writing(loaded.model, torch.cat([once, once]))
    assert found.error < 1e-5
    rows = torch.arange(period, 2 * period - 1)
    following, other = once[1:].tolist(), once.roll(-9)[1:].tolist()
    added = found.attribution(following, rows, against=other).diagonal(dim1=-2, dim2=-1).mean(-1)
    roles = heads.find_roles(
        loaded.model, tokenizer=loaded.tokenizer, probes=heads.Probes(64, (16, 24)), seeds=(0,)
    )
    induction = [(layer, head) for layer, head, _ in roles.having("induction")]
    assert {(17, 3), (18, 6), (23, 2)} <= set(induction)
    theirs = sum(float(added[layer, head]) for layer, head in induction)
    assert theirs > 0.3 * float(added.sum())  # a twentieth of the heads, 0.44 of what all add
    layer, head = max(induction, key=lambda place: float(added[place]))
    by_key = found.key_attribution(layer, following[5], int(rows[5]), against=other[5])[head, 0]
    assert int(by_key.argmax()) == 6  # the key that holds it, after the first copy's own
