"""Records of heads: exact means and extremes, quantiles within their bins, kept and compared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.heads import STATISTICS, HeadRecord
from multihead.heads.watching.histogram import BINS, BINS_OF, places, quantile

SIZES = dict(width=12, heads=3)


class Two(nn.Module):
    """Two layers of different numbers of heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.wide = mh.MultiHeadAttention(12, 3)
        self.narrow = mh.MultiHeadAttention(12, 2)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.7)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x, mask=mh.Causal()), mask=mh.Causal())


def texts(count: int, seed: int = 5, length: int = 23) -> Tensor:
    return torch.randn(count, length, 12, generator=torch.Generator().manual_seed(seed))


def record(x: Tensor, **choice) -> HeadRecord:
    model = Two()
    with torch.no_grad(), mh.watch(model, **choice) as heads:
        model(x)
    return heads.record()


def rows_of(x: Tensor, name: str) -> Tensor:
    """One statistic of every query of the first layer, [B, H, Lq]."""
    layer = Two().wide
    with torch.no_grad():
        return layer.forward_with_stats(x, mask=mh.Causal(), stats=(name,))[1].stats[name]


def test_means_and_extremes_are_those_of_the_rows() -> None:
    found = record(texts(4))
    for name in ("entropy", "max_logit", "mean_distance"):
        rows = rows_of(texts(4), name).double()
        exact = rows.mean((0, 2)), rows.amin((0, 2)), rows.amax((0, 2))
        tables = found.mean(name), found.lowest(name), found.highest(name)
        for table, want in zip(tables, exact, strict=True):
            np.testing.assert_allclose(table[0], want, rtol=1e-12)
    assert (found.statistics["max_logit"][0] == found.highest("max_logit")[0]).all()
    assert (found.statistics["entropy"][0] == found.mean("entropy")[0]).all()


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("name", ["entropy", "max_weight", "participation", "max_logit"])
def test_quantiles_lie_within_their_bins(name: str, share: float) -> None:
    found = record(texts(9)).quantile(name, share)
    rows = rows_of(texts(9), name).double().transpose(0, 1).flatten(1)
    exact = np.quantile(rows, share, axis=-1, method="inverted_cdf")
    assert ((found.low[0] <= exact) & (exact <= found.high[0])).all()
    assert ((found.low[0] <= found.value[0]) & (found.value[0] <= found.high[0])).all()
    edges = BINS_OF[name].edges
    place = np.clip(np.searchsorted(edges, exact, side="right") - 1, 0, BINS - 1)
    width = edges[place + 1] - edges[place]
    assert (found.high[0] - found.low[0] <= width * (1 + 1e-9)).all()


def test_values_beyond_the_outermost_edges_are_bounded_by_the_extremes() -> None:
    bins = BINS_OF["max_logit"]
    values = torch.tensor([[-1e6, 3.0, 1e6, torch.inf, -torch.inf]]).double()
    place = places(["max_logit"], values)[0]
    assert place.tolist()[::2] == [0, BINS - 1, 0]
    counts = np.bincount(place[:3], minlength=BINS)
    top = quantile(bins, counts, np.float64(-1e6), np.float64(1e6), 1.0)
    assert top.high == 1e6
    assert top.low == bins.edges[-2]


def test_edges_invert_the_scale() -> None:
    edges = np.stack([bins.edges for bins in BINS_OF.values()])
    assert edges.shape == (len(BINS_OF), BINS + 1)
    middles = torch.from_numpy((edges[:, 1:] + edges[:, :-1]) / 2)
    assert (places(list(BINS_OF), middles) == torch.arange(BINS)).all()
    assert set(BINS_OF) == set(STATISTICS)


