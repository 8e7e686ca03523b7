"""`multihead.prepack`: packed weights give the plain layer's results, whatever happens to them."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import multihead as mh
from close import assert_close
from multihead.nn import packed_linear
from multihead.nn.packed_linear import PackedLinear, Rows
from multihead.nn.prepack import PROBES, Gain, Plan, Shape
from requires import require

IN, OUT = 43, 29
prepack = importlib.import_module("multihead.nn.prepack")  # the function has its name
DTYPES = [
    dtype
    for dtype in packed_linear.DTYPES
    if packed_linear.unpackable(nn.Parameter(torch.zeros(1, 1, dtype=dtype))) is None
]

pytestmark = pytest.mark.skipif(not DTYPES, reason="torch is built without oneDNN")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing measured by one test decides in another."""
    monkeypatch.setattr(prepack, "_measured", {})


def everything(model: nn.Module) -> Plan:
    """A plan that packs every layer for any number of rows."""
    return {
        Shape.of(m): Rows(1)
        for m in model.modules()
        if packed_linear.packed_class(type(m)) is not None
    }


def linear(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(IN, OUT, bias=bias, dtype=dtype)


def packed(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> PackedLinear:
    layer = linear(dtype, bias=bias)
    mh.prepack(layer, plan=everything(layer))
    assert isinstance(layer, PackedLinear)
    return layer


def rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, IN, generator=torch.Generator().manual_seed(count)).to(dtype)


class Products:
    """Counts the calls of oneDNN's product."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        original = torch.ops.mkldnn._linear_pointwise

        def count(*args: Any) -> Tensor:
            self.calls += 1
            return original(*args)

        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", count)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    return Products(monkeypatch)


def assert_right(layer: nn.Linear, x: Tensor, *, what: str = "product") -> None:
    """The layer's result is that of its present weight, in float64.

    Held to what torch makes of these rows among others: of few it makes other products.
    """
    with torch.no_grad():
        weight, bias = layer.weight, layer.bias
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        among_others = F.linear(torch.stack([x] * 16), weight, bias)[0]
        assert_close(layer(x), expected, among_others, what=what)


# --- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_gives_the_plain_result(
    dtype: torch.dtype, bias: bool, products: Products
) -> None:
    layer = packed(dtype, bias=bias)
    whole = rows(2 * 3 * 35, dtype).reshape(2, 3, 35, IN)
    inputs = {
        "four dimensions": whole,
        "one row": whole[0, 0, 0],
        "every other row": whole[0, 0, ::2],
        "transposed": rows(IN, dtype)[:, :IN].t(),
        "columns of a wider one": torch.randn(7, IN + 4).to(dtype)[:, 2:-2],
        "repeated": whole[0, 0, :1].expand(5, IN),
        "negated lazily": torch.randn(7, IN, dtype=torch.complex64).conj().imag.to(dtype),
    }
    for count, (name, x) in enumerate(inputs.items(), 1):
        assert_right(layer, x, what=name)
        assert products.calls == count
    with torch.no_grad():
        assert layer(whole[:, :0]).shape == (2, 0, 35, OUT)


def test_what_is_not_a_number_spreads_as_in_the_plain_layer() -> None:
    layer, plain = packed(), linear()
    x = rows(6)
    x[0, 3], x[1, 5], x[2, 7] = torch.nan, torch.inf, -torch.inf
    with torch.no_grad():
        out, expected = layer(x), plain(x)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    assert torch.equal(out[3:].isfinite(), torch.ones(3, OUT, dtype=torch.bool))


def test_only_the_chosen_numbers_of_rows_are_packed(products: Products) -> None:
    layer = linear()
    mh.prepack(layer, plan={Shape.of(layer): Rows(4, 6)})
    served = []
    for count in range(1, 9):
        before = products.calls
        assert_right(layer, rows(count))
        served += [count] * (products.calls - before)
    assert served == [4, 5, 6]


def test_threads_share_a_layer() -> None:
    layer = packed()
    x = rows(5)
    with torch.no_grad():
        expected = layer(x)
        layer.weight.add_(0)  # all threads meet a weight that is to be packed anew
    found: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            found.extend(layer(x) for _ in range(20))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(torch.equal(out, expected) for out in found)


# --- weights that change -------------------------------------------------------------------------


def _add_in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.add_(1)


def _add_in_inference_mode(layer: nn.Linear) -> None:
    with torch.inference_mode():
        layer.weight.add_(1)


def _step(layer: nn.Linear) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer(rows(3)).square().sum().backward()
    optimizer.step()


def _set_data(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 2


def _merge_past_the_counter(layer: nn.Linear) -> None:
    """As adapters are merged: torch's version counter does not move."""
    torch.manual_seed(5)
    version = layer.weight._version
    layer.weight.data += torch.randn(OUT, 2) @ torch.randn(2, IN)
    assert layer.weight._version == version


def _write_through_numpy(layer: nn.Linear) -> None:
    layer.weight.detach().numpy()[:] *= 3


def _scale_a_block_past_the_counter(layer: nn.Linear) -> None:
    layer.weight.data[: OUT // 2].mul_(2)


def _new_parameter(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn(OUT, IN))


def _new_parameter_on_the_same_memory(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.data)
    with torch.no_grad():
        for _ in range(layer.weight._version, 3):
            layer.weight[1, 1] += 1


def _load(layer: nn.Linear) -> None:
    layer.load_state_dict({"weight": torch.randn(OUT, IN), "bias": torch.randn(OUT)})


def _assign(layer: nn.Linear) -> None:
    state = {"weight": torch.randn(OUT, IN), "bias": torch.randn(OUT)}
    layer.load_state_dict(state, assign=True)


def _fewer_rows(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach()[:7].clone())
    layer.bias = nn.Parameter(layer.bias.detach()[:7].clone())


def _transposed_in_place(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.flatten().as_strided((OUT, IN), (1, OUT))


def _bias(layer: nn.Linear) -> None:
    layer.bias.data += 1


def _no_bias(layer: nn.Linear) -> None:
    layer.bias = None


CHANGES: list[Callable[[nn.Linear], None]] = [
    _add_in_place,
    _add_in_inference_mode,
    _step,
    _set_data,
    _merge_past_the_counter,
    _write_through_numpy,
    _scale_a_block_past_the_counter,
    _new_parameter,
    _new_parameter_on_the_same_memory,
    _load,
    _assign,
    _fewer_rows,
    _transposed_in_place,
    _bias,
    _no_bias,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_changed_weight_is_never_answered_with_the_old_one(
    change: Callable[[nn.Linear], None],
) -> None:
    layer, x = packed(), rows(5)
    assert_right(layer, x)
    change(layer)
    assert_right(layer, x, what="after the change")
    assert_right(layer, x, what="once more")


def test_a_changed_weight_is_packed_anew(products: Products) -> None:
    layer, x = packed(), rows(5)
    _add_in_place(layer)
    assert_right(layer, x)
    assert products.calls == 1


def test_conversions(products: Products) -> None:
    layer, x = packed(), rows(5)
    for dtype in (torch.float64, *DTYPES, torch.float32):
        before = products.calls
        layer.to(dtype)
        assert layer.packed_bytes == 0, "no copy of memory that is gone"
        assert_right(layer, x.to(dtype), what=str(dtype))
        assert products.calls - before == (dtype in DTYPES)
    layer.to("meta")
    assert layer(x.to("meta")).shape == (5, OUT)


def test_converted_by_swapping() -> None:
    layer, x = packed(), rows(5)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.double()
        assert_right(layer, x.double())
        layer.float()
        assert_right(layer, x)
        _load(layer)
        assert_right(layer, x)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_tied_weights_change_together() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(OUT, IN), nn.Linear(IN, OUT, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    model = Tied()
    mh.prepack(model, plan=everything(model))
    ids = torch.arange(5)
    with torch.no_grad():
        model(ids)
        model.embed.weight.mul_(2)
        assert model.head.weight is model.embed.weight
        assert_right(model.head, model.embed(ids))


# --- what must see the plain product -------------------------------------------------------------


def test_gradients_are_those_of_the_plain_layer(products: Products) -> None:
    layer, plain = packed(), linear()
    x = rows(5).requires_grad_()
    found = torch.autograd.grad(layer(x).square().sum(), (x, layer.weight, layer.bias))
    expected = torch.autograd.grad(plain(x).square().sum(), (x, plain.weight, plain.bias))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    layer.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad is not None
    assert products.calls == 0
    layer(rows(5))
    assert products.calls == 1, "nothing to differentiate, though gradients are enabled"


class _Doubled(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = function(*args, **(kwargs or {}))
        return 2 * out if function is F.linear else out


def test_modes_see_the_linear_function(products: Products) -> None:
    layer, x = packed(), rows(5)
    with torch.no_grad():
        plain = F.linear(x, layer.weight, layer.bias)
        with _Doubled():
            assert torch.equal(layer(x), 2 * plain)
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert counter.get_total_flops() == 2 * 5 * IN * OUT
        assert products.calls == 0


@pytest.mark.parametrize(
    "context",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.backends.mkldnn.flags(enabled=False),
    ],
    ids=["autocast", "without oneDNN"],
)
def test_settings_are_kept(
    context: Callable[[], AbstractContextManager[Any]], products: Products
) -> None:
    layer, plain, x = packed(), linear(), rows(5)
    with torch.no_grad(), context():
        out, expected = layer(x), plain(x)
    assert out.dtype == expected.dtype
    assert torch.equal(out, expected)
    assert products.calls == 0


def test_transforms(products: Products) -> None:
    layer, plain, x = packed(), linear(), rows(5)
    for transform in (torch.func.vmap, torch.func.jacrev, torch.func.jacfwd):
        assert torch.equal(transform(layer)(x), transform(plain)(x))
    with torch.no_grad():
        _, tangent = torch.func.jvp(layer, (x,), (x,))
        _, expected = torch.func.jvp(plain, (x,), (x,))
        assert torch.equal(tangent, expected)
        state = {"weight": torch.randn(OUT, IN), "bias": torch.randn(OUT)}
        called = torch.func.functional_call(layer, state, (x,))
        assert torch.equal(called, F.linear(x, **state))
    assert products.calls == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compile_and_export(products: Products) -> None:
    layer, x = packed(), rows(5)
    with torch.no_grad():
        expected = F.linear(x, layer.weight, layer.bias)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), expected)
        exported = torch.export.export(layer, (x,)).module()
        assert torch.equal(exported(x), expected)
        assert torch.equal(torch.fx.symbolic_trace(layer)(x), expected)
        assert torch.equal(torch.jit.trace(layer, (x,))(x), expected)
        assert torch.equal(torch.jit.script(layer)(x), expected)
    assert products.calls <= 1  # torch.jit.trace compares with an ordinary call


def test_tensors_of_another_kind(products: Products) -> None:
    class Tagged(Tensor):
        pass

    layer, plain, x = packed(), linear(), rows(5)
    with torch.no_grad():
        out = layer(x.as_subclass(Tagged))
        assert type(out) is Tagged
        assert torch.equal(out.as_subclass(Tensor), plain(x))
        assert torch.equal(layer(x.to_sparse()), plain(x.to_sparse()))
        for wrong in (rows(5)[:, :-1], rows(5, torch.float64), torch.tensor(1.0)):
            with pytest.raises(RuntimeError) as ours:
                layer(wrong)
            with pytest.raises(RuntimeError) as theirs:
                plain(wrong)
            assert str(ours.value) == str(theirs.value)
    assert products.calls == 0


# --- what others do to a module ------------------------------------------------------------------


def test_state_and_parameters_are_untouched() -> None:
    layer, plain = packed(), linear()
    assert list(layer.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert type(layer.weight) is nn.Parameter
    assert not list(layer.buffers())
    assert "packed for 1 rows or more" in repr(layer)


def test_hooks_fire_once() -> None:
    layer, seen = packed(), []
    layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
    layer.register_forward_hook(lambda module, args, out: seen.append("after"))
    with torch.no_grad():
        layer(rows(5))
    assert seen == ["before", "after"]


def _pickled(layer: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(layer))


def _saved(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, _pickled, _saved])
def test_copies_are_plain_layers(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(packed())
    other = copied(model) if copied is not copy.copy else nn.Sequential(copy.copy(model[0]))
    assert type(other[0]) is nn.Linear
    assert vars(other[0]).keys() == vars(linear()).keys()
    assert_right(other[0], rows(5))
    assert isinstance(model[0], PackedLinear)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: parametrizations.weight_norm(layer),
        lambda layer: parametrizations.orthogonal(layer),
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
        lambda layer: prune.random_unstructured(layer, "bias", amount=0.5),
        lambda layer: torch.nn.utils.spectral_norm(layer).eval(),
    ],
    ids=["weight norm", "orthogonal", "pruned", "pruned bias", "spectral norm"],
)
def test_a_weight_that_is_computed(change: Callable[[nn.Linear], object]) -> None:
    layer, plain, x = packed(), linear(), rows(5)
    torch.manual_seed(1)
    change(layer)
    torch.manual_seed(1)
    change(plain)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(layer(x), plain(x))
        for parameter in (*layer.parameters(), *plain.parameters()):
            parameter.mul_(1.5)
        assert torch.equal(layer(x), plain(x))
    mh.unpack(layer)
    with torch.no_grad():
        assert torch.equal(layer(x), plain(x))


def test_a_parametrization_comes_and_goes() -> None:
    layer = packed()
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    copied = copy.deepcopy(layer)
    assert_right(copied, rows(5))
    mh.unpack(layer)
    parametrize.remove_parametrizations(layer, "weight")
    assert_right(layer, rows(5))
    mh.unpack(layer)
    assert type(layer) is nn.Linear
    assert vars(layer).keys() == vars(linear()).keys()


# --- prepack and unpack --------------------------------------------------------------------------


class _Sub(nn.Linear):
    pass


def test_what_cannot_be_packed_is_left_with_a_reason() -> None:
    with torch.inference_mode():
        timeless = linear()
    replaced = linear()
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.ModuleDict(
        {
            "sub": _Sub(IN, OUT),
            "attention": nn.MultiheadAttention(4, 2),
            "wide": linear(torch.float64),
            "meta": linear().to("meta"),
            "timeless": timeless,
            "computed": parametrizations.weight_norm(linear()),
            "pruned": prune.l1_unstructured(linear(), "weight", amount=0.5),
            "replaced": replaced,
            "ours": packed(),
            "convolution": nn.Conv1d(1, 1, 1),
        }
    )
    classes = {name: type(module) for name, module in model.items()}
    found = mh.prepack(model)
    assert {name: type(module) for name, module in model.items()} == classes
    assert found.left.keys() == set(model) - {"attention", "convolution"} | {"attention.out_proj"}
    assert "_Sub" in found.left["sub"]
    assert "float64" in found.left["wide"]
    assert "meta" in found.left["meta"]
    assert "inference mode" in found.left["timeless"]
    assert "packed already" in found.left["ours"]
    assert all(reason in str(found) for reason in found.left.values())
    assert "Nothing packed" in str(found)
    assert found.nbytes == 0


def _timed(monkeypatch: pytest.MonkeyPatch, gains: dict[int, Gain]) -> None:
    monkeypatch.setattr(prepack, "_measure", lambda shape, layers: dict(gains))


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ({1: 0.9, 4: 1.5, 16: 1.4, 64: 1.05, 512: 1.2, 2048: 1.0}, Rows(4, 512)),
        ({1: 0.9, 4: 1.5, 16: 1.4, 64: 0.9, 512: 2.0, 2048: 2.0}, Rows(4, 16)),
        ({1: 1.0, 4: 1.0, 16: 2.0, 64: 2.0, 512: 2.0, 2048: 2.0}, Rows(16)),
        ({1: 1.2}, None),
        ({1: 1.2, 4: 1.1, 16: 1.09}, Rows(1, 4)),
        ({1: 1.09, 4: 1.09}, None),
        ({}, None),
    ],
)
def test_rows_are_chosen_by_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, speeds: dict[int, float], expected: Rows | None
) -> None:
    _timed(monkeypatch, {count: Gain(speed, 1.9) for count, speed in speeds.items()})
    model = nn.Sequential(linear(), linear())
    found = mh.prepack(model)
    (choice,) = found.choices
    assert choice.rows == expected
    assert [count for count in PROBES if found.serves(count)] == [
        count for count in PROBES if expected is not None and count in expected
    ]
    assert choice.layers == 2
    for layer in model:
        assert type(layer) is (nn.Linear if expected is None else PackedLinear)
        assert_right(layer, rows(5))
    for count, speed in speeds.items():
        assert f"{speed:.2f}x at {count}" in str(found)


