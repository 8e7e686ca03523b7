"""What replace_sdpa makes of mask tensors and of keys that a model repeats for its query heads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import multihead as mh
from close import assert_close
from multihead.integrations import deferred, sdpa_calls
from multihead.integrations.deferred import Repeated, Repeats
from multihead.integrations.sdpa_masks import RowRanges, lower

LOWEST = torch.finfo(torch.float32).min


def packed(*requests, window=None):
    """The mask of requests (queries, keys), packed one behind the other, as continuous batching's.

    Float32 [1, 1, q, k] of zeros and lowest numbers.
    """
    rows, columns = (sum(sizes) for sizes in zip(*requests, strict=True))
    mask = torch.full((1, 1, rows, columns), LOWEST)
    row = column = 0
    for queries, keys in requests:
        position = torch.arange(queries)[:, None] + keys - queries
        visible = torch.arange(keys) <= position
        if window is not None:
            visible &= torch.arange(keys) > position - window
        mask[0, 0, row : row + queries, column : column + keys][visible] = 0
        row, column = row + queries, column + keys
    return mask


def _described(lowered, query_length, key_length):
    """The booleans that a lowered mask stands for."""
    if lowered.mask is not None:
        return lowered.mask.to_dense(query_length, key_length)
    visible = torch.zeros(1, 1, query_length, key_length, dtype=torch.bool)
    for block in lowered.blocks:
        rows, columns = block.rows.stop - block.rows.start, block.end - block.begin
        mask = block.mask or mh.Window(None, None)
        visible[:, :, block.rows, block.begin : block.end] = mask.to_dense(rows, columns)
    return visible


TRIANGLE = torch.ones(1, 1, 61, 67, dtype=torch.bool).tril()
BAND = TRIANGLE & ~TRIANGLE.tril(-5)
HOLED = torch.rand(2, 1, 61, 67, generator=torch.Generator().manual_seed(1)) < 0.5
SINK = BAND.clone()
SINK[..., 0] = TRIANGLE[..., 0]
EMPTY_FIRST = torch.ones(1, 1, 97, 101, dtype=torch.bool).tril()
EMPTY_FIRST[..., :9, :] = False


@pytest.mark.parametrize(
    ("mask", "blocks"),
    [
        (TRIANGLE, 1),
        (torch.ones(1, 1, 61, 67, dtype=torch.bool).tril(6), 1),
        (BAND, 1),
        (torch.ones(1, 1, 61, 67, dtype=torch.bool), 1),
        (torch.zeros(1, 1, 61, 67, dtype=torch.bool), 1),
        (EMPTY_FIRST, 2),
        (packed((61, 61)), 1),
        (packed((1, 4001), (1, 2003), (1, 503)), 3),
        (packed((1, 1009), (37, 503), (29, 29)), 3),
        (packed((1, 1009), (37, 503), (29, 29), window=7), 3),
    ],
    ids=["tril", "bottom", "band", "full", "empty", "late", "one", "decode", "mixed", "window"],
)
def test_blocks(mask, blocks):
    lowered = lower(mask)
    assert len(lowered.blocks) == blocks
    visible = mask if mask.dtype == torch.bool else mask == 0
    assert torch.equal(_described(lowered, *mask.shape[2:]), visible)
    kinds = {type(block.mask) for block in lowered.blocks}
    assert kinds <= {type(None), mh.Causal, mh.Window}  # closed forms, which cost nothing to read


@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (SINK, RowRanges),
        (torch.cat((TRIANGLE, BAND)), RowRanges),
        (packed(*[(1, 2)] * 40), RowRanges),
        (HOLED, mh.Dense),
        (HOLED[:, :, :1], mh.KeyPadding),
        (HOLED[:, :, :1].float().log(), mh.KeyPadding),
        (TRIANGLE[:, :, :5, :7], mh.Dense),  # too small to be worth a look
    ],
    ids=["sink", "batch", "many", "holes", "row", "row_float", "small"],
)
def test_other_masks(mask, kind):
    lowered = lower(mask)
    assert type(lowered.mask) is kind
    visible = mask if mask.dtype == torch.bool else mask == 0
    shown = _described(lowered, *mask.shape[2:]).expand(mask.shape)
    assert torch.equal(shown, visible)


@given(
    st.lists(
        st.tuples(st.sampled_from(["same", "grow", "slide", "jump", "hide"]), st.integers(0, 40)),
        min_size=40,
        max_size=60,
    )
)
def test_any_intervals_are_described(steps):
    begin = end = 0
    mask = torch.zeros(1, 1, len(steps), 131, dtype=torch.bool)
    for row, (step, place) in enumerate(steps):
        if step == "jump":
            begin, end = place, 2 * place
        elif step != "hide":
            end = min(end + (step != "same"), 131)
            begin = min(begin + (step == "slide"), end)
        if step != "hide":
            mask[..., row, begin:end] = True
    assert torch.equal(_described(lower(mask), *mask.shape[2:]), mask)


@pytest.mark.parametrize("value", [0.5, -1e30, torch.nan, torch.inf])
def test_one_number_of_another_kind_makes_a_bias(value):
    mask = packed((61, 67))
    mask[0, 0, 5, 2] = value
    assert lower(mask).bias is mask


def test_a_trained_mask_stays_a_bias():
    mask = packed((61, 67)).requires_grad_()
    assert lower(mask).bias is mask


def test_ranges_meet_other_rules():
    lowered = lower(SINK).mask
    both = (lowered & mh.Causal() & mh.QueryStart(-2)).to_dense(61, 67)
    assert torch.equal(both, SINK & torch.ones(61, 67, dtype=torch.bool).tril(-2))
    padding = torch.arange(67)[None] < 40
    assert torch.equal((lowered & mh.KeyPadding(padding)).to_dense(61, 67), SINK & padding)
    with pytest.raises(mh.MaskError, match="does not go with Positions"):
        (lowered & mh.Causal() & mh.Positions(torch.arange(61), torch.arange(67))).lower(61, 67)
    with pytest.raises(mh.MaskError, match="ranges fits a call"):
        lowered.lower(5, 67)
    with pytest.raises(mh.MaskError, match="a second one"):
        (lowered & lowered).lower(61, 67)


# --- in a model ----------------------------------------------------------------------------------


class Grouped(nn.Module):
    """Layers that repeat KV heads, as models without grouped attention of their own do."""

    def __init__(self, repeat, layers=3):
        super().__init__()
        self.repeat, self.layers = repeat, layers

    def forward(self, query, key, value, mask):
        for _ in range(self.layers):
            # A view of the mask is made anew for each layer.
            query = F.scaled_dot_product_attention(
                query, self.repeat(key, 3), self.repeat(value, 3), mask[:, :, :]
            )
        return query


def _expand(tensor, times):
    batch, heads, length, width = tensor.shape
    wide = tensor[:, :, None, :, :].expand(batch, heads, times, length, width)
    return wide.reshape(batch, heads * times, length, width)


REPEATS = {
    "expand": _expand,
    "method": lambda tensor, times: tensor.repeat_interleave(times, dim=1),
    "function": lambda tensor, times: torch.repeat_interleave(tensor, times, dim=-3),
}


def _inputs():
    mask = packed((1, 1009), (37, 503), (29, 29))
    query, key = torch.randn(1, 6, 67, 11), torch.randn(1, 2, 1541, 11)
    return query, key, torch.randn_like(key), mask


@pytest.fixture
def lowered_masks(monkeypatch):
    seen = []
    monkeypatch.setattr(sdpa_calls, "lower", lambda mask: seen.append(mask) or lower(mask))
    return seen


@pytest.mark.parametrize("repeat", REPEATS)
def test_masks_are_read_once_and_heads_as_they_are(monkeypatch, lowered_masks, repeat):
    heads = []
    attention = sdpa_calls.attention
    monkeypatch.setattr(
        sdpa_calls,
        "attention",
        lambda query, key, value, **o: (
            heads.append(key.shape[1]) or attention(query, key, value, **o)
        ),
    )
    model, inputs = Grouped(REPEATS[repeat]), _inputs()
    expected, baseline = model(*[x.double() for x in inputs]), model(*inputs)
    with mh.replace_sdpa(model):
        assert_close(model(*inputs), expected, baseline)
        assert len(lowered_masks) == 1
        assert heads == [2] * 9
        with torch.inference_mode():
            assert_close(model(*[x.clone() for x in inputs]), expected, baseline)
        assert len(lowered_masks) == 2


def test_masks_that_each_layer_makes_are_not_all_kept():
    masks = sdpa_calls.Masks()
    for _ in range(9):
        masks.lower(torch.ones(1, 1, 61, 61, dtype=torch.bool))
    assert len(masks._known) <= 4


@pytest.mark.parametrize("inference", [False, True])
def test_a_mask_that_is_written_to_is_read_again(lowered_masks, inference):
    class Writes(nn.Module):
        def forward(self, query, mask):
            first = F.scaled_dot_product_attention(query, query, query, mask)
            mask[..., 0] = False
            return first, F.scaled_dot_product_attention(query, query, query, mask)

    model, query = Writes(), torch.randn(1, 2, 61, 7)
    with torch.inference_mode(inference):
        expected = model(query, torch.ones(61, 61, dtype=torch.bool))
        with mh.replace_sdpa(model):
            actual = model(query, torch.ones(61, 61, dtype=torch.bool))
    for ours, torchs in zip(actual, expected, strict=True):
        assert torch.allclose(ours, torchs, atol=1e-5)
    assert len(lowered_masks) == 2


# --- repeated heads ------------------------------------------------------------------------------


def _repeated():
    source = torch.randn(2, 3, 401, 11)
    return Repeats().of_interleave(source, 2, dim=1), source.repeat_interleave(2, dim=1)


def test_a_repeated_tensor_is_a_tensor():
    lazy, plain = _repeated()
    assert isinstance(lazy, Repeated)
    assert (lazy.shape, lazy.dtype, lazy.ndim) == (plain.shape, plain.dtype, 4)
    assert not lazy.is_written
    assert torch.equal(lazy, plain)
    assert torch.equal(lazy[:, 1] @ plain[:, 1].mT, plain[:, 1] @ plain[:, 1].mT)
    assert lazy.is_contiguous()
    assert lazy.sum().item() == plain.sum().item()
    assert torch.equal(torch.cat((lazy, lazy), dim=1), torch.cat((plain, plain), dim=1))
    assert type(lazy + 1) is torch.Tensor
    lazy.mul_(2)
    assert torch.equal(lazy, 2 * plain)
    assert torch.equal(torch.ops.aten.neg(lazy), -2 * plain)
    key, _, grouped = sdpa_calls._without_repeats(lazy, lazy, grouped=False)
    assert torch.equal(key, 2 * plain)
    assert not grouped


def test_what_is_not_a_plain_repetition_is_copied(monkeypatch):
    repeats = Repeats()
    source = torch.randn(2, 3, 401, 11)
    wide = source[:, :, None].expand(2, 3, 2, 401, 11)
    assert repeats.of_reshape(wide, 2, 6, 401, 11) is not None
    assert repeats.of_reshape(wide, (2, 6, 401, 11)) is not None
    assert repeats.of_reshape(wide, 2, 6, -1, 11) is None
    assert repeats.of_reshape(wide.clone(), 2, 6, 401, 11) is None
    assert repeats.of_interleave(source, torch.tensor([2]), 1) is None
    assert repeats.of_interleave(source, 2) is None
    assert repeats.of_interleave(source, 2, 2) is None
    assert repeats.of_interleave(source[:, :, :5], 2, 1) is None
    assert repeats.of_interleave(source.clone().requires_grad_(), 2, 1) is None


def test_a_source_that_is_written_to_was_read_before():
    class Overwrites(nn.Module):
        def forward(self, query, key):
            wide = key.repeat_interleave(2, dim=1)
            key.zero_()
            return F.scaled_dot_product_attention(query, wide, wide)

    model, query = Overwrites(), torch.randn(1, 6, 5, 11)
    key = torch.randn(1, 3, 401, 11)
    assert 2 * key.numel() >= deferred._LEAST
    expected = model(query, key.clone())
    with mh.replace_sdpa(model):
        assert torch.allclose(model(query, key.clone()), expected, atol=1e-5)
