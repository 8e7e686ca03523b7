"""The transformers integration: masks, silent defaults, setting and restoring."""

import copy
import sys

import pytest
import torch

from close import assert_close
from families import VOCABULARY, Float64Throughout, build, output, padded, trio
from multihead.errors import BackendError, MaskError, MissingExtraError, ModelError
from multihead.masks import Dense, Intersection

transformers = pytest.importorskip(
    "transformers", reason="the extra 'transformers' is not installed"
)
from transformers import masking_utils as hf  # noqa: E402

from multihead.integrations.hf_masks import mask_forward  # noqa: E402
from multihead.integrations.transformers import NAME, register, use, using  # noqa: E402

IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [3, 4, 5, 6, 7, 0, 0]])


def _packed(rule):
    """What transformers builds when positions restart."""
    return hf.and_masks(
        hf.remap_positions_for_packed_sequence(rule, POSITIONS),
        hf.packed_sequence_mask_function(IDS),
    )


def _odd_keys(batch, head, query, key):
    return (key % 2 == 1) | (query == key)


KNOWN = {
    "causal": hf.causal_mask_function,
    "bidirectional": hf.bidirectional_mask_function,
    "window": hf.sliding_window_causal_mask_function(3),
    "two_sided": hf.sliding_window_bidirectional_mask_function(2),
    "joined": hf.and_masks(hf.causal_mask_function, hf.sliding_window_overlay(4)),
}
PACKED = {
    "packed": _packed(hf.causal_mask_function),
    "packed_window": _packed(hf.sliding_window_causal_mask_function(2)),
}
UNKNOWN = {
    "either": hf.or_masks(hf.causal_mask_function, _odd_keys),
    "both": hf.and_masks(hf.causal_mask_function, _odd_keys),
    "no_window": hf.sliding_window_causal_mask_function(0),  # Qwen2-MoE's, which no layer reads
    "chunked": hf.chunked_causal_mask_function(3, torch.tensor([0, 2])),
    "blocks": hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(IDS)),
    "positions_alone": hf.remap_positions_for_packed_sequence(hf.causal_mask_function, POSITIONS),
    "positions_of_others": hf.and_masks(
        hf.remap_positions_for_packed_sequence(hf.causal_mask_function, POSITIONS.flip(0)),
        hf.packed_sequence_mask_function(IDS),
    ),
}
FRAMES = ((7, 7, 0, 0), (3, 7, 4, 0), (2, 11, 5, 0), (3, 5, 6, 4), (1, 7, 6, 0))


def _compare(function, q_length, kv_length, q_offset, kv_offset, padding=None, q_tensor=False):
    call = dict(batch_size=2, q_length=q_length, kv_length=kv_length, kv_offset=kv_offset)
    call |= dict(mask_function=function, attention_mask=padding)
    expected = hf.sdpa_mask(**call, q_offset=q_offset, allow_is_causal_skip=False)
    offset = torch.tensor(q_offset) if q_tensor else q_offset
    prepared = mask_forward(**call, q_offset=offset)
    assert prepared.shape == (2, 1, q_length, kv_length)
    visible = prepared.mask.to_dense(q_length, kv_length).expand(expected.shape)
    assert torch.equal(visible, expected)
    masks = prepared.mask.masks if isinstance(prepared.mask, Intersection) else (prepared.mask,)
    return any(isinstance(mask, Dense) for mask in masks)