def test_speed_does_not_pay_for_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = {1: 0.9, 4: 1.5, 16: 1.5, 64: 1.5, 512: 1.5}
    errors = {1: 1.0, 4: 2.1, 16: 1.0, 64: 1.0, 512: float("nan")}
    _timed(monkeypatch, {count: Gain(speed[count], errors[count]) for count in speed})
    found = mh.prepack(linear())
    assert found.choices[0].rows == Rows(16, 64)
    assert "1.50x with 2.1x the error at 4, 1.50x at 16" in str(found)


def test_a_real_measurement_packs_or_says_that_nothing_gains() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)).eval()
    x = torch.randn(37, 64)
    state = torch.random.get_rng_state()
    found = mh.prepack(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    for choice in found.choices:
        assert choice.gains.keys() == set(PROBES)
        assert all(gain.speed > 0 for gain in choice.gains.values())
        assert all(0 < gain.error < 10 for gain in choice.gains.values())
        assert choice.rows == prepack._worth(choice.gains)
        assert (choice.nbytes > 0) == (choice.rows is not None)
    for layer in model:
        if isinstance(layer, nn.Linear):
            assert isinstance(layer, PackedLinear) == (found.plan[Shape.of(layer)] is not None)
    plain = copy.deepcopy(model)
    again = mh.prepack(plain)
    assert again.plan == found.plan, "measured once in a process"
    with torch.no_grad():
        assert torch.equal(plain(x), model(x))


def test_a_product_that_is_wrong_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda *args: original(*args) * 1.001
    )
    found = mh.prepack(layer := linear())
    assert type(layer) is nn.Linear
    assert "Nothing packed" in str(found)
    assert all(gain.error > 100 for gain in found.choices[0].gains.values())


