"""Only what is asked for is watched, and what is not there is refused with what there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.heads import STATISTICS
from multihead.heads.watching.statistics import FROM_FORWARD, asked_of_forward
from multihead.ops import dispatch


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention = mh.MultiHeadAttention(12, heads)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, mask=mh.Causal())


class Model(nn.Module):
    """Three blocks of 3, 3 and 2 heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Block(heads) for heads in (3, 3, 2))
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def watched(**choice) -> mh.heads.Heads:
    model = Model()
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), mh.watch(model, **choice) as heads:
        model(x)
    return heads


@pytest.mark.parametrize("name", STATISTICS)
def test_one_statistic_alone_is_what_it_is_among_all(name: str) -> None:
    heads = watched(statistics=name)
    assert list(heads.statistics) == [name]
    assert np.array_equal(heads.statistics[name], watched().statistics[name], equal_nan=True)


def test_the_forward_pass_yields_only_what_is_needed(monkeypatch) -> None:
    seen = []
    run = dispatch.choose

    def note(problem, *arguments):
        seen.append(problem.stats)
        return run(problem, *arguments)

    monkeypatch.setattr(dispatch, "choose", note)
    watched(statistics=["entropy", "max_logit"], layers=[1])
    asked = {stats for stats in seen if stats}
    assert asked == {("entropy", "max_logit")}
    assert () in seen  # the other layers
    assert asked_of_forward(STATISTICS) == FROM_FORWARD
    assert asked_of_forward(["previous_token"]) == ("lse",)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([1], ("blocks.1.attention",)),
        (2, ("blocks.2.attention",)),
        ("blocks.0.attention", ("blocks.0.attention",)),
        (["blocks.0", 2], ("blocks.0.attention", "blocks.2.attention")),
        ("blocks", tuple(f"blocks.{block}.attention" for block in range(3))),
    ],
)
def test_chosen_layers(layers: object, expected: tuple[str, ...]) -> None:
    heads = watched(layers=layers)
    assert heads.layers == expected
    everything = watched()
    places = [everything.layers.index(name) for name in expected]
    width = heads.statistics["entropy"].shape[1]
    table = everything.statistics["entropy"][places, :width]
    assert np.array_equal(heads.statistics["entropy"], table, equal_nan=True)


def test_chosen_heads() -> None:
    everything = watched(layers=[0, 1])
    for heads in ([2], [0, 2], 1, np.int64(1), np.array([0, 2])):
        some = watched(layers=[0, 1], heads=heads)
        columns = np.atleast_1d(heads).tolist()
        for name in STATISTICS:
            assert np.array_equal(some.statistics[name], everything.statistics[name][:, columns])
        assert some.record().heads == (tuple(columns),) * 2
        assert some.queries.shape == (2, len(columns))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            dict(statistics=["entropi"]),
            r"Unknown statistic 'entropi'; a head has entropy, .*max_qk",
        ),
        (dict(statistics=()), "Nothing is asked for"),
        (dict(layers=["blocks.7"]), r"'blocks.7', which Model has not. Its modules are blocks, bl"),
        (dict(layers=3), r"names 3, which Model has not. Its blocks are numbered 0, 1, 2\."),
        (dict(layers=[]), "layers is empty"),
        (dict(layers=[True]), "names True"),
        (dict(heads=[-1]), "heads must be numbers of heads, from 0; got -1"),
        (dict(heads=[]), "from 0; got none"),
        (dict(heads=1.0), "heads must be numbers of heads, from 0; got 1.0"),
        (dict(layers=1.5), r"layers must be names of modules or numbers of blocks; got 1\.5"),
        (dict(statistics=3), "Unknown statistic 3; a head has entropy"),
        (dict(heads=2), r"heads names head 2, but blocks.2.attention has 2 heads, 0 to 1\."),
        (dict(keep="everything"), "keep must be 'weights' or None; got 'everything'"),
    ],
)
def test_what_is_not_there_is_refused(choice: dict, message: str) -> None:
    with pytest.raises(mh.ArgumentError, match=message):
        watched(**choice)
    assert dispatch.observer.get() is None


def test_weights_may_be_kept_without_any_statistic() -> None:
    heads = watched(statistics=(), keep="weights")
    assert heads.statistics == {}
    assert (heads.queries[:, :2] == 14).all()
    assert len(heads.record().patterns) == 6