@pytest.mark.parametrize("q_tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize("padded_side", [None, "left", "right", "short"])
@pytest.mark.parametrize("frame", FRAMES, ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_known_mask_functions_become_rules(name, frame, padded_side, q_tensor):
    total = frame[1] + frame[3]
    padding = None
    if padded_side == "short":  # a cache of fixed size, not yet full
        padding = torch.ones(2, total - 1, dtype=torch.bool)
        padding[1, :2] = False
    elif padded_side:
        padding = padded((total, total - 2), padded_side)[1].bool()
    assert not _compare(KNOWN[name], *frame, padding, q_tensor)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_become_documents(name):
    assert not _compare(PACKED[name], 7, 7, 0, 0)


@pytest.mark.parametrize("name", UNKNOWN)
def test_any_other_mask_function_is_evaluated(name):
    padding = padded((7, 5), "left")[1].bool()
    assert _compare(UNKNOWN[name], 7, 7, 0, 0)
    assert _compare(UNKNOWN[name], 7, 7, 0, 0, padding)


def test_a_prepared_mask_comes_back_as_it_is():
    prepared = mask_forward(2, 3, 5, q_offset=2)
    assert prepared.ndim == 4
    assert mask_forward(2, 3, 5, attention_mask=prepared) is prepared


def test_a_model_that_reads_its_mask_is_told_the_other_way():
    prepared = mask_forward(2, 3, 5, q_offset=2)
    assert not hasattr(prepared, "dtype")
    with pytest.raises(AttributeError, match="'dtype' of its attention mask"):
        _ = prepared.dtype
    with pytest.raises(ModelError, match=r"a part of its attention mask.*eager"):
        _ = prepared[:, 0]
    assert copy.copy(prepared).shape == (2, 1, 3, 5)


def test_padding_that_hides_nothing_is_left_out():
    ones = torch.ones(2, 5, dtype=torch.bool)
    assert "KeyPadding" not in repr(mask_forward(2, 5, 5, attention_mask=ones).mask)


# --- case A17: defaults that change numbers without a word ---------------------------------------


def _logits(model, **inputs):
    return output(model, **inputs)[0]


@pytest.mark.parametrize("declares", [True, False])
def test_cross_attention_without_a_mask_sees_every_key(declares):
    from transformers.models.bart.modeling_bart import BartAttention

    register()
    config = build("bart").config
    layer = BartAttention(33, 3, is_causal=False, config=config).eval()
    if not declares:
        del layer.is_causal
    query, context = torch.randn(2, 3, 33), torch.randn(2, 5, 33)
    outputs = []
    for name in ("multihead", "eager"):
        config._attn_implementation = name
        outputs.append(_logits(layer, hidden_states=query, key_value_states=context))
    layer, query, context = layer.double(), query.double(), context.double()
    expected = _logits(layer, hidden_states=query, key_value_states=context)
    assert_close(outputs[0], expected, outputs[1])


def test_a_scale_of_the_layers_own_is_read():
    ids = torch.randint(3, VOCABULARY, (1, 7))
    logits = []
    for scaled in (True, False):
        ours, baseline, expected = trio("gpt2", scale_attn_by_inverse_layer_idx=scaled)
        outs = [_logits(model, input_ids=ids) for model in (ours, expected, baseline)]
        assert_close(*outs)
        logits.append(outs[0])
    assert not torch.allclose(*logits, atol=1e-2)


def test_packed_documents_do_not_see_one_another():
    ours, baseline, expected = trio("llama")
    ids = torch.randint(3, VOCABULARY, (1, 5))
    inputs = {"position_ids": torch.tensor([[0, 1, 2, 0, 1]]), "use_cache": False}
    for mask in (None, torch.ones(1, 5, dtype=torch.long)):
        outputs = [
            _logits(model, input_ids=ids, attention_mask=mask, **inputs)
            for model in (ours, expected, baseline)
        ]
        assert_close(*outputs, what=f"attention_mask {mask}")
    changed = ids.clone()
    changed[0, 1] = 99
    before, after = (_logits(ours, input_ids=x, **inputs)[0, 3:] for x in (ids, changed))
    assert torch.equal(before, after)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_oss", "bert", "bart"])
def test_output_attentions(family):
    ours, baseline, expected = trio(family)
    baseline.set_attn_implementation("eager")
    ids, mask = padded((7, 5), "right")
    inputs = {"input_ids": ids, "attention_mask": mask, "output_attentions": True}
    if family == "bart":
        inputs["decoder_input_ids"] = ids[:, :3]
    outputs = [output(model, **inputs) for model in (ours, expected, baseline)]
    kinds = ["attentions"]
    if family == "bart":
        kinds = ["encoder_attentions", "decoder_attentions", "cross_attentions"]
    for kind in kinds:
        layers = [output[kind] for output in outputs]
        assert len(layers[0]) == 2
        for layer in zip(*layers, strict=True):
            assert layer[0].shape == layer[1].shape
            assert_close(*layer, what=kind)


def test_a_mask_of_the_users_own():
    ours, baseline, expected = trio("llama")
    ids = torch.randint(3, VOCABULARY, (2, 7))
    visible = torch.rand(2, 1, 7, 7) < 0.5
    visible |= torch.eye(7, dtype=torch.bool)
    lowest = torch.finfo(torch.float32).min
    as_float = torch.zeros(2, 1, 7, 7).masked_fill(~visible, lowest)
    reference = _logits(expected, input_ids=ids, attention_mask=as_float.double())
    for mask in (visible, as_float):
        outputs = [_logits(m, input_ids=ids, attention_mask=mask) for m in (ours, baseline)]
        assert_close(outputs[0], reference, outputs[1])
    with pytest.raises(MaskError, match="attention_mask must be bool"):
        _logits(ours, input_ids=ids, attention_mask=visible.long())


def test_a_mask_function_of_the_users_own():
    config = build("llama").config
    register()
    config._attn_implementation = NAME
    prepared = hf.create_causal_mask(
        config,
        torch.zeros(2, 7, 42),
        None,
        None,
        or_mask_function=_odd_keys,
    )
    expected = hf.sdpa_mask(2, 7, 7, mask_function=UNKNOWN["either"], allow_is_causal_skip=False)
    assert torch.equal(prepared.mask.to_dense(7, 7), expected)


def test_a_layer_by_itself_is_causal_if_it_says_so():
    model = build("llama")
    layer, states = model.model.layers[0].self_attn, torch.randn(1, 7, 42)
    rotation = model.model.rotary_emb(states, torch.arange(7)[None])
    outputs = {}
    register()
    for name in (NAME, "sdpa"):
        model.config._attn_implementation = name
        outputs[name] = _logits(
            layer, hidden_states=states, position_embeddings=rotation, attention_mask=None
        )
    changed = states.clone()
    changed[0, 6] += 1
    model.config._attn_implementation = NAME
    later = _logits(layer, hidden_states=changed, position_embeddings=rotation, attention_mask=None)
    assert torch.equal(outputs[NAME][0, :6], later[0, :6])
    assert not torch.equal(outputs[NAME][0, 6], later[0, 6])


# --- refusals ------------------------------------------------------------------------------------


def test_dropout_in_training_drops_weights_from_torchs_generator():
    model = build("llama", attention_dropout=0.5)
    use(model)
    ids = torch.randint(3, VOCABULARY, (1, 5))
    kept = _logits(model, input_ids=ids)
    model.train()
    torch.manual_seed(3)
    first = _logits(model, input_ids=ids)
    second = _logits(model, input_ids=ids)
    torch.manual_seed(3)
    assert torch.equal(_logits(model, input_ids=ids), first)
    assert not torch.equal(second, first)
    assert not torch.equal(first, kept)
    assert torch.equal(_logits(model.eval(), input_ids=ids), kept)


def test_training_without_dropout_gives_eager_gradients():
    ours, baseline, expected = trio("gpt_oss")
    ids, mask = padded((7, 5), "left")
    gradients = []
    for model in (ours, expected, baseline):
        with Float64Throughout():
            logits = model.train()(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        logits.logsumexp(-1).sum().backward()
        layer = model.model.layers[0].self_attn
        gradients.append([layer.sinks.grad, layer.q_proj.weight.grad, layer.v_proj.weight.grad])
    for actual, exact, plain in zip(*gradients, strict=True):
        assert_close(actual, exact, plain, factor=3.0)


def test_arguments_that_are_not_read_are_refused():
    from multihead.integrations.transformers import attention_forward

    tensor = torch.randn(1, 2, 3, 4)
    with pytest.raises(BackendError, match="'indices'"):
        attention_forward(torch.nn.Identity(), tensor, tensor, tensor, None, indices=torch.zeros(1))


def test_an_old_transformers_is_refused(monkeypatch):
    from multihead.integrations.extras import import_extra

    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.3.1")
    with pytest.raises(MissingExtraError, match=r"5\.4 or newer; 5\.3\.1"):
        import_extra("transformers.masking_utils")


def test_models_without_the_interface_are_refused():
    with pytest.raises(ModelError, match="Linear is not a transformers model"):
        use(torch.nn.Linear(2, 3))
    config = transformers.BloomConfig(hidden_size=24, n_head=3, n_layer=1, vocab_size=11)
    model = transformers.BloomForCausalLM(config)
    with pytest.raises(ModelError, match="BloomForCausalLM computes attention in its own"):
        use(model)


# --- setting and restoring -----------------------------------------------------------------------


def test_use_returns_what_the_model_was_set_to():
    model = build("llama")
    assert use(model) == "eager"
    assert model.config._attn_implementation == NAME
    assert use(model) == NAME


def test_using_restores_after_an_error():
    model = build("t5")  # its two stacks carry copies of the config

    def fail():
        with using(model):
            assert model.encoder.config._attn_implementation == NAME
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    for part in (model, model.encoder, model.decoder):
        assert part.config._attn_implementation == "eager"


def test_using_restores_parts_that_differ():
    text = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1, "vocab_size": 11}
    vision = text | {"image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision)
    model = transformers.CLIPModel(config)
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    with using(model):
        assert model.text_model.config._attn_implementation == NAME
    assert model.config.text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "sdpa"


# --- graphs: no window and no packed row becomes a table there -----------------------------------


def _attend_arguments(graph):
    """What each call of attention in a graph is given, by name."""
    schema = [it.name for it in torch.ops.multihead.attend.default._schema.arguments]
    calls = [node for node in graph.graph.nodes if "multihead.attend" in str(node.target)]
    return [dict(zip(schema, node.args, strict=True)) for node in calls]


@pytest.mark.slow
def test_compiled_in_one_graph():
    model = build("mistral", num_hidden_layers=1)
    use(model)
    graphs = []
    compiled = torch.compile(
        model,
        fullgraph=True,
        dynamic=True,
        backend=lambda graph, _: graphs.append(graph) or graph,
    )
    with torch.no_grad():
        for second in (4, 2):
            positions = torch.tensor([[*range(7), *range(second)]])
            ids = torch.randint(3, VOCABULARY, (1, 7 + second))
            inputs = {"input_ids": ids, "position_ids": positions}
            outs = [_logits(it, **inputs, use_cache=False) for it in (compiled, model)]
            assert torch.equal(*outs)
    assert len(graphs) == 1
    (call,) = _attend_arguments(graphs[0])
    assert (call["dense"], call["left"], call["right"]) == (None, 4, 0)
    assert call["query_ids"] is not None


WINDOWED = "create_sliding_window_causal_mask"
MASKS_IN_A_GRAPH = {
    "packed": ("create_causal_mask", {"position_ids": POSITIONS}),
    "packed_window": (WINDOWED, {"position_ids": POSITIONS}),
    "padded_window": (WINDOWED, {"attention_mask": padded((7, 5), "left")[1]}),
    "two_sided": ("create_bidirectional_sliding_window_mask", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS_IN_A_GRAPH)
def test_known_mask_functions_become_rules_in_a_graph(name):
    function, arguments = MASKS_IN_A_GRAPH[name]
    create = getattr(hf, function)
    found = []

    def visible(states, **arguments):
        mask = create(config, states, **({"attention_mask": None, "cache": None} | arguments)).mask
        found[:] = [type(part) for part in mask.masks]
        return mask.to_dense(7, 7).expand(2, 1, 7, 7)

    config = build("mistral", sliding_window=3).config
    register()
    config._attn_implementation = NAME
    states = torch.zeros(2, 7, 42)
    expected = visible(states, **arguments)
    found.clear()
    compiled = torch.compile(visible, fullgraph=True, backend="eager")
    assert torch.equal(compiled(states, **arguments), expected)
    assert found
    assert Dense not in found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both", "chunked", "positions_alone", "positions_of_others"])
def test_any_other_mask_function_is_evaluated_in_a_graph(name):
    def visible(ids):
        function = (
            UNKNOWN[name]
            if name != "positions_of_others"
            else hf.and_masks(
                hf.remap_positions_for_packed_sequence(hf.causal_mask_function, ids),
                hf.packed_sequence_mask_function(ids.flip(0)),
            )
        )
        return mask_forward(2, 7, 7, mask_function=function).mask.to_dense(7, 7).expand(2, 1, 7, 7)

    compiled = torch.compile(visible, fullgraph=True, backend="eager")
    assert torch.equal(compiled(POSITIONS), visible(POSITIONS))


@pytest.mark.slow
def test_exported_at_any_length():
    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = build("mistral")
            use(self.model)

        def forward(self, ids, mask):
            return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    model, length = Logits(), torch.export.Dim("length", min=1, max=61)
    ids, mask = padded((6, 4), "left")
    with torch.no_grad():
        shapes = ({1: length}, {1: length})
        program = torch.export.export(model, (ids, mask), dynamic_shapes=shapes, strict=False)
        for call in _attend_arguments(program.graph_module):
            assert call["dense"] is None
            assert call["left"] == 4
        for size in (1, 6, 13):
            ids, mask = padded((size, max(1, size - 3)), "left")
            assert torch.equal(program.module()(ids, mask), model(ids, mask))
