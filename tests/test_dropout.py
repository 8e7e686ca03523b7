"""Dropout of attention weights: the same places in every backend, block, pass and replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import multihead as mh
from cases import CASES, Case
from checks import check_forward, check_gradients, run
from multihead.ops.backends import chunked
from multihead.ops.dropout import Dropout, philox
from serving import draw_qkv

SHAPED = [case for case in CASES if case.batch * case.query_length * case.key_length]
LONG = Case("dropout over blocks", query_length=601, key_length=601, head_dim=3, value_dim=3,
            mask=mh.Window(400, 0))  # fmt: skip


@dataclass(frozen=True)
class Dropped(Case):
    """A case whose call drops weights."""

    def options(self, dtype: torch.dtype = torch.float32) -> dict[str, object]:
        return {**super().options(dtype), "dropout_p": 0.3}


def dropped(case: Case) -> Dropped:
    return Dropped(**vars(case))


@pytest.fixture
def one_seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls that are compared draw the same seed."""
    seed = torch.tensor([0xDEADBEEF, 7])
    with monkeypatch.context() as patch:
        patch.setattr(Dropout, "drawn", classmethod(lambda cls, p, device: cls(p, seed)))
        yield


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    """The vectors that its authors publish with Random123."""
    (c0, c1, c2, c3), (k0, k1) = map(torch.tensor, counter), map(torch.tensor, key)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == words


def test_a_block_is_a_part_of_the_whole() -> None:
    dropout = Dropout(0.3, torch.tensor([5, 6]))
    whole = dropout.factor(2, 3, slice(0, 9), slice(0, 17), torch.float64)
    part = dropout.factor(2, 3, slice(3, 5), slice(5, 12), torch.float64)
    assert torch.equal(part, whole[:, :, 3:5, 5:12])
    assert set(whole.unique().tolist()) == {0.0, 1 / 0.7}


def test_the_share_that_is_dropped_is_p_in_every_row_and_column() -> None:
    factor = Dropout(0.25, torch.tensor([1, 2])).factor(
        4, 4, slice(0, 200), slice(0, 200), torch.float32
    )
    dropped = (factor == 0).double()
    for axes in ((0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):
        share, n = dropped.mean(axes), dropped[0, 0].numel() * 16 / dropped.mean(axes).numel()
        assert (share - 0.25).abs().max() < 5 * (0.25 * 0.75 / n) ** 0.5
    rows = dropped.flatten(0, 2) - 0.25
    neighbours = (rows[:, 1:] * rows[:, :-1]).mean() / (0.25 * 0.75)
    assert abs(neighbours) < 5 / dropped.numel() ** 0.5


@pytest.mark.usefixtures("one_seed")
@pytest.mark.parametrize("case", [*SHAPED, LONG], ids=lambda case: case.name)
def test_blocks_and_the_definition_drop_the_same(case: Case) -> None:
    check_forward(dropped(case), torch.float32, "chunked")


@pytest.mark.usefixtures("one_seed")
@pytest.mark.parametrize("case", [*SHAPED[::3], LONG], ids=lambda case: case.name)
def test_gradients(case: Case) -> None:
    check_gradients(dropped(case), torch.float32, "auto", ("lse", "entropy", "max_logit"))


@pytest.mark.usefixtures("one_seed")
def test_a_backward_that_draws_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def another(problem: object, block: object) -> tuple[Tensor, Tensor]:
        again = torch.rand(block.weights.shape) > 0.3  # type: ignore[attr-defined]
        return block.weights * again / 0.7, again / 0.7  # type: ignore[attr-defined]

    monkeypatch.setattr(chunked, "_dropped", another)
    with pytest.raises(AssertionError, match="gradient of"):
        check_gradients(dropped(SHAPED[0]), torch.float32, "chunked")


@pytest.mark.usefixtures("one_seed")
def test_statistics_are_those_before_dropout() -> None:
    for case in SHAPED[::5]:
        with_dropout, without = (run(it, torch.float32, "chunked") for it in (dropped(case), case))
        for name in mh.STATISTICS:
            assert torch.equal(with_dropout.stats[name], without.stats[name])


def test_the_mean_over_seeds_is_the_call_without_dropout() -> None:
    query, key, value = draw_qkv((1, 2, 3, 4), (1, 1, 5, 4))
    outs = torch.stack([mh.attention(query, key, value, dropout_p=0.4) for _ in range(500)])
    error = outs.std(0) / len(outs) ** 0.5
    assert ((outs.mean(0) - mh.attention(query, key, value)).abs() < 5 * error).all()


def test_all_or_nothing() -> None:
    tensors = [x.requires_grad_() for x in draw_qkv((1, 2, 3, 4), (1, 1, 5, 4))]
    out = mh.attention(*tensors, dropout_p=1.0)
    assert torch.equal(out, torch.zeros_like(out))
    for grad in torch.autograd.grad(out.sum(), tensors):
        assert torch.equal(grad, torch.zeros_like(grad))
    state = torch.get_rng_state()
    mh.attention(*tensors, dropout_p=0.0)
    assert mh.explain(*tensors, dropout_p=0.5).backend == "chunked"
    with pytest.raises(mh.ArgumentError, match="between 0 and 1"):
        mh.attention(*tensors, dropout_p=-0.1)
    assert torch.equal(torch.get_rng_state(), state)


def test_checkpoints_replay_it() -> None:
    tensors = [x.requires_grad_() for x in draw_qkv((2, 4, 9, 5), (2, 2, 9, 5))]

    def attend(*qkv: Tensor) -> Tensor:
        return mh.attention(*qkv, mask=mh.Causal(), dropout_p=0.5)

    torch.manual_seed(1)
    plain = torch.autograd.grad(attend(*tensors).square().sum(), tensors)
    torch.manual_seed(1)
    out = checkpoint(attend, *tensors, use_reentrant=False)
    for ours, expected in zip(torch.autograd.grad(out.square().sum(), tensors), plain, strict=True):
        assert torch.equal(ours, expected)


def test_compiled_it_is_the_same() -> None:
    tensors = [x.requires_grad_() for x in draw_qkv((2, 4, 9, 5), (2, 2, 9, 5))]

    def attend(*qkv: Tensor) -> Tensor:
        return mh.attention(*qkv, mask=mh.Causal(), dropout_p=0.5)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for call in (attend, compiled):
        torch.manual_seed(2)
        out = call(*tensors)
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.usefixtures("one_seed")
@pytest.mark.parametrize("kind", ["paged", "int8"])
def test_keys_of_a_cache_are_dropped_like_others(kind: str) -> None:
    query, key, value = draw_qkv((1, 4, 1, 8), (1, 2, 9, 8))
    cache = mh.PagedKVCache(1, 2, 8) if kind == "paged" else mh.QuantizedKVCache()
    kv = cache.update(key, value)
    keys, values = kv.tensors(query.dtype)
    result = mh.attention_with_stats(query, kv, dropout_p=0.3, bins=4)
    expected = mh.attention_with_stats(query, keys, values, dropout_p=0.3, bins=4)
    assert torch.equal(result.out, expected.out)
    assert torch.equal(result.map, expected.map)
    assert torch.equal(mh.attention(query, kv, dropout_p=0.3), expected.out)
