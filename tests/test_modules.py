"""What holds for any good module: hooks, adapters, pruning, copies, and modes that agree."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import multihead as mh
from close import assert_close
from layers import by_formula, orders, reordered, worst

BATCH, LENGTH, CONTEXT, WIDTH = 2, 13, 7, 12
LAYERS: dict[str, dict[str, object]] = {
    "one head": {"num_heads": 1},
    "three heads, biases": {"num_heads": 3, "qkv_bias": True, "out_bias": True},
    "four heads": {"num_heads": 4},
    "heads that do not fill the width": {"num_heads": 4, "head_dim": 5},
    "grouped, other values": {"num_heads": 4, "num_kv_heads": 2, "value_dim": 7},
    "everything": {
        "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "out_bias": True, "scale": 0.6,
        "qk_norm": partial(nn.RMSNorm, eps=1e-5), "window": 5, "softcap": 2.0, "sinks": True,
    },
    "cross": {"num_heads": 3, "context_dim": 12},
    "cross of another width": {"num_heads": 4, "context_dim": 5, "qkv_bias": True},
}  # fmt: skip


def build(name: str) -> mh.MultiHeadAttention:
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(WIDTH, **LAYERS[name])
    for parameter in layer.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=0.5)
    return layer


def inputs_of(layer: mh.MultiHeadAttention, batch: int = BATCH) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(batch, LENGTH, WIDTH, generator=draw)
    if layer.context_dim is None:
        return (x,)
    return x, torch.randn(batch, CONTEXT, layer.context_dim, generator=draw)


def projections(layer: mh.MultiHeadAttention) -> list[str]:
    return [name for name, part in layer.named_modules() if isinstance(part, nn.Linear)]


def in_every_mode(layer: nn.Module) -> Iterator[str]:
    """Train and eval, each recorded, unrecorded and in inference; sets and names them."""
    for training, mode in itertools.product(
        (True, False), (torch.enable_grad, torch.no_grad, torch.inference_mode)
    ):
        layer.train(training)
        with mode():
            yield f"training={training} under {mode.__name__}"


@pytest.mark.parametrize("name", LAYERS)
def test_modes_agree(name: str) -> None:
    layer = build(name)
    given = inputs_of(layer)
    exact = by_formula(layer, *(it.double() for it in given))
    plain = worst(exact, [by_formula(reordered(layer, order), *given) for order in orders()])
    for mode in in_every_mode(layer):
        out = layer(*given)
        assert out.requires_grad is torch.is_grad_enabled()
        assert_close(out, exact, plain, what=mode)
        with_stats, _ = layer.forward_with_stats(*given)
        assert_close(with_stats, exact, plain, what=f"{mode}, with statistics")


@pytest.mark.parametrize("name", ["everything", "cross of another width"])
def test_hooks_fire_once_in_every_mode(name: str) -> None:
    layer = build(name)
    calls: list[str] = []
    for part, module in layer.named_children():
        module.register_forward_hook(lambda *_, part=part: calls.append(part))
    parts = sorted(part for part, _ in layer.named_children())
    for mode in in_every_mode(layer):
        for call in (layer.forward, layer.forward_with_stats):
            calls.clear()
            call(*inputs_of(layer))
            assert sorted(calls) == parts, mode


class Adapter(nn.Module):
    """A frozen projection with a trained correction of rank 2, as LoRA wraps it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))

    def merged(self) -> Tensor:
        return self.base.weight + self.up.weight @ self.down.weight


@pytest.mark.parametrize("name", ["everything", "cross of another width"])
def test_an_adapter_in_place_of_a_projection_works_and_trains(name: str) -> None:
    layer, merged = build(name), build(name)
    for part in projections(layer):
        adapter = Adapter(layer.get_submodule(part))
        layer.set_submodule(part, adapter)
        merged.get_submodule(part).weight.data.copy_(adapter.merged())
    given = inputs_of(layer)
    for mode in in_every_mode(layer):
        torch.testing.assert_close(layer(*given), merged(*given), rtol=1e-4, atol=1e-5, msg=mode)
    layer(*given).square().sum().backward()
    for part, parameter in layer.named_parameters():
        if ".up." in part or ".down." in part:
            assert parameter.grad.abs().max() > 0, part
        assert ".base." not in part or parameter.grad is None


