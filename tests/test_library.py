"""The registered operator: opcheck, compile and export, masks inside and as inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import multihead as mh
from cases import CASES, Case
from multihead.ops import library
from multihead.ops.problem import describe

NAMES = {
    "plain", "causal", "window per head", "two windows", "left padding", "documents",
    "explicit positions", "all together", "alibi", "grouped with bias", "empty cache row",
    "prefix per sample", "dense over keys",
}  # fmt: skip
SOME = [case for case in CASES if case.name in NAMES]


def flat(case: Case, *, requires_grad: bool = False) -> tuple[object, ...]:
    tensors = [x.clone().requires_grad_(requires_grad) for x in case.tensors(torch.float32)]
    problem = describe(*tensors, dropout_p=0.0, stats=("lse", "argmax"), **case.options())  # type: ignore[arg-type]
    return library._flatten(problem, "auto")


@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    torch.library.opcheck(torch.ops.multihead.attend.default, flat(case))
    shape = (case.batch, case.heads, case.query_length, case.value_dim)
    given = (torch.randn(shape), torch.randn(shape[:3]), None, None)
    torch.library.opcheck(torch.ops.multihead.attend_backward.default, (*given, *flat(case)))


def test_every_case_is_compiled_whole() -> None:
    """fullgraph, forward and backward, masks made inside the graph's function and outside."""
    for case in SOME:
        torch._dynamo.reset()
        options = case.options()

        def call(query: Tensor, key: Tensor, value: Tensor, options: dict = options) -> Tensor:
            result = mh.attention_with_stats(query, key, value, stats=("entropy",), **options)
            return result.out.sum() + result.entropy.square().sum()

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        eager_leaves = [x.clone().requires_grad_() for x in case.tensors(torch.float32)]
        leaves = [x.clone().requires_grad_() for x in case.tensors(torch.float32)]
        expected, actual = call(*eager_leaves), compiled(*leaves)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        expected.backward()
        actual.backward()
        for got, want in zip(leaves, eager_leaves, strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-6, atol=1e-6)


def test_changing_lengths_share_one_graph() -> None:
    torch._dynamo.reset()
    graphs = 0

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    def call(query: Tensor, key: Tensor) -> Tensor:
        return mh.attention(query, key, key, mask=mh.Causal() & mh.Window(3))

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counting)
    for queries, keys in ((5, 9), (7, 11), (2, 6), (3, 23)):
        query, key = torch.randn(2, 3, queries, 4), torch.randn(2, 3, keys, 4)
        torch.testing.assert_close(compiled(query, key), call(query, key), rtol=0, atol=0)
    assert graphs == 1


def test_one_tensor_as_query_key_and_value_compiles_with_gradients() -> None:
    torch._dynamo.reset()

    def call(x: Tensor) -> Tensor:
        return mh.attention(x, x, x, mask=mh.Causal()).square().sum()

    x = torch.randn(2, 3, 5, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(call(x), x)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    (actual,) = torch.autograd.grad(compiled(x), x)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


class Layer(torch.nn.Module):
    """A module around the function, for export."""

    def forward(self, query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
        mask = mh.Causal() & mh.KeyPadding(visible)
        return mh.attention(query, key, key, mask=mask)


def test_export_with_a_dynamic_length() -> None:
    length = torch.export.Dim("length", min=1, max=64)

    def inputs(n: int) -> tuple[Tensor, Tensor, Tensor]:
        query, key = torch.randn(2, 3, n, 4), torch.randn(2, 3, n, 4)
        return query, key, torch.arange(n) >= torch.tensor([[1], [0]])

    shapes = ({2: length}, {2: length}, {1: length})
    program = torch.export.export(Layer(), inputs(6), dynamic_shapes=shapes)
    for n in (9, 1, 33):
        given = inputs(n)
        torch.testing.assert_close(program.module()(*given), Layer()(*given), rtol=0, atol=0)


@pytest.mark.parametrize(
    "mask", [mh.Causal(), mh.Causal() & mh.KeyPadding(torch.ones(2, 6).bool())]
)
def test_a_mask_may_be_an_input_of_export(mask: mh.Mask) -> None:
    class Masked(torch.nn.Module):
        def forward(self, query: Tensor, mask: mh.Mask) -> Tensor:
            return mh.attention(query, query, query, mask=mask)

    query = torch.randn(2, 3, 6, 4)
    program = torch.export.export(Masked(), (query, mask))
    torch.testing.assert_close(program.module()(query, mask), Masked()(query, mask))


def test_fake_and_meta_tensors_get_shapes_without_work() -> None:
    query, key = torch.empty(2, 6, 3, 4, device="meta"), torch.empty(2, 3, 5, 4, device="meta")
    value = torch.empty(2, 3, 5, 7, device="meta", dtype=torch.float32)
    result = mh.attention_with_stats(query, key, value, mask=mh.Causal(), stats=("argmax",))
    assert result.out.shape == (2, 6, 3, 7)
    assert result.argmax.dtype == torch.int64
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2, 3, 5, 4)
        assert mh.attention(fake, fake, fake).shape == (2, 3, 5, 4)


def test_fake_and_meta_tensors_get_gradients_without_work() -> None:
    query = torch.empty(2, 3, 5, 4, device="meta", requires_grad=True)
    mh.attention(query, query, query, mask=mh.Causal()).sum().backward()
    assert query.grad.is_meta
    assert query.grad.shape == query.shape
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2, 3, 5, 4, requires_grad=True)
        mh.attention(fake, fake, fake).sum().backward()
        assert fake.grad.shape == fake.shape


def test_real_tensors_under_a_fake_mode_or_a_tracer() -> None:
    """No pointer is taken while something else watches the operators."""
    query = torch.randn(1, 2, 5, 4)
    expected = mh.attention(query, query, query, mask=mh.Causal())
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert mh.attention(query, query, query).shape == query.shape

    def call(x: Tensor) -> Tensor:
        return mh.attention(x, x, x, mask=mh.Causal())

    graph = torch.fx.experimental.proxy_tensor.make_fx(call)(query)
    assert torch.equal(graph(query), expected)
    with pytest.raises(mh.BackendError, match=r"torch\.export"):
        torch.jit.trace(call, query)
