"""Values of another width than keys, and whose width sets the scale.

Users of several kernels met refusals, a query gradient cut off at the narrower width, and a scale
taken from a padded head, from the values or from the packed projection.
"""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from serving import BACKENDS, FLOATS, assert_call, assert_gradients, draw, draw_qkv, require_serving

WIDTHS = [
    (8, 16), (16, 8), (192, 128), (128, 192), (576, 512), (80, 80), (3, 5), (5, 3), (1, 1), (1, 65),
    (65, 1), (15, 17), (17, 15), (31, 33), (64, 96), (96, 64), (288, 288),
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_any_pair_of_widths(widths: tuple[int, int], backend: str, dtype: torch.dtype) -> None:
    require_serving(backend, dtype)
    for queries, keys in ((5, 5), (1, 70), (70, 70)):
        tensors = draw_qkv((1, 4, queries, widths[0]), (1, 2, keys, widths[0]), widths[1],
            dtype=dtype)  # fmt: skip
        result = assert_call(tensors, backend, mask=mh.Causal())
        assert result.out.shape == (1, 4, queries, widths[1])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_gradients_of_any_pair_of_widths(widths: tuple[int, int], dtype: torch.dtype) -> None:
    tensors = draw_qkv((1, 4, 5, widths[0]), (1, 2, 70, widths[0]), widths[1], dtype=dtype)
    assert_gradients(tensors, mask=mh.Causal())
    query, key, value = (x.double().requires_grad_() for x in tensors)
    grads = torch.autograd.grad(mh.attention(query, key, value).square().sum(), (query, key, value))
    for grad in grads:  # no lane is forgotten
        assert bool((grad.abs().sum((0, 1, 2)) > 0).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("widths", [(8, 16), (16, 8), (3, 5), (80, 80), (192, 128)], ids=str)
def test_the_scale_is_that_of_the_query_width(
    widths: tuple[int, int], backend: str, dtype: torch.dtype
) -> None:
    require_serving(backend, dtype)
    head_dim, value_dim = widths
    tensors = draw_qkv((1, 2, 7, head_dim), (1, 2, 11, head_dim), value_dim, dtype=dtype)
    default = assert_call(tensors, backend)
    explicit = assert_call(tensors, backend, scale=head_dim**-0.5)
    assert torch.equal(default.out, explicit.out)
    for scale in (0.0, 1.0, -0.3, 7.5, value_dim**-0.5 if head_dim != value_dim else 0.7):
        given = assert_call(tensors, backend, scale=scale)
        assert not torch.equal(given.out, default.out)
    # A head that is a slice of a wider one, as of a packed projection, keeps its own width.
    padded = [torch.nn.functional.pad(x, (0, 13), value=torch.nan) for x in tensors]
    query, key, value = (wide[..., :-13] for wide in padded)
    assert_call([query, key, value], backend)
    # Zeros beside the width change the scale alone.
    query, key = (torch.nn.functional.pad(x, (0, 13)) for x in tensors[:2])
    wider = mh.attention(query, key, tensors[2], scale=head_dim**-0.5, backend=backend)
    torch.testing.assert_close(wider, default.out, rtol=0, atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("widths", [(8, 16), (16, 8), (3, 5), (1, 1)], ids=str)
def test_pieces_of_the_matrix_use_the_same_scale(widths: tuple[int, int]) -> None:
    tensors = draw_qkv((1, 2, 7, widths[0]), (1, 2, 11, widths[0]), widths[1])
    result = mh.attention_with_stats(*tensors)
    expected = torch.softmax(tensors[0] @ tensors[1].mT / widths[0] ** 0.5, -1)
    weights = result.weights(slice(None), slice(None))
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights @ tensors[2], result.out, rtol=0, atol=1e-6)


@pytest.mark.parametrize("widths", [(8, 16), (16, 8), (3, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_a_layer_with_values_of_another_width(cross: bool, widths: tuple[int, int]) -> None:
    head_dim, value_dim = widths
    layer = mh.MultiHeadAttention(
        12, 4, num_kv_heads=2, head_dim=head_dim, value_dim=value_dim,
        context_dim=9 if cross else None,
    )  # fmt: skip
    x = draw(2, 7, 12, seed=1).requires_grad_()
    context = draw(2, 11, 9, seed=2).requires_grad_() if cross else None
    out = layer(x, context)
    assert out.shape == x.shape
    layer.scale = head_dim**-0.5
    assert torch.equal(layer(x, context), out)
    layer.scale = 2 * head_dim**-0.5
    assert not torch.equal(layer(x, context), out)
    out.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert bool((parameter.grad.abs().sum(-1) > 0).all()), name