def test_merged_batches_are_one_watch() -> None:
    together = record(texts(4))
    first, second = record(texts(4)[:1]), record(texts(4)[1:])
    both = first.merge(second)
    assert (first.one_text, second.one_text, both.one_text) == (True, False, False)
    assert (both.tokens, both.texts) == (together.tokens, together.texts) == (4 * 23, 4)
    assert np.array_equal(both.queries, together.queries)
    for name, totals in together.totals.items():
        assert np.array_equal(both.totals[name].count, totals.count)
        np.testing.assert_allclose(both.mean(name), together.mean(name), rtol=1e-6)
        # A row's bits may depend on the shape of the call, by a rounding.
        np.testing.assert_allclose(both.totals[name].highest, totals.highest, rtol=1e-5)
        assert abs(both.totals[name].histogram - totals.histogram).sum() <= 4


def test_saved_and_loaded(tmp_path) -> None:
    before = record(texts(2))
    before.save(tmp_path / "heads.safetensors")
    after = HeadRecord.load(tmp_path / "heads.safetensors")
    assert repr(after) == repr(before)
    assert after.facts() == before.facts()
    assert (after.layers, after.heads, after.names) == (before.layers, before.heads, before.names)
    for name in before.names:
        for array in ("count", "sum", "lowest", "highest", "histogram"):
            one, other = (getattr(it.totals[name], array) for it in (before, after))
            assert np.array_equal(one, other)
            assert one.dtype == other.dtype
    assert np.array_equal(after.queries, before.queries)
    assert [it.name for it in tmp_path.iterdir()] == ["heads.safetensors"]


def test_a_saved_file_is_readable_like_any_other(tmp_path) -> None:
    record(texts(1)).save(tmp_path / "heads")
    (tmp_path / "other").write_bytes(b"")
    modes = {it.stat().st_mode for it in tmp_path.iterdir()}
    assert len(modes) == 1


def test_a_failed_save_leaves_what_was_there(tmp_path, monkeypatch) -> None:
    path = tmp_path / "heads.safetensors"
    record(texts(1)).save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(mh.InputError, match="cannot be written: No space left on device"):
        record(texts(2)).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        record(texts(2)).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(mh.InputError, match=r"nowhere.* cannot be written: No such file"):
        record(texts(1)).save(tmp_path / "nowhere" / "x")


def test_other_files_are_refused(tmp_path) -> None:
    from safetensors.numpy import save_file

    with pytest.raises(mh.InputError, match="There is no file"):
        HeadRecord.load(tmp_path / "none")
    (tmp_path / "text").write_text("no tensors here")
    with pytest.raises(mh.InputError, match="is no record of heads"):
        HeadRecord.load(tmp_path / "text")
    save_file({"x": np.zeros(3)}, tmp_path / "weights")
    with pytest.raises(mh.InputError, match="another safetensors file"):
        HeadRecord.load(tmp_path / "weights")
    path = tmp_path / "old"
    record(texts(1)).save(path)
    path.write_bytes(path.read_bytes().replace(b'\\"format\\": 1', b'\\"format\\": 0'))
    with pytest.raises(mh.InputError, match="written by another version"):
        HeadRecord.load(path)