def test_a_plan_is_kept_to_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepack, "_measure", lambda *_: pytest.fail("measured"))
    first, second = linear(), nn.Linear(IN + 1, OUT)
    model = nn.Sequential(first, second)
    found = mh.prepack(model, plan={Shape.of(first): Rows(2, 9)})
    assert isinstance(first, PackedLinear)
    assert type(second) is nn.Linear
    assert pickle.loads(pickle.dumps(found.plan)) == found.plan


def test_unpacking() -> None:
    model = nn.Sequential(linear(), nn.Sequential(linear(torch.float64)), linear())
    before = [vars(m).keys() for m in model.modules()]
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    with mh.prepack(model, plan=everything(model)) as found:
        assert isinstance(model[0], PackedLinear)
        assert found.nbytes == model[0].packed_bytes + model[2].packed_bytes
        assert found.nbytes >= 2 * model[0].weight.nbytes
        assert "2 of 3 linear layers packed" in str(found)
    for _ in range(2):
        assert [vars(m).keys() for m in model.modules()] == before
        assert not any(isinstance(m, PackedLinear) for m in model.modules())
        assert all(
            a is b.weight
            for a, b in zip(
                weights, (m for m in model.modules() if isinstance(m, nn.Linear)), strict=True
            )
        )
        mh.prepack(model, plan=everything(model))
        mh.unpack(model)


