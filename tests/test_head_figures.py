"""Figures hold the numbers that they are drawn from."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402

import inspections  # noqa: E402
import multihead as mh  # noqa: E402
import random_heads  # noqa: E402
from multihead import heads  # noqa: E402
from multihead.heads import figures  # noqa: E402
from multihead.heads.watching.histogram import BINS_OF  # noqa: E402

IDS = torch.randint(0, 401, (2, 90), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def drawn():
    """Every figure of a test is drawn whole, without a warning, and closed."""
    yield
    for number in pyplot.get_fignums():
        pyplot.figure(number).canvas.draw()
    pyplot.close("all")


@pytest.fixture(scope="module")
def view():
    return inspections.made_up(149, layers=5, heads=3)


def record_of(seed=0, **chosen):
    model = random_heads.small("rope", seed)
    with torch.no_grad(), mh.watch(model, **chosen) as watched:
        model(IDS)
    return watched.record(f"model {seed}")


@pytest.fixture(scope="module")
def record():
    return record_of()


def image(axes):
    [found] = axes.images
    return found


def labels(axis):
    return [it.get_text() for it in axis.get_ticklabels()]


@pytest.mark.parametrize("name", heads.STATISTICS)
def test_grid(record, name):
    axes = figures.grid(record, name)
    np.testing.assert_array_equal(image(axes).get_array(), record.statistics[name].T)
    assert labels(axes.xaxis) == ["L0", "L1", "L2", "L3"]
    assert labels(axes.yaxis) == [f"H{head}" for head in range(8)]
    assert axes.get_title() == "model 0, 180 tokens of 2 texts"
    shares = ("entropy_share", "max_weight", "sink_mass", "previous_token", "first_key")
    if name in shares:
        assert (image(axes).norm.vmin, image(axes).norm.vmax) == (0, 1)


def test_grid_of_an_inspection_with_pruned_heads(view):
    table = view.statistics["entropy"].copy()
    table[1, 2] = np.nan
    pruned = replace(view, statistics={**view.statistics, "entropy": table})
    own = pyplot.figure().subplots()
    axes = figures.grid(pruned, "entropy", axes=own)
    assert axes is own
    assert np.ma.getmaskarray(image(axes).get_array())[2, 1]
    assert "149 tokens of one text" in axes.get_title()


def test_heads_that_were_chosen_keep_their_numbers():
    record = record_of(heads=[2, 5])
    assert labels(figures.grid(record, "entropy").yaxis) == ["H2", "H5"]
    axes = figures.ranking(record, "entropy", 3)
    table = record.statistics["entropy"]
    wanted = sorted(
        ((table[layer, place], f"L{layer}H{head}") for layer in range(4) for place, head in
         enumerate((2, 5))), reverse=True
    )  # fmt: skip
    assert labels(axes.yaxis) == [name for _, name in wanted[:3]]
    assert [bar.get_width() for bar in axes.patches] == [value for value, _ in wanted[:3]]
    assert "3 of 8 heads" in axes.get_title()


def test_histogram(record):
    for name in ("entropy", "max_logit", "participation", "first_key"):
        axes = figures.histogram(record, name, [(0, 1), (3, 7)])
        assert len(axes.patches) == 2
        for patch, place in zip(axes.patches, [(0, 1), (3, 7)], strict=True):
            values, edges, _ = patch.get_data()
            counts = record.totals[name].histogram[place]
            filled = np.flatnonzero(counts)
            shown = counts[filled[0] : filled[-1] + 1]
            np.testing.assert_allclose(values * np.diff(edges) * 180, shown)
            assert edges[0] <= record.lowest(name)[place]
            assert edges[-1] >= record.highest(name)[place]
            inner = BINS_OF[name].edges[filled[0] + 1 : filled[-1] + 1]
            np.testing.assert_array_equal(edges[1:-1], inner)
        names = [it.get_text() for it in axes.get_legend().get_texts()]
        assert names == ["L0H1 (180 queries)", "L3H7 (180 queries)"]


def test_maps(view):
    for kind in ("mass", "peak"):
        axes = figures.pooled_map(view, 4, 1, kind)
        shown = image(axes).get_array()
        np.testing.assert_array_equal(shown.filled(np.nan), view.maps[kind][4, 1])
        assert image(axes).get_extent() == [0, 149, 149, 0]
    lift = image(figures.pooled_map(view, 4, 1, "lift")).get_array().filled(np.nan)
    with np.errstate(divide="ignore"):
        wanted = np.log2(view.maps["mass"][4, 1] / view.maps["uniform"]).clip(-6, 6)
    np.testing.assert_array_equal(lift, wanted)


def test_readers_and_top_keys(view):
    first = view.token.top_keys[..., 0]
    axes = figures.readers(view, 3)
    keys, counts = np.unique(first, return_counts=True)
    assert [bar.get_width() for bar in axes.patches] == sorted(counts, reverse=True)[:3]
    assert f"15 heads, {len(keys)} first keys" in axes.get_title()
    axes = figures.top_keys(view, 2, 1)
    weights = view.token.top_weights[2, 1]
    widths = [bar.get_width() for bar in axes.patches]
    np.testing.assert_allclose(widths, [*weights, 1 - weights.sum()], rtol=1e-6)
    key = int(view.token.top_keys[2, 1, 0])
    assert labels(axes.yaxis)[0] == f"{view.tokens[key]!r} at {key}"


def test_removal_and_restriction():
    axes = figures.removal([0, 3, 5], {"gate gradient": [2.0, 2.1, 2.4], "random": [2.0, 2.5, 4.0]})
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert drawn["random"] == [[0, 2.0], [3, 2.5], [5, 4.0]]
    assert set(drawn) == {"gate gradient", "random"}
    windows = heads.HeadWindows(64, 4, {"a": 8}, {"a": (0, 1)})
    found = heads.StreamingHeads(
        windows, {}, "kv", 16, 4, ((8, 0.03), (4, 0.006)), 0.01, 3.0, 0.0055, (0.02, 0.04), 99, 3
    )
    axes = figures.restriction(found)
    tried, allowed, held, at_random = axes.lines
    assert tried.get_xydata().tolist() == [[4, 0.006], [8, 0.03]]
    assert set(allowed.get_ydata()) == {0.01}
    assert held.get_xydata().tolist() == [[4, 0.0055]]
    assert at_random.get_xydata().tolist() == [[4, 0.02], [4, 0.04]]
    assert axes.get_xlabel() == "KV heads of 16 that see 64 keys and the first 4"


def test_roles():
    probes = heads.Probes(length=64, periods=(16, 24))
    found = heads.find_roles(random_heads.small("rope", 0), probes=probes)
    held = found.heads[1]
    several = (heads.Role("induction", 0.9, 0.1, 5), heads.Role("local", 0.8, 0.1, 5))
    found = replace(found, heads=(found.heads[0], (several, *held[1:]), *found.heads[2:]))
    axes = figures.roles(found)
    roles_held = sum(len(head) for layer in found.heads for head in layer)
    assert len(axes.patches) == 32 + roles_held
    stripes = [it for it in axes.patches if it.get_width() == pytest.approx(0.45)]
    assert [it.get_xy() for it in stripes][:2] == [
        pytest.approx((0.55, -0.45)),
        pytest.approx((1.0, -0.45)),
    ]
    names = {it.get_text() for it in axes.get_legend().get_texts()}
    assert {f"induction ({len(found.having('induction'))})"} <= names


def test_comparison(record):
    other = record_of(1)
    axes = figures.comparison(record.compare(other), "entropy")
    change = other.statistics["entropy"] - record.statistics["entropy"]
    np.testing.assert_allclose(image(axes).get_array(), change.T, rtol=1e-12)
    assert image(axes).norm.vmax == -image(axes).norm.vmin == np.abs(change).max()
    assert axes.get_title() == "model 0 → model 1"
    with pytest.raises(mh.ArgumentError, match="no statistic 'max_qk'; it has entropy"):
        figures.comparison(record.compare(other, "entropy"), "max_qk")


def test_distances():
    maps = np.random.default_rng(3).dirichlet(np.full(9, 0.3), (3, 4, 9))
    maps[2, 1] = maps[0, 2]
    found = heads.similarity(maps)
    axes = figures.distances(found, 0.05)
    shown = image(axes).get_array()
    assert shown[0, 1] == 0.0
    assert sorted(shown.ravel()) == sorted(found.distances.ravel())
    [frame] = axes.patches
    assert (frame.get_xy(), frame.get_width()) == ((-0.5, -0.5), 2)
    assert axes.get_title() == "12 heads, groups at 0.05 (average): 1"


def test_refusals(record, view):
    with pytest.raises(mh.ArgumentError, match="Unknown statistic 'sharpness'; a head has"):
        figures.grid(record, "sharpness")
    with pytest.raises(mh.ArgumentError, match=r"no 'max_qk' here; there is entropy\."):
        figures.ranking(record_of(statistics="entropy"), "max_qk")
    with pytest.raises(mh.ArgumentError, match="count must be at least 1; got 0"):
        figures.ranking(record, "entropy", 0)
    with pytest.raises(mh.ArgumentError, match=r"no head \(0, 8\)"):
        figures.histogram(record, "entropy", [(0, 8)])
    with pytest.raises(mh.ArgumentError, match="heads is empty"):
        figures.histogram(record, "entropy", [])
    with pytest.raises(mh.ArgumentError, match="no head L5H0: the model has layers L0 to L4"):
        figures.top_keys(view, 5, 0)
    with pytest.raises(mh.ArgumentError, match="kind must be one of mass, peak, lift; got 'mean'"):
        figures.pooled_map(view, 0, 0, "mean")
    with pytest.raises(mh.ArgumentError, match=r"no maps; make it with .*report=True"):
        figures.pooled_map(replace(view, maps={}), 0, 0)
    with pytest.raises(mh.ArgumentError, match="each of the 2 counts; got 1 under 'random'"):
        figures.removal([0, 1], {"random": [1.0]})


def test_without_matplotlib(record, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(mh.MissingExtraError, match=r"pip install 'multihead\[plot\]'"):
        figures.grid(record, "entropy")
