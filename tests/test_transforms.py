"""Second derivatives, forward mode and torch.func: as the definition has them, whoever serves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import multihead as mh
from cases import CASES, Case
from checks import leaves_and_loss

STATS = ("lse", "entropy", "max_logit")


def curvature(case: Case, backend: str) -> list[Tensor]:
    """The first derivatives of a case, as autograd records them, and derivatives of their sum."""
    leaves, loss = leaves_and_loss(case, torch.float64, backend, STATS)
    inputs = list(leaves.values())
    first = torch.autograd.grad(loss, inputs, create_graph=True, allow_unused=True)
    draw = torch.Generator().manual_seed(12)
    weighed = torch.zeros((), dtype=torch.float64, requires_grad=True).sum()
    for grad in first:
        if grad is not None:
            weight = torch.randn(grad.shape, generator=draw, dtype=torch.float64)
            weighed = weighed + (grad * weight).sum()
    second = torch.autograd.grad(weighed, inputs, allow_unused=True)
    both = zip((*first, *second), (*inputs, *inputs), strict=True)
    return [torch.zeros_like(leaf) if it is None else it.detach() for it, leaf in both]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_second_derivatives(case: Case) -> None:
    for found, expected in zip(curvature(case, "auto"), curvature(case, "reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_second_derivatives_of_finite_differences() -> None:
    inputs = doubles((1, 4, 3, 2), (1, 2, 4, 2), (1, 2, 4, 3), (4,))

    def call(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        result = mh.attention_with_stats(
            query, key, value, mask=mh.Causal(), sinks=sinks, softcap=1.5, stats=("lse", "entropy")
        )
        return result.out, result.lse, result.entropy

    assert torch.autograd.gradgradcheck(call, inputs)
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, check_batched_grad=True)


def test_inputs_made_of_one_another_are_charged_once() -> None:
    (x,) = doubles((1, 2, 5, 4))

    def loss(x: Tensor, backend: str) -> Tensor:
        return mh.attention(x, 2 * x, x, mask=mh.Causal(), backend=backend).square().sum()

    for backend in ("auto", "chunked"):
        for order in (1, 2):
            grads = []
            for name in (backend, "reference"):
                grad = loss(x, name)
                for _ in range(order):
                    (grad,) = torch.autograd.grad(grad.sum(), x, create_graph=True)
                grads.append(grad)
            torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_a_gradient_penalty_trains() -> None:
    layer = mh.MultiHeadAttention(12, 3, num_kv_heads=1, qkv_bias=True).double()
    x = torch.randn(2, 6, 12, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x, mask=mh.Causal()).sum(), x, create_graph=True)
    grad.square().sum().backward()
    given = layer.qkv_proj.weight.grad
    assert given is not None

    def penalty(weight: Tensor) -> Tensor:
        def out(x: Tensor) -> Tensor:
            changed = {"qkv_proj.weight": weight}
            return torch.func.functional_call(layer, changed, (x,), {"mask": mh.Causal()}).sum()

        return torch.func.grad(out)(x.detach()).square().sum()

    weight = layer.qkv_proj.weight.detach()
    torch.testing.assert_close(given, torch.func.grad(penalty)(weight), rtol=1e-9, atol=1e-12)
    step = torch.randn_like(weight) * 1e-6
    change = (penalty(weight + step) - penalty(weight - step)) / 2
    torch.testing.assert_close((given * step).sum(), change, rtol=1e-5, atol=1e-12)


def test_gradients_of_each_sample_by_vmap() -> None:
    layer = mh.MultiHeadAttention(12, 3, rope=mh.RoPE(4))
    x = torch.randn(5, 7, 12)
    parameters = dict(layer.named_parameters())

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        out = torch.func.functional_call(
            layer, parameters, (row[None],), {"mask": mh.SlidingWindow(3)}
        )
        return out.square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for sample in range(5):
        grads = torch.autograd.grad(loss(parameters, x[sample]), list(parameters.values()))
        for name, grad in zip(parameters, grads, strict=True):
            torch.testing.assert_close(each[name][sample], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.jvp(f, (x,), (x.flip(-1),))[1],
        lambda f, x: torch.func.vjp(f, x)[1](f(x).flip(-1))[0],
        lambda f, x: torch.func.jacrev(f)(x),
        lambda f, x: torch.func.jacfwd(f)(x),
        lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x),
        lambda f, x: torch.func.vmap(lambda row: f(row[None])[0])(x),
        lambda f, x: torch.autograd.functional.hvp(lambda x: f(x).square().sum(), x, x)[1],
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
    ],
    ids=["jvp", "vjp", "jacrev", "jacfwd", "hessian", "vmap", "hvp", "jacobian"],
)
def test_transforms_are_those_of_the_definition(
    transform: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
) -> None:
    x = torch.randn(2, 2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def call(backend: str) -> Callable[[Tensor], Tensor]:
        mask = mh.Causal() & mh.Window(2)
        return lambda x: mh.attention(x, x.roll(1), x, mask=mask, backend=backend)

    found, expected = (transform(call(name), x) for name in ("auto", "reference"))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def squares(x: Tensor) -> Tensor:
    return mh.attention(x, 2 * x, x.sin(), mask=mh.Causal()).square().sum()


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.jvp(function, (x,), (x.flip(-1),))[1]


def steepness(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: torch.func.grad(function)(x).square().sum())(x)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("transform", [slope, steepness])
def test_compiled_transforms_are_those_of_eager(
    transform: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor], backend: str
) -> None:
    torch._dynamo.reset()
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    expected = transform(squares, x)
    assert expected.abs().amax() > 0.1
    compiled = torch.compile(lambda x: transform(squares, x), backend=backend)
    torch.testing.assert_close(compiled(x), expected, rtol=1e-10, atol=1e-12)
    if backend == "eager":  # of what is compiled otherwise, functorch sees nothing
        around = transform(torch.compile(squares, backend=backend), x)
        torch.testing.assert_close(around, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_a_compiled_call_keeps_its_operator() -> None:
    torch._dynamo.reset()
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    (x,) = doubles((1, 2, 5, 4))
    torch.compile(squares, backend=keep, fullgraph=True)(x)
    parts = [it for it in graphs[0].modules() if isinstance(it, torch.fx.GraphModule)]
    nodes = [node.target for part in parts for node in part.graph.nodes]
    assert torch.ops.multihead.attend in nodes


def test_an_autocast_region_rounds_no_derivative() -> None:
    x = torch.randn(1, 2, 9, 8, requires_grad=True)
    y = x.detach().double().requires_grad_()
    out = mh.attention(x, x, x)
    with torch.autocast("cpu", torch.bfloat16):
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    (exact,) = torch.autograd.grad(mh.attention(y, y, y).square().sum(), y, create_graph=True)
    torch.testing.assert_close(first.double(), exact, rtol=1e-4, atol=1e-4)
    (exact,) = torch.autograd.grad(exact.square().sum(), y)
    torch.testing.assert_close(second.double(), exact, rtol=1e-3, atol=1e-3)


def test_a_named_backend_says_who_has_transforms() -> None:
    (x,) = doubles((1, 2, 3, 4))
    for backend in (
        ("chunked", "native") if mh.explain(x, x, x).backend == "native" else ["chunked"]
    ):

        def call(x: Tensor, backend: str = backend) -> Tensor:
            return mh.attention(x, x, x, backend=backend).sum()

        with pytest.raises(mh.BackendError, match='backend="reference"'):
            torch.func.grad(call)(x.detach())

    def explained(x: Tensor) -> Tensor:
        assert mh.explain(x, x, x).backend == "reference"
        return x.sum()

    torch.func.grad(explained)(x.detach())


def doubles(*shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [
        torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in shapes
    ]
