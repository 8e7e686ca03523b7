"""Statistics without an output: the same numbers, on all rows and on some."""

import pytest
import torch

import multihead as mh
from close import assert_close, float64_baseline
from multihead.ops import STATISTICS, attention_stats

B, H, G, L, D = 2, 6, 3, 37, 8


def call(name: str, dtype: torch.dtype = torch.float64) -> dict:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key = 2 * draw(B, H, L, D), 2 * draw(B, G, L, D)
    bias, slopes, sinks = draw(B, 1, L, L), draw(H).abs(), draw(H)
    visible = torch.ones(B, L, dtype=torch.bool)
    visible[0, :9] = False
    options = {
        "all": {},
        "causal": {"mask": mh.Causal(), "softcap": 3.0},
        "padded": {"mask": mh.Causal() & mh.KeyPadding(visible), "sinks": sinks},
        "window": {"mask": mh.Window(torch.arange(H), 0, 2), "bias": bias},
        "alibi": {"mask": mh.Causal(), "bias": mh.ALiBi(slopes), "scale": -0.3},
        "positions": {
            "mask": mh.Positions(torch.arange(L).flip(0), torch.arange(L).flip(0)) & mh.Causal()
        },
    }[name]

    def cast(value: object) -> object:
        if isinstance(value, mh.ALiBi):
            return mh.ALiBi(value.slopes.to(dtype))
        return value.to(dtype) if isinstance(value, torch.Tensor) else value

    cast_options = {key: cast(value) for key, value in options.items()}
    return {"query": query.to(dtype), "key": key.to(dtype), **cast_options}


@pytest.mark.parametrize("name", ["all", "causal", "padded", "window", "alibi", "positions"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", ["all", [0, 3, 11, -1, 3]])
def test_statistics_are_those_of_the_whole_call(name: str, dtype: torch.dtype, rows) -> None:
    def whole(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        arguments = call(name, dtype)
        value = torch.zeros(B, G, L, 3, dtype=dtype)
        result = mh.attention_with_stats(
            arguments.pop("query"),
            arguments.pop("key"),
            value,
            backend="reference",
            stats=STATISTICS,
            **arguments,
        )
        index = slice(None) if rows == "all" else torch.tensor(rows) % L
        return {statistic: result.stats[statistic][:, :, index] for statistic in STATISTICS}

    got = attention_stats(**call(name, dtype), rows=rows, stats=STATISTICS)
    exact, plain = whole(torch.float64), whole(torch.float32)
    assert tuple(got) == STATISTICS
    for statistic, values in got.items():
        if statistic == "argmax":
            assert torch.equal(values, exact[statistic])
            continue
        baseline = plain[statistic]
        if dtype == torch.float64:
            baseline = float64_baseline(exact[statistic], baseline)
        assert values.dtype == dtype
        assert_close(values, exact[statistic], baseline, what=statistic, factor=3.0)


def test_nothing_is_recorded_and_nobody_sees_the_call() -> None:
    query = torch.randn(1, 2, 5, 4, requires_grad=True)
    layer = mh.MultiHeadAttention(8, 2)
    with mh.watch(layer) as heads:
        found = attention_stats(query, query)
    assert not found["lse"].requires_grad
    assert heads.layers == ()


def test_rows_that_are_not_there_are_refused() -> None:
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(mh.ArgumentError, match="rows must lie between -5 and 4"):
        attention_stats(query, query, rows=[5])
    with pytest.raises(mh.ArgumentError, match="rows must be 'all', a slice or integers"):
        attention_stats(query, query, rows="some")
    with pytest.raises(mh.ArgumentError, match="Unknown statistic 'mean'"):
        attention_stats(query, query, stats=("mean",))
    with pytest.raises(mh.ArgumentError, match="four dimensions"):
        attention_stats(query[0], query[0])