@pytest.mark.parametrize("name", ["everything", "cross of another width"])
def test_pruned_weights_take_no_part(name: str) -> None:
    layer = build(name)
    given = inputs_of(layer)
    zeroed = copy.deepcopy(layer)
    for part in projections(layer):
        prune.random_unstructured(layer.get_submodule(part), "weight", amount=0.4)
        kept = layer.get_submodule(part).weight_mask
        assert 0.5 < kept.mean() < 0.7
        zeroed.get_submodule(part).weight.data *= kept
    for mode in in_every_mode(layer):
        assert torch.equal(layer(*given), zeroed(*given)), mode
    layer.train()
    layer(*given).sum().backward()
    for part in projections(layer):
        linear = layer.get_submodule(part)
        assert (linear.weight_orig.grad[linear.weight_mask == 0] == 0).all()
        prune.remove(linear, "weight")
    assert torch.equal(layer(*given), zeroed(*given))


class Doubled(nn.Module):
    """Twice the weight, for torch.nn.utils.parametrize."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("name", ["everything", "cross of another width"])
def test_parametrized_weights_are_seen(name: str) -> None:
    layer, doubled = build(name), build(name)
    for part in projections(layer):
        parametrize.register_parametrization(layer.get_submodule(part), "weight", Doubled())
        doubled.get_submodule(part).weight.data *= 2
    for mode in in_every_mode(layer):
        assert torch.equal(layer(*inputs_of(layer)), doubled(*inputs_of(layer))), mode


@pytest.mark.parametrize("name", LAYERS)
def test_copies_are_the_layer(name: str) -> None:
    layer = build(name).eval()
    given = inputs_of(layer)
    expected = layer(*given)
    loaded = mh.MultiHeadAttention(WIDTH, **LAYERS[name])
    loaded.load_state_dict(layer.state_dict(), strict=True)
    for made in (loaded, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(made(*given), expected)
        assert repr(made) == repr(layer)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.zero_()
    assert torch.equal(layer(*given), expected)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 12])
def test_the_number_of_heads_does_not_change_the_number_of_parameters(heads: int) -> None:
    def count(**options: object) -> int:
        layer = mh.MultiHeadAttention(WIDTH, heads, **options)
        return sum(p.numel() for p in layer.parameters())

    assert count() == 4 * WIDTH**2
    assert count(qkv_bias=True, out_bias=True) == 4 * WIDTH**2 + 4 * WIDTH
    assert count(context_dim=WIDTH) == 4 * WIDTH**2
    assert count(sinks=True) == 4 * WIDTH**2 + heads
    assert count(qk_norm=nn.RMSNorm) == 4 * WIDTH**2 + 2 * (WIDTH // heads)


def test_projections_start_alike_together_and_apart() -> None:
    """Uniform within 1 / sqrt(n) for n inputs, whose standard deviation is 1 / sqrt(3 n)."""
    torch.manual_seed(0)
    width = 96
    together = mh.MultiHeadAttention(width, 4).qkv_proj.weight.split(width)
    cross = mh.MultiHeadAttention(width, 4, context_dim=width)
    apart = [cross.q_proj.weight, *cross.kv_proj.weight.split(width)]
    alone = mh.MultiHeadAttention(width, 4, num_kv_heads=1, value_dim=3).qkv_proj.weight[:width]
    for weight in (*together, *apart, alone):
        assert weight.abs().max() <= width**-0.5
        # 96 ** 2 numbers: their standard deviation is known to within one per cent.
        torch.testing.assert_close(weight.std().item(), (3 * width) ** -0.5, rtol=0.03, atol=0)


@pytest.mark.parametrize("name", ["everything", "cross of another width", "three heads, biases"])
def test_autocast_gives_one_dtype_in_every_mode(name: str) -> None:
    layer = build(name)
    given = inputs_of(layer)
    exact = by_formula(layer, *(it.double() for it in given))
    half = copy.deepcopy(layer).bfloat16()
    plain = by_formula(half, *(it.bfloat16() for it in given))
    for mode in in_every_mode(layer):
        with torch.autocast("cpu", torch.bfloat16):
            out, (with_stats, _) = layer(*given), layer.forward_with_stats(*given)
        assert out.dtype == with_stats.dtype == torch.bfloat16, mode
        assert_close(out, exact, plain, what=mode)
        assert_close(with_stats, exact, plain, what=f"{mode}, with statistics")
    with torch.autocast("cpu", torch.bfloat16):
        layer(*given).float().square().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_come_out_as_they_went_in(dtype: torch.dtype) -> None:
    layer = build("everything").to(dtype)
    given = [it.to(dtype) for it in inputs_of(layer)]
    expected = by_formula(layer, *(it.double() for it in given))
    plain = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    baseline = by_formula(layer, *(it.to(plain) for it in given))
    out = layer(*given)
    assert out.dtype == dtype
    assert_close(out, expected, baseline)


def test_norms_in_float32_beside_projections_in_half() -> None:
    layer = build("everything").bfloat16()
    layer.q_norm.float()
    layer.k_norm.float()
    x = inputs_of(layer)[0].bfloat16()
    assert layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_of_none_and_a_length_of_none(name: str) -> None:
    layer = build(name)
    assert layer(*inputs_of(layer, batch=0)).shape == (0, LENGTH, WIDTH)
    given = inputs_of(layer)
    assert layer(given[0][:, :0], *given[1:]).shape == (BATCH, 0, WIDTH)


def test_padding_that_fills_a_column_of_the_whole_batch_keeps_the_length() -> None:
    layer = build("four heads")
    (x,) = inputs_of(layer)
    visible = torch.arange(LENGTH) < torch.tensor([[LENGTH - 1], [LENGTH - 4]])
    shorter = visible[:, : LENGTH - 1]
    expected = layer(x[:, : LENGTH - 1], mask=mh.KeyPadding(shorter))
    for mode in in_every_mode(layer):
        out = layer(x, mask=mh.KeyPadding(visible))
        assert out.shape == x.shape, mode
        torch.testing.assert_close(out[:, : LENGTH - 1], expected, rtol=1e-6, atol=1e-6)


def test_built_on_meta_and_filled_later() -> None:
    with torch.device("meta"):
        layer = mh.MultiHeadAttention(WIDTH, **LAYERS["everything"])
    assert layer(torch.empty(BATCH, LENGTH, WIDTH, device="meta")).shape == (BATCH, LENGTH, WIDTH)
    filled = build("everything")
    layer.load_state_dict(filled.state_dict(), assign=True)
    assert torch.equal(layer(*inputs_of(filled)), filled(*inputs_of(filled)))


def test_what_has_no_memory_yet_is_started_part_by_part() -> None:
    """As torch's sharding does it: every module with parameters of its own has the method."""
    torch.manual_seed(0)
    expected = mh.MultiHeadAttention(WIDTH, **LAYERS["everything"])
    with torch.device("meta"):
        layer = mh.MultiHeadAttention(WIDTH, **LAYERS["everything"])
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    for part in layer.modules():
        if next(part.parameters(recurse=False), None) is not None:
            part.reset_parameters()
    for name, parameter in expected.named_parameters():
        assert torch.equal(layer.get_parameter(name), parameter), name


def test_checkpointing_replays_what_was_dropped() -> None:
    layer = build("everything")
    layer.dropout = 0.5
    (x,) = inputs_of(layer)

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(5)
        leaf = x.clone().requires_grad_()
        return list(torch.autograd.grad(run(leaf).square().sum(), [leaf, *layer.parameters()]))

    def checkpointed(leaf: Tensor) -> Tensor:
        return checkpoint(partial(layer, mask=mh.Causal()), leaf, use_reentrant=False)

    expected = gradients(partial(layer, mask=mh.Causal()))
    for got, want in zip(gradients(checkpointed), expected, strict=True):
        assert torch.equal(got, want)
