"""The native kernel that turns lanes: in every instruction set, and under the sanitizers."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from close import assert_close
from requires import require


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [(2, 2), (6, 6), (13, 8), (34, 34), (64, 64), (300, 290)])
def test_the_kernel_in_every_set(
    width: tuple[int, int], dtype: torch.dtype, instruction_set: str
) -> None:
    """Against the same sums in torch, which autograd records."""
    head_dim, rotary_dim = width
    x = torch.randn(2, 5, 3, head_dim).transpose(1, 2).to(dtype)
    apart = torch.randn(2, 3, 5, 2 * head_dim).to(dtype)[..., 1::2]
    rope = mh.RoPE(rotary_dim=rotary_dim)
    for positions in (torch.arange(5), torch.arange(10).view(2, 5) * 7):
        rotation = rope.rotation(positions, head_dim)
        for tensor in (x, x[:, :, ::1].flip(2), apart, x[:1, :1].expand(2, 3, 5, head_dim)):
            got = rotation.apply(tensor)
            plain = rotation.apply(tensor.clone().requires_grad_()).detach()
            exact = rotation.apply(tensor.double())
            assert got.dtype == dtype
            assert_close(got, exact, plain)
            assert torch.equal(got[..., rotary_dim:], tensor[..., rotary_dim:])


def test_the_kernel_gives_the_same_bits_for_any_number_of_threads() -> None:
    require("native")
    x = torch.randn(3, 7, 301, 70)
    rotation = mh.RoPE(rotary_dim=66).rotation(torch.arange(301), 70)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            found.append(rotation.apply(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])
