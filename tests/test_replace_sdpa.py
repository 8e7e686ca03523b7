"""replace_sdpa: torch's meanings on multihead's kernels, and ways into a model that lead astray.

`calls` counts what multihead was asked to compute: what is not in it was left to torch.
"""

import copy
import io
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import multihead as mh
from close import assert_close
from multihead.integrations import sdpa_calls


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call that multihead answers."""
    seen = []
    attention = sdpa_calls.attention

    def spy(query, key, value, **options):
        seen.append({"query": query, "key": key, "value": value, **options})
        return attention(query, key, value, **options)

    monkeypatch.setattr(sdpa_calls, "attention", spy)
    return seen


class Calls(nn.Module):
    """Gives its arguments to torch's attention."""

    def forward(self, *args, **kwargs):
        return F.scaled_dot_product_attention(*args, **kwargs)


class Layer(nn.Module):
    """Self-attention over [B, L, 21] with three heads of seven."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.projection, self.dropout = nn.Linear(21, 63), dropout

    def forward(self, x, mask=None):
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, 3, 7).transpose(1, 2)
            for part in self.projection(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(
            q, k, v, mask, dropout_p=dropout, is_causal=mask is None
        )
        return out.transpose(1, 2).reshape(batch, length, 21)


class Stack(nn.Module):
    """Two layers, each behind `wrap`."""

    def __init__(self, wrap=None, dropout=0.0):
        super().__init__()
        self.layers = nn.ModuleList([Layer(dropout), Layer(dropout)])
        self.wrap = wrap or (lambda layer, x, *others: layer(x, *others))

    def forward(self, x, mask=None):
        for layer in self.layers:
            x = x + self.wrap(layer, x, mask)
        return x


# --- torch's meanings ----------------------------------------------------------------------------

TRIANGLE = torch.ones(5, 7, dtype=torch.bool).tril()
PADDING = torch.arange(7) < torch.tensor([[7], [4]])
CASES = {
    "plain": ((2, 3), (2, 3), {}),
    "causal_from_the_top_left": ((2, 3), (2, 3), {"is_causal": True}),
    "scale": ((2, 3), (2, 3), {"scale": 0.0}),
    "bool": ((2, 3), (2, 3), {"attn_mask": TRIANGLE}),
    "bool_per_sample": ((2, 3), (2, 3), {"attn_mask": PADDING[:, None, None]}),
    "bias": ((2, 3), (2, 3), {"attn_mask": torch.randn(3, 5, 7)}),
    "bias_per_key": ((2, 3), (2, 3), {"attn_mask": torch.randn(1, 7)}),
    "float_triangle": ((2, 3), (2, 3), {"attn_mask": TRIANGLE.float().log()}),
    "no_heads": ((3,), (3,), {"attn_mask": torch.randn(3, 5, 7)}),
    "no_leading_axes": ((), (), {"is_causal": True}),
    "five_axes": ((2, 3, 5), (2, 3, 5), {"attn_mask": torch.randn(2, 1, 1, 5, 7)}),
    "broadcast_batch": ((2, 3), (1, 3), {}),
    "broadcast_heads": ((2, 3), (2, 1), {"is_causal": True}),
    "broadcast_query": ((1, 1), (2, 3), {}),
    "missing_axis": ((2, 3), (3,), {}),
    "grouped": ((2, 6), (2, 3), {"enable_gqa": True, "attn_mask": TRIANGLE}),
    "grouped_without_batch": ((6,), (2,), {"enable_gqa": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_meanings_are_torchs(calls, name):
    query_lead, key_lead, options = CASES[name]
    query = torch.randn(*query_lead, 5, 11, requires_grad=True)
    key, value = (torch.randn(*key_lead, 7, width, requires_grad=True) for width in (11, 13))
    model = Calls()
    inputs = (query, key, value)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    mask = options.get("attn_mask")
    exact_options = dict(options)
    if mask is not None and mask.is_floating_point():
        exact_options["attn_mask"] = mask.double()
    baseline, expected = model(*inputs, **options), model(*doubles, **exact_options)
    with mh.replace_sdpa(model):
        actual = model(*inputs, **options)
    assert calls
    assert_close(actual, expected, baseline)
    weight = torch.randn(expected.shape)
    exact = torch.autograd.grad(expected, doubles, weight.double())
    plain = torch.autograd.grad(baseline, inputs, weight)
    for ours, *others in zip(
        torch.autograd.grad(actual, inputs, weight), exact, plain, strict=True
    ):
        assert_close(ours, *others, factor=3.0)


def test_causal_differs_from_the_bottom_right():
    query, key = torch.randn(1, 1, 2, 3), torch.randn(1, 1, 5, 3)
    model = Calls()
    with mh.replace_sdpa(model):
        out = model(query, key, key, is_causal=True)
    assert torch.equal(out[0, 0, 0], key[0, 0, 0])


def test_a_row_of_lowest_numbers_is_a_mean(calls):
    query, key = torch.randn(1, 1, 40, 3), torch.randn(1, 1, 41, 3)
    mask = torch.zeros(40, 41)
    mask[7] = torch.finfo(torch.float32).min
    model = Calls()
    with mh.replace_sdpa(model):
        out = model(query, key, key, attn_mask=mask)
    assert calls[0]["bias"] is not None
    assert_close(out[0, 0, 7], key[0, 0].double().mean(0), key[0, 0].mean(0))


@pytest.mark.parametrize("detached", [0, 1])
def test_a_bias_detached_in_one_layer_is_trained_by_the_other_alone(calls, detached):
    class Biased(nn.Module):
        def forward(self, query, bias):
            biases = [bias, bias]
            biases[detached] = bias.detach()
            for each in biases:
                query = F.scaled_dot_product_attention(query, query, query, each)
            return query

    model, query, values = Biased(), torch.randn(1, 2, 5, 3), torch.randn(1, 2, 5, 5)
    results = []
    for dtype, replace in ((torch.float32, True), (torch.float64, False), (torch.float32, False)):
        bias = values.to(dtype, copy=True).requires_grad_()
        replacement = mh.replace_sdpa(model) if replace else None
        out = model(query.to(dtype), bias)
        if replacement is not None:
            replacement.undo()
        results.append(torch.autograd.grad(out.square().sum(), bias)[0])
    assert len(calls) == 2
    assert_close(*results, factor=3.0)


def test_heads_that_differ_are_refused_by_torch_itself():
    query, key = torch.randn(1, 6, 3, 5), torch.randn(1, 2, 3, 5)
    model = Calls()
    with mh.replace_sdpa(model), pytest.raises(RuntimeError, match="must match"):
        model(query, key, key)
    with mh.replace_sdpa(model), pytest.raises(RuntimeError, match="broadcast shape"):
        model(query, query, query, attn_mask=torch.zeros(5, 1, 3, 3))


def test_the_layout_is_torchs():
    model = Calls()
    query = torch.randn(2, 5, 3, 7).transpose(1, 2)
    expected = model(query, query, query).stride()
    with mh.replace_sdpa(model):
        assert model(query, query, query).stride() == expected


def test_autocast(calls):
    model, query = Calls(), torch.randn(2, 3, 5, 11)
    mask = torch.randn(5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        baseline = model(query, query, query, attn_mask=mask)
        with mh.replace_sdpa(model):
            actual = model(query, query, query, attn_mask=mask)
    assert calls
    assert actual.dtype == torch.bfloat16
    low, wide = query.bfloat16().double(), mask.double()
    assert_close(actual, model(low, low, low, attn_mask=wide), baseline)


# --- what is left to torch -----------------------------------------------------------------------


def test_dropout_is_torchs_own(calls):
    model, query = Calls(), torch.randn(2, 3, 5, 7)
    outs = []
    for replace in (False, True):
        torch.manual_seed(11)
        replacement = mh.replace_sdpa(model) if replace else None
        outs.append(model(query, query, query, dropout_p=0.4))
        if replacement:
            replacement.undo()
    assert torch.equal(*outs)
    assert not calls


def test_transforms_and_other_devices_are_torchs_own(calls):
    model, query = Calls(), torch.randn(2, 3, 5, 7)

    def total(query):
        return model(query, query, query).sum()

    expected = torch.func.vmap(model)(query, query, query)
    gradient = torch.func.grad(total)(query)
    with mh.replace_sdpa(model):
        assert torch.equal(torch.func.vmap(model)(query, query, query), expected)
        assert torch.equal(torch.func.grad(total)(query), gradient)
        assert model(*[query.to("meta")] * 3).is_meta
        traced = torch.jit.trace(model, (query, query, query), check_trace=False)
    assert not calls
    assert torch.equal(traced(query, query, query), model(query, query, query))


def test_weights_that_are_asked_for_are_torchs_own(calls):
    model, x = nn.MultiheadAttention(21, 3, batch_first=True), torch.randn(2, 5, 21)
    expected = model(x, x, x)
    with mh.replace_sdpa(model):
        actual = model(x, x, x)
    assert not calls
    assert all(map(torch.equal, actual, expected))


def test_a_mask_beside_the_causal_flag_is_torchs_own(calls):
    model, query = Calls(), torch.randn(2, 3, 5, 7)
    expected = model(query, query, query, PADDING[:, None, None, :5], is_causal=True)
    with mh.replace_sdpa(model):
        actual = model(query, query, query, PADDING[:, None, None, :5], is_causal=True)
    assert torch.equal(actual, expected)
    assert not calls


# --- where it holds ------------------------------------------------------------------------------


def test_it_holds_inside_the_models_own_modules_alone(calls):
    model, other, query = Calls(), Calls(), torch.randn(1, 2, 3, 5)
    with mh.replace_sdpa(model):
        other(query, query, query)
        F.scaled_dot_product_attention(query, query, query)
        assert not calls
        model(query, query, query)
        assert len(calls) == 1
    model(query, query, query)
    assert len(calls) == 1


def test_undo_may_come_twice_and_after_an_error(calls):
    model, x = Stack(), torch.randn(2, 5, 21)
    hooks = [len(module._forward_hooks) for module in model.modules()]
    replacement = mh.replace_sdpa(model)
    with pytest.raises(KeyError), replacement:
        raise KeyError
    replacement.undo()
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    model(x)
    assert not calls


def test_an_exception_in_the_middle_leaves_nothing_behind(calls):
    def fail(layer, x, mask):
        layer(x, mask)
        raise KeyError

    def refuse(module, arguments):
        raise ValueError("in a hook")

    model, x = Stack(wrap=fail), torch.randn(2, 5, 21)
    with mh.replace_sdpa(model):
        with pytest.raises(KeyError):
            model(x)
        assert not _get_current_function_mode_stack()
        model.layers[0].register_forward_pre_hook(refuse)
        with pytest.raises(ValueError, match="in a hook"):
            model(x)
        assert not _get_current_function_mode_stack()


@pytest.mark.parametrize("undone", [True, False])
def test_an_interrupt_leaves_nothing_behind(calls, undone):
    class Interrupted(Calls):
        def forward(self, *args, stop):
            if stop:
                raise KeyboardInterrupt
            return super().forward(*args)

    model, query = nn.Sequential(Calls(), Interrupted()), torch.randn(1, 2, 3, 5)
    model.forward = lambda *args, stop: model[1](model[0](*args), query, query, stop=stop)
    replacement = mh.replace_sdpa(model)
    with pytest.raises(KeyboardInterrupt):
        model(query, query, query, stop=True)
    if undone:
        replacement.undo()
        expected = 1
    else:
        model(query, query, query, stop=False)
        expected = 3
    assert not _get_current_function_mode_stack()
    F.scaled_dot_product_attention(query, query, query)
    assert len(calls) == expected


def test_modules_may_call_themselves_and_enter_modes_of_their_own(calls):
    class Twice(nn.Module):
        def forward(self, query, depth=1):
            if depth:
                with torch.device("cpu"):
                    query = self(query, depth - 1)
            return F.scaled_dot_product_attention(query, query, query)

    model, query = Twice(), torch.randn(1, 2, 3, 5)
    with mh.replace_sdpa(model), mh.replace_sdpa(nn.Sequential(model)):
        model(query)
        assert len(calls) == 2
        assert not _get_current_function_mode_stack()


def test_threads_and_copies(calls):
    model, x = Stack().eval(), torch.randn(2, 5, 21)
    with mh.replace_sdpa(model), torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(x), model(x))
        outs = []

        def run():
            with torch.no_grad():
                outs.append(model(x))

        def together(count):
            threads = [threading.Thread(target=run) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        # A new thread may have another number of threads of torch's, whose products then round
        # otherwise: one alone says what three at once must give.
        together(1)
        together(3)
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert len(calls) == 12


def test_a_replaced_model_can_be_saved():
    model = nn.TransformerEncoderLayer(6, 2, 5)
    with mh.replace_sdpa(model):
        file = io.BytesIO()
        torch.save(model, file)


def test_script_modules_stay_as_they_are(calls):
    model, x = nn.Sequential(torch.jit.script(nn.Linear(21, 21)), Layer()), torch.randn(2, 5, 21)
    expected = model(x)
    with mh.replace_sdpa(model):
        assert torch.allclose(model(x), expected, atol=1e-5)
    assert len(calls) == 1


def test_it_takes_modules():
    with pytest.raises(mh.ModelError, match="got a function"):
        mh.replace_sdpa(lambda x: x)


# --- checkpointing -------------------------------------------------------------------------------


def _checkpointed(use_reentrant, as_function):
    def wrap(layer, x, mask):
        function = (lambda x: layer.forward(x)) if as_function else layer
        return checkpoint(function, x, use_reentrant=use_reentrant)

    return wrap


@pytest.mark.parametrize("as_function", [False, True], ids=["module", "function"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointing_repeats_the_same_function(calls, dropout, use_reentrant, as_function):
    plain = Stack(dropout=dropout)
    model = Stack(wrap=_checkpointed(use_reentrant, as_function), dropout=dropout)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 21)
    gradients = []
    for each in (model, plain):
        torch.manual_seed(5)
        x.requires_grad_().grad = None
        with mh.replace_sdpa(each):
            each(x).square().sum().backward()
            assert not _get_current_function_mode_stack()
        gradients.append([x.grad, *(p.grad for p in each.parameters())])
    for ours, expected in zip(*gradients, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-5)
    if dropout:
        assert not calls
    elif not as_function:
        assert len(calls) == 2 * 2 + 2  # forward and repetition; the plain model's


# --- torch's own layers --------------------------------------------------------------------------

BLIND = torch.zeros(2, 5, dtype=torch.bool)
BLIND[1, 3:] = True
UPPER = torch.ones(5, 5, dtype=torch.bool).triu(1)
HIDDEN = torch.zeros(5, 5).masked_fill(UPPER, -torch.inf)
ENCODINGS = {
    "plain": {},
    "padded": {"src_key_padding_mask": BLIND},
    "causal": {"mask": HIDDEN, "is_causal": True},
    "causal_bool": {"mask": UPPER},
    "both": {"mask": UPPER, "src_key_padding_mask": BLIND},
    "added": {"mask": torch.randn(5, 5)},
}


def _encoder(batch_first=True):
    layer = nn.TransformerEncoderLayer(24, 4, 29, batch_first=batch_first, dropout=0.0)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_encoder(calls, name, training):
    model, options = _encoder().train(training), ENCODINGS[name]
    x = torch.randn(2, 5, 24)
    exact = copy.deepcopy(model).double()
    wide = {
        key: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for key, value in options.items()
    }
    with torch.set_grad_enabled(training):
        # torch's path for inference takes an added mask for a bool one, and returns NaN.
        torch.backends.mha.set_fastpath_enabled(False)
        baseline, expected = model(x, **options), exact(x.double(), **wide)
        torch.backends.mha.set_fastpath_enabled(True)
        with mh.replace_sdpa(model):
            actual = model(x, **options)
    assert len(calls) == 2
    if name == "padded":  # never written out for each head and query
        assert isinstance(calls[0]["mask"], mh.KeyPadding)
    real = ~BLIND if "src_key_padding_mask" in options else torch.ones_like(BLIND)
    assert_close(actual[real], expected[real], baseline[real])


def test_decoder_and_unbatched_and_extra_keys(calls):
    decoder = nn.TransformerDecoderLayer(24, 4, 29, dropout=0.0)
    x, memory = torch.randn(5, 2, 24), torch.randn(7, 2, 24)
    attend = nn.MultiheadAttention(24, 4, add_bias_kv=True, add_zero_attn=True, kdim=11, vdim=13)
    key, value = torch.randn(7, 11), torch.randn(7, 13)
    models = (
        (decoder, (x, memory), {"tgt_mask": HIDDEN, "tgt_is_causal": True}),
        (decoder, (x[:, 0], memory[:, 0]), {"memory_key_padding_mask": torch.arange(7) > 4}),
        (
            attend,
            (x[:, 0], key, value),
            {"need_weights": False, "key_padding_mask": torch.arange(7) > 4},
        ),
    )
    for model, inputs, options in models:
        exact = copy.deepcopy(model).double()
        doubles = [tensor.double() for tensor in inputs]
        wide = {k: v.double() if v is HIDDEN else v for k, v in options.items()}
        results = [model(*inputs, **options), exact(*doubles, **wide)]
        calls.clear()
        with mh.replace_sdpa(model):
            results.insert(0, model(*inputs, **options))
        assert calls
        actual, baseline, expected = (
            result[0] if isinstance(result, tuple) else result for result in results
        )
        assert_close(actual, expected, baseline)


def test_a_causal_hint_without_a_mask_is_refused_by_torch_itself():
    model, x = nn.MultiheadAttention(24, 4, batch_first=True), torch.randn(2, 5, 24)
    hinted = {"need_weights": False, "is_causal": True}
    for options in (hinted, hinted | {"key_padding_mask": BLIND}):
        with mh.replace_sdpa(model), pytest.raises(RuntimeError, match="Need attn_mask"):
            model(x, x, x, **options)


def test_padding_with_dropout_goes_to_torch_whole(calls):
    model, x = nn.MultiheadAttention(24, 4, dropout=0.3, batch_first=True), torch.randn(2, 5, 24)
    outs = []
    for replace in (False, True):
        replacement = mh.replace_sdpa(model) if replace else None
        torch.manual_seed(3)
        outs.append(model(x, x, x, key_padding_mask=BLIND, need_weights=False)[0])
    replacement.undo()
    assert torch.equal(*outs)
    assert not calls


# --- compiling -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_in_one_graph_at_any_length():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    model = Stack().eval()
    with mh.replace_sdpa(model), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=count)
        for length in (5, 7, 11):
            x = torch.randn(2, length, 21)
            assert_close(compiled(x), copy.deepcopy(model).double()(x.double()), model(x))
    assert len(graphs) == 1
    assert graphs[0].count("torch.ops.multihead.attend") == 2
    assert "scaled_dot_product_attention" not in graphs[0]


@pytest.mark.slow
def test_a_compiled_part_of_an_eager_model(calls):
    model, x = Stack().eval(), torch.randn(2, 5, 21)
    expected = model(x)
    model.layers[0] = torch.compile(model.layers[0], fullgraph=True, backend="eager")
    with mh.replace_sdpa(model), torch.no_grad():
        for _ in range(2):
            assert torch.allclose(model(x), expected, atol=1e-5)
    assert len(calls) == 4  # those of the graph, too, which repeats what the test notes


@pytest.mark.slow
def test_exported_at_any_length():
    model, length = Stack().eval(), torch.export.Dim("length", min=1, max=50)
    x = torch.randn(2, 5, 21)
    with mh.replace_sdpa(model), torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes={"x": {1: length}})
        nodes = [str(node.target) for node in program.graph.nodes]
        assert nodes.count("multihead.attend.default") == 2
        for size in (1, 5, 11):
            x = torch.randn(2, size, 21)
            assert torch.equal(program.module()(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded", "causal"])
def test_compiled_encoder(name):
    model, x, options = _encoder().eval(), torch.randn(2, 5, 24), ENCODINGS[name]
    real = ~BLIND if name == "padded" else torch.ones_like(BLIND)
    with mh.replace_sdpa(model), torch.no_grad():
        expected = model(x, **options)
        graphs = []
        compiled = torch.compile(
            model, fullgraph=True, backend=lambda graph, _: graphs.append(graph.code) or graph
        )
        assert torch.allclose(compiled(x, **options)[real], expected[real], atol=1e-5)
    assert graphs[0].count("multihead.attend") == 2