def test_leaving_the_block_unpacks_only_what_it_packed() -> None:
    outer, inner = linear(), linear()
    mh.prepack(outer, plan=everything(outer))
    model = nn.Sequential(outer, inner)
    with pytest.raises(ZeroDivisionError), mh.prepack(model, plan=everything(model)):
        raise ZeroDivisionError
    assert isinstance(outer, PackedLinear)
    assert type(inner) is nn.Linear


def test_only_modules_are_packed() -> None:
    with pytest.raises(mh.DtypeError, match="Module; got Tensor"):
        mh.prepack(torch.zeros(2))  # type: ignore[arg-type]


def test_our_layer_is_packed(products: Products) -> None:
    layer = mh.MultiHeadAttention(33, 3, qkv_bias=True).eval()
    x = torch.randn(2, 7, 33)
    with torch.no_grad():
        expected = layer(x)
        mh.prepack(layer, plan=everything(layer))
        found = layer(x)
    assert products.calls == 2
    torch.testing.assert_close(found, expected)


def test_a_transposed_weight(products: Products) -> None:
    require("models")
    conv1d = importlib.import_module("transformers.pytorch_utils").Conv1D
    torch.manual_seed(1)
    model = nn.Sequential(conv1d(OUT, IN))
    plain, x = copy.deepcopy(model), rows(6).reshape(2, 3, IN)
    found = mh.prepack(model, plan=everything(model))
    assert "float32 43 to 29, kept transposed, 1 layer: packed" in str(found)
    for change in (lambda weight: None, lambda weight: weight.mul_(2)):
        with torch.no_grad():
            change(model[0].weight)
            change(plain[0].weight)
            baseline = plain(x.repeat(4, 1, 1))[:2]  # of few rows torch makes another product
            assert_close(model(x), copy.deepcopy(plain).double()(x.double()), baseline)
    assert products.calls == 2
    model(x).sum().backward()
    assert model[0].weight.grad is not None
    for other in (copy.deepcopy(model), _pickled(model)):
        assert type(other[0]) is conv1d
        assert torch.equal(other(x), plain(x))
    mh.unpack(model)
    assert type(model[0]) is conv1d
    assert vars(model[0]).keys() == vars(plain[0]).keys()


def test_a_real_measurement_of_transposed_weights() -> None:
    require("models")
    transformers = importlib.import_module("transformers")
    sizes = {"n_embd": 48, "n_head": 3, "n_layer": 2, "vocab_size": 101, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    ids = torch.randint(3, 101, (2, 17))
    with torch.no_grad():
        expected = model(ids).logits
        found = mh.prepack(model)
        assert {choice.shape.transposed for choice in found.choices} == {True, False}
        mh.prepack(model, plan=everything(model))
        torch.testing.assert_close(model(ids).logits, expected)
