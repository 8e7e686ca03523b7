"""MultiHeadAttention against torch.nn.MultiheadAttention and against the formula in float64."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from close import assert_close
from layers import by_formula

BATCH, LENGTH, CONTEXT, HEADS, WIDTH = 2, 13, 7, 4, 20


def torch_module(**options: object) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **options).eval()
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)  # torch starts them at zero, which would hide a lost bias
    return module


def run_torch(
    module: nn.MultiheadAttention, x: Tensor, context: Tensor, **options: object
) -> Tensor:
    out, _ = module(x, context, context, need_weights=False, **options)
    return out


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["self", "causal", "padded", "cross", "cross of another width"])
def test_equals_torch(kind: str, bias: bool) -> None:
    context_width = 12 if kind == "cross of another width" else WIDTH
    cross = kind.startswith("cross")
    options = {"kdim": 12, "vdim": 12} if context_width != WIDTH else {}
    module = torch_module(bias=bias, **options)
    layer = mh.MultiHeadAttention.from_torch(module, cross=cross)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    context = torch.randn(BATCH, CONTEXT, context_width) if cross else x

    mask, hidden = None, {}
    if kind == "causal":
        mask = mh.Causal()
        hidden = {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)}
    elif kind == "padded":
        visible = torch.arange(LENGTH) >= torch.tensor([[0], [5]])
        mask, hidden = mh.KeyPadding(visible), {"key_padding_mask": ~visible}

    actual = layer(x, context, mask=mask) if cross else layer(x, mask=mask)
    expected = run_torch(copy.deepcopy(module).double(), x.double(), context.double(), **hidden)
    assert_close(actual, expected, run_torch(module, x, context, **hidden), what=kind)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_grouped_queries_equal_the_formula(kv_heads: int, cross: bool) -> None:
    layer = mh.MultiHeadAttention(
        WIDTH,
        6,
        num_kv_heads=kv_heads,
        head_dim=5,
        value_dim=3,
        context_dim=11 if cross else None,
        scale=0.7,
    )
    x = torch.randn(BATCH, LENGTH, WIDTH)
    context = torch.randn(BATCH, CONTEXT, 11) if cross else None
    expected = by_formula(layer, x.double(), None if context is None else context.double())
    assert_close(layer(x, context), expected, by_formula(layer, x, context))


def test_grouped_queries_equal_repeated_kv_heads() -> None:
    grouped = mh.MultiHeadAttention(WIDTH, 4, num_kv_heads=2, qkv_bias=True).double()
    whole = mh.MultiHeadAttention(WIDTH, 4, qkv_bias=True).double()
    with torch.no_grad():
        for source, target in (
            (grouped.qkv_proj.weight, whole.qkv_proj.weight),
            (grouped.qkv_proj.bias, whole.qkv_proj.bias),
        ):
            q, k, v = source.split((4 * 5, 2 * 5, 2 * 5))
            k, v = (
                part.unflatten(0, (2, 5)).repeat_interleave(2, dim=0).flatten(0, 1)
                for part in (k, v)
            )
            target.copy_(torch.cat((q, k, v)))
        whole.out_proj.load_state_dict(grouped.out_proj.state_dict())
        x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
        assert_close(grouped(x), whole(x), by_formula(grouped, x))


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 12, 24])
def test_parameters_do_not_depend_on_the_number_of_heads(heads: int) -> None:
    layer = mh.MultiHeadAttention(24, heads)
    assert sum(p.numel() for p in layer.parameters()) == 4 * 24**2


def test_mask_bias_and_scale_reach_the_heads() -> None:
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    layer = mh.MultiHeadAttention(WIDTH, HEADS).double()
    visible = torch.rand(LENGTH, LENGTH) > 0.4
    hide = torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(~visible, -torch.inf)
    plain = layer(x)
    assert_close(layer(x, mask=visible), layer(x, bias=hide), plain)
    assert not torch.allclose(layer(x, mask=visible), plain)
    layer.scale = 0.0
    assert not torch.allclose(layer(x), plain)


@pytest.mark.parametrize("context_dim", [None, 11])
def test_every_submodule_is_called_once(context_dim: int | None) -> None:
    layer = mh.MultiHeadAttention(WIDTH, HEADS, context_dim=context_dim)
    calls: list[str] = []
    for name, part in layer.named_children():
        part.register_forward_hook(lambda *_, name=name: calls.append(name))
    context = None if context_dim is None else torch.randn(BATCH, CONTEXT, 11)
    layer(torch.randn(BATCH, LENGTH, WIDTH), context)
    assert sorted(calls) == sorted(name for name, _ in layer.named_children())


def test_modes_agree() -> None:
    layer = mh.MultiHeadAttention(WIDTH, HEADS)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    expected = by_formula(layer, x.double())
    for training, grad in itertools.product((True, False), (True, False)):
        layer.train(training)
        with torch.set_grad_enabled(grad):
            out = layer(x)
        assert out.requires_grad is grad
        assert_close(out.detach(), expected, by_formula(layer, x), what=f"{training=} {grad=}")
    with torch.inference_mode():
        assert_close(layer(x), expected, by_formula(layer, x), what="inference mode")


def test_state_dict_round_trip() -> None:
    for options in ({}, {"context_dim": 11, "qkv_bias": True, "out_bias": True}):
        layer = mh.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, **options)
        other = mh.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2, **options)
        other.load_state_dict(layer.state_dict(), strict=True)
        x = torch.randn(BATCH, LENGTH, WIDTH)
        context = torch.randn(BATCH, CONTEXT, 11) if options else None
        assert torch.equal(layer(x, context), other(x, context))


def test_gradients_equal_those_of_torch() -> None:
    module = torch_module()
    layer = mh.MultiHeadAttention.from_torch(module)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    weight = torch.randn(BATCH, LENGTH, WIDTH)

    def gradients(model: nn.Module, run, dtype: torch.dtype) -> list[Tensor]:
        model = copy.deepcopy(model).to(dtype)
        inputs = x.to(dtype, copy=True).requires_grad_()
        (run(model, inputs) * weight.to(dtype)).sum().backward()
        return [inputs.grad, *(p.grad for p in model.parameters())]

    def by_torch(model: nn.MultiheadAttention, inputs: Tensor) -> Tensor:
        return run_torch(model, inputs, inputs)

    names = ("x", "qkv", "qkv bias", "out", "out bias")
    ours = gradients(layer, lambda m, i: m(i), torch.float32)
    expected = gradients(module, by_torch, torch.float64)
    baseline = gradients(module, by_torch, torch.float32)
    for name, actual, exact, theirs in zip(names, ours, expected, baseline, strict=True):
        assert_close(actual, exact, theirs, factor=3.0, what=name)


def test_statistics_come_with_the_same_output() -> None:
    layer = mh.MultiHeadAttention(WIDTH, HEADS)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    out, heads = layer.forward_with_stats(x, mask=mh.Causal(), stats=("entropy", "argmax"))
    assert torch.equal(out, layer(x, mask=mh.Causal()))
    assert heads.entropy.shape == heads.argmax.shape == (BATCH, HEADS, LENGTH)
    assert heads.argmax.dtype == torch.int64
    assert (heads.argmax <= torch.arange(LENGTH)).all()
    assert heads.entropy[..., 0].abs().max() == 0  # the first query sees one key


def test_converting_keeps_dtype_mode_and_weights_apart() -> None:
    module = torch_module().double()
    layer = mh.MultiHeadAttention.from_torch(module)
    assert layer.qkv_proj.weight.dtype == torch.float64
    assert not layer.training
    before = layer.qkv_proj.weight.clone()
    with torch.no_grad():
        module.in_proj_weight.zero_()
    assert torch.equal(layer.qkv_proj.weight, before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"add_bias_kv": True}, "add_bias_kv"),
        ({"add_zero_attn": True}, "add_zero_attn"),
        ({"kdim": 11, "vdim": 12}, "kdim=11 and values of width vdim=12"),
    ],
)
def test_what_has_no_counterpart_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(mh.ArgumentError, match=message):
        mh.MultiHeadAttention.from_torch(torch_module(**options))


def test_dropout_of_attention_weights_is_taken_over() -> None:
    layer = mh.MultiHeadAttention.from_torch(torch_module(dropout=0.5).train())
    x = torch.randn(BATCH, LENGTH, WIDTH)
    assert layer.training
    torch.manual_seed(3)
    first, second = layer(x), layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(layer.forward_with_stats(x)[0], first)
    layer.eval()
    assert_close(layer(x), by_formula(layer, x.double()), by_formula(layer, x))


def test_only_the_right_module_is_converted() -> None:
    with pytest.raises(mh.DtypeError, match="got Linear"):
        mh.MultiHeadAttention.from_torch(nn.Linear(3, 3))
    with pytest.raises(mh.ArgumentError, match="kdim=12"):
        mh.MultiHeadAttention.from_torch(torch_module(kdim=12, vdim=12), cross=False)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"embed_dim": 10, "num_heads": 4}, "embed_dim=10, num_heads=4.*head_dim="),
        ({"embed_dim": 12, "num_heads": 4, "num_kv_heads": 3}, "num_heads=4, num_kv_heads=3"),
        ({"embed_dim": 12, "num_heads": 0}, "num_heads must be at least 1; got 0"),
        ({"embed_dim": 12, "num_heads": 4, "value_dim": -2}, "value_dim must be .* got -2"),
        ({"embed_dim": 12, "num_heads": 4, "context_dim": 0}, "context_dim must be .* got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(mh.ArgumentError, match=message):
        mh.MultiHeadAttention(**sizes)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"embed_dim": 512.0},
            mh.DtypeError,
            r"embed_dim must be an integer; got 512\.0\. Write 512",
        ),
        ({"num_heads": "a"}, mh.DtypeError, "num_heads must be an integer; got 'a'"),
        ({"num_kv_heads": 1.5}, mh.DtypeError, r"num_kv_heads must be an integer; got 1\.5\.$"),
        ({"head_dim": 3.0}, mh.DtypeError, "head_dim must be an integer"),
        ({"value_dim": "3"}, mh.DtypeError, "value_dim must be an integer"),
        ({"context_dim": [3]}, mh.DtypeError, "context_dim must be an integer"),
        ({"scale": "x"}, mh.DtypeError, "scale must be a number; got 'x'"),
        ({"scale": float("nan")}, mh.ArgumentError, "scale must be finite; got nan"),
        ({"scale": float("inf")}, mh.ArgumentError, "scale must be finite; got inf"),
    ],
)
def test_what_is_no_size_or_scale_is_refused(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mh.MultiHeadAttention(**{"embed_dim": 12, "num_heads": 4, **options})


def test_inputs_that_do_not_fit_are_refused() -> None:
    layer = mh.MultiHeadAttention(WIDTH, HEADS)
    cross = mh.MultiHeadAttention(WIDTH, HEADS, context_dim=11)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with pytest.raises(mh.ArgumentError, match=r"x\[None\]"):
        layer(x[0])
    with pytest.raises(mh.DtypeError, match=r"got ndarray\. Write torch\.as_tensor\(x\)"):
        layer(x.numpy())
    with pytest.raises(mh.ArgumentError, match=r"embed_dim=20.*\[2, 13, 11\]"):
        layer(torch.randn(BATCH, LENGTH, 11))
    with pytest.raises(mh.ArgumentError, match="context_dim=20"):
        layer(x, x)
    with pytest.raises(mh.ArgumentError, match="context is missing"):
        cross(x)
    with pytest.raises(mh.ArgumentError, match="context_dim=11"):
        cross(x, x)
    with pytest.raises(mh.ArgumentError, match="got 2 and 3"):
        cross(x, torch.randn(3, CONTEXT, 11))


def test_print_shows_the_sizes() -> None:
    shown = repr(mh.MultiHeadAttention(WIDTH, 4, num_kv_heads=2, value_dim=3, context_dim=11))
    for part in ("embed_dim=20", "num_kv_heads=2", "head_dim=5", "value_dim=3", "context_dim=11"):
        assert part in shown


def test_a_mask_of_one_row_a_sample_names_key_padding() -> None:
    layer = mh.MultiHeadAttention(WIDTH, HEADS)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    visible = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    with pytest.raises(mh.MaskError, match=r"got \[1, 1, 2, 13\]\. One row .*KeyPadding\(mask\)"):
        layer(x, mask=visible)
    with pytest.raises(mh.MaskError, match=r"got \[1, 1, 2, 7\]\.$"):
        layer(x, mask=visible[:, :7])