def test_a_truncated_file_is_refused(tmp_path) -> None:
    path = tmp_path / "heads"
    record(texts(1)).save(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(mh.InputError, match="is no record of heads"):
        HeadRecord.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-1], "is damaged: what it says of its record is no JSON object"),
        (lambda text: "[]", "is damaged: what it says of its record is no JSON object"),
        (lambda text: text.replace('"tokens"', '"taken"'), "it does not say the tokens"),
        (lambda text: text.replace('"layers": [', '"layers": ["x", '), "the heads of every layer"),
        (lambda text: text.replace('"heads": [[', '"heads": [3, ['), "the heads of every layer"),
    ],
)
def test_a_file_whose_words_are_damaged_is_refused(tmp_path, change, message: str) -> None:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    path = tmp_path / "heads"
    record(texts(1)).save(path)
    with safe_open(path, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        ((key, text),) = file.metadata().items()
    save_file(arrays, path, {key: change(text)})
    with pytest.raises(mh.InputError, match=message):
        HeadRecord.load(path)


def test_the_largest_difference_comes_first() -> None:
    before, after = record(texts(2)), record(texts(2))
    totals = after.totals["entropy"].sum.copy()
    totals[1, 0] += 40.0 * after.totals["entropy"].count[1, 0]
    object.__setattr__(after.totals["entropy"], "sum", totals)
    compared = before.compare(after)
    first = compared[0]
    assert (first.layer, first.head, first.statistic) == (1, 0, "entropy")
    assert first.difference == pytest.approx(40.0)
    assert first.there - first.here == first.difference
    assert [it.spreads for it in compared] == sorted((it.spreads for it in compared), reverse=True)
    assert len(compared) == 5 * len(STATISTICS)
    assert len(compared.of("max_qk")) == 5
    assert str(compared).splitlines()[1].startswith("  layer 1 head 0 entropy: ")
    assert {it.difference for it in before.compare(before)} == {0.0}
    assert len(before.compare(after, "max_qk")) == 5


def test_what_one_record_has_no_query_for_differs_by_nan() -> None:
    """One head, and a text of one token, of which no query sees a token before it."""
    one, other = (record(texts(1, length=it), layers="wide", heads=[0]) for it in (1, 23))
    [found] = one.compare(other, "previous_token")
    assert np.isnan([found.here, found.difference, found.spreads]).all()
    assert found.there == other.statistics["previous_token"][0, 0]


def test_other_shapes_do_not_compare_and_do_not_merge() -> None:
    whole, part = record(texts(1)), record(texts(1), heads=[0])
    with pytest.raises(mh.ArgumentError, match="2 layers of 3, 2 heads and 2 layers of 1 heads"):
        whole.compare(part)
    with pytest.raises(mh.ArgumentError, match="same heads merge"):
        whole.merge(part)
    one, other = record(texts(1), statistics="entropy"), record(texts(1), statistics="max_qk")
    with pytest.raises(mh.ArgumentError, match="Both records must have"):
        one.compare(other)
    with pytest.raises(mh.ArgumentError, match="Both records must have first_key"):
        whole.compare(one, "first_key")
    with pytest.raises(mh.ArgumentError, match="same statistics merge"):
        one.merge(other)
    with pytest.raises(
        mh.ArgumentError, match=r"'max_qk' was not watched; this record has entropy"
    ):
        one.mean("max_qk")
    with pytest.raises(mh.ArgumentError, match="share must lie between 0 and 1"):
        one.quantile("entropy", 50)


def test_a_frame_of_pandas_has_a_row_for_each_head() -> None:
    pytest.importorskip("pandas", reason="the extra 'pandas' is not installed")
    found = record(texts(2))
    frame = found.to_pandas()
    assert frame["module"].tolist() == ["wide"] * 3 + ["narrow"] * 2
    assert frame["head"].tolist() == [0, 1, 2, 0, 1]
    assert (frame["queries"] == 46).all()
    assert (
        frame["entropy"].tolist()
        == found.statistics["entropy"][[0, 0, 0, 1, 1], [0, 1, 2, 0, 1]].tolist()
    )
    assert frame.attrs["texts"] == 2


def test_without_pandas_one_sentence_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(mh.MissingExtraError, match=r"pip install 'multihead\[pandas\]'"):
        record(texts(1)).to_pandas()


def test_a_record_cannot_be_written_to() -> None:
    found = record(texts(1))
    for one in (found, found.merge(record(texts(2)))):
        with pytest.raises(ValueError, match="read-only"):
            one.totals["entropy"].sum[0, 0] = 1.0
    with pytest.raises(AttributeError):
        found.tokens = 3  # type: ignore[misc]
    assert repr(found) == (
        "HeadRecord(Two: 2 layers, 5 heads, 10 statistics over 23 tokens of one text, float32)"
    )
