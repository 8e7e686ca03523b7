"""Masks: meaning, lowering, counting, picture and what is refused."""

from __future__ import annotations

import dataclasses
import re
import sys

import pytest
import torch
from torch import Tensor

import multihead as mh
from cases import CASES, Case

MASKED = [case for case in CASES if case.mask is not None]
# The literal reading below is a Python loop over pairs.
SMALL = [case for case in MASKED if case.query_length * case.key_length < 2_000]


def meaning(mask: mh.Mask, start: int, queries: int, keys: int, sample: int, head: int) -> Tensor:
    """The rule read literally, pair by pair; an independent oracle for the closed forms."""
    rules = mask.masks if hasattr(mask, "masks") else (mask,)
    visible = torch.ones(queries, keys, dtype=torch.bool)
    position = [start + i for i in range(queries)]
    place = list(range(keys))
    first = 0

    def of(value: int | Tensor | None, index: int) -> int | None:
        return int(value[index]) if isinstance(value, Tensor) and value.ndim else value  # type: ignore[return-value]

    for rule in rules:
        if isinstance(rule, mh.KeyPadding) and bool(rule.visible[sample].any()):
            first = int(rule.visible[sample].nonzero()[0])
        elif isinstance(rule, mh.QueryStart):
            position = [of(rule.start, sample) + i for i in range(queries)]
        elif isinstance(rule, mh.KeyLengths):
            rows = queries if rule.query_lengths is None else int(rule.query_lengths[sample])
            position = [int(rule.lengths[sample]) - rows + i for i in range(queries)]
        elif isinstance(rule, mh.Positions):
            position, place = rule.query.tolist(), rule.key.tolist()
        elif isinstance(rule, mh.Documents) and rule.key_ids is not None:
            mine, keys_of = rule.query_ids[sample].tolist(), rule.key_ids[sample].tolist()
            for i, document in enumerate(mine):
                columns = [j for j, other in enumerate(keys_of) if other == document]
                from_last = mine[i:].count(document)
                position[i] = columns[-from_last] if from_last <= len(columns) else -1
    if any(isinstance(rule, mh.Positions) for rule in rules):
        first = 0
    for i in range(queries):
        for j in range(keys):
            p, pos = position[i], place[j]
            for rule in rules:
                seen = True
                if isinstance(rule, mh.Causal):
                    seen = pos <= p
                elif isinstance(rule, mh.Window):
                    left, right = of(rule.left, head), of(rule.right, head)
                    kept = rule.keep_first > 0 and pos < first + rule.keep_first
                    seen = left is None or pos >= p - left or kept
                    seen = seen and (right is None or pos <= p + right)
                elif isinstance(rule, mh.PrefixCausal):
                    length = of(rule.length, sample)
                    seen = pos <= p or (length > 0 and pos < first + length)
                elif isinstance(rule, mh.KeyPadding):
                    seen = bool(rule.visible[sample, j])
                elif isinstance(rule, mh.KeyLengths):
                    seen = j < int(rule.lengths[sample])
                    if rule.query_lengths is not None:
                        seen = seen and i < int(rule.query_lengths[sample])
                elif isinstance(rule, mh.Documents):
                    key_ids = rule.query_ids if rule.key_ids is None else rule.key_ids
                    mine = int(rule.query_ids[sample, i])
                    seen = mine >= 0 and mine == int(key_ids[sample, j])
                elif isinstance(rule, mh.Dense):
                    cell = rule.visible
                    index = (
                        place if size > 1 else 0
                        for place, size in zip((sample, head, i, j), cell.shape, strict=True)
                    )  # fmt: skip
                    seen = bool(cell[tuple(index)])
                visible[i, j] &= seen
    return visible


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_lowering_means_what_the_rule_says(case: Case) -> None:
    assert case.mask is not None
    dense = case.mask.to_dense(case.query_length, case.key_length)
    dense = dense.expand(case.batch, case.heads, case.query_length, case.key_length)
    start = case.key_length - case.query_length
    for sample in range(case.batch):
        for head in range(case.heads):
            expected = meaning(case.mask, start, case.query_length, case.key_length, sample, head)
            assert torch.equal(dense[sample, head], expected), f"sample {sample}, head {head}"


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_visible_pairs_counts_exactly(case: Case) -> None:
    assert case.mask is not None
    dense = case.mask.to_dense(case.query_length, case.key_length)
    assert case.mask.visible_pairs(case.query_length, case.key_length) == int(dense.sum())


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_key_bounds_enclose_what_a_block_sees(case: Case) -> None:
    assert case.mask is not None
    parts = case.mask.lower(case.query_length, case.key_length)
    for begin in range(0, case.query_length, 3):
        rows = slice(begin, min(begin + 3, case.query_length))
        left, right = parts.key_bounds(rows)
        seen = parts.visible(rows).any(0).any(0).any(0).expand(case.key_length)
        assert not bool(seen[:left].any())
        assert not bool(seen[right:].any())
        assert torch.equal(
            parts.visible(rows, slice(left, right)).expand(-1, -1, -1, right - left),
            parts.visible(rows)[..., left:right].expand(-1, -1, -1, right - left),
        )


def test_counts_that_are_known() -> None:
    assert mh.Causal().visible_pairs(16, 16) == 136
    assert mh.Causal().visible_pairs(4, 10) == 34
    assert mh.SlidingWindow(3).visible_pairs(16, 16) == 45
    assert mh.Causal().visible_pairs(1, 10) == 10
    assert mh.Window(None, None).visible_pairs(16, 16) == 256
    n = 131_072
    assert mh.Causal().visible_pairs(n, n) == n * (n + 1) // 2


def test_two_anchors_differ() -> None:
    """Decoding continues prefill; torch's top-left triangle has another name."""
    assert mh.Causal().to_dense(2, 5)[0, 0].tolist() == [
        [True, True, True, True, False],
        [True, True, True, True, True],
    ]
    assert (mh.Causal() & mh.QueryStart(0)).to_dense(2, 5)[0, 0].tolist() == [
        [True, False, False, False, False],
        [True, True, False, False, False],
    ]


def test_sliding_window_counts_the_query_itself() -> None:
    identity = torch.eye(6)[None, None]
    zeros = torch.zeros(1, 1, 6, 6)
    rows = mh.attention(zeros, zeros, identity, mask=mh.SlidingWindow(2))[0, 0]
    expected = torch.eye(6)
    for i in range(1, 6):
        expected[i, i - 1 : i + 1] = 0.5
    assert torch.equal(rows, expected)
    last = mh.attention(zeros[:, :, :1], zeros, identity, mask=mh.SlidingWindow(2))[0, 0, 0]
    assert last.tolist() == [0, 0, 0, 0, 0.5, 0.5]
    assert torch.equal(mh.attention(zeros, zeros, identity, mask=mh.SlidingWindow(1)), identity)


def test_picture() -> None:
    assert mh.Window(1, 0, keep_first=1).picture(4, 5) == (
        "  0 1 2 3 4\n0 ■ ■ · · ·\n1 ■ ■ ■ · ·\n2 ■ · ■ ■ ·\n3 ■ · · ■ ■"
    )
    padded = mh.KeyPadding(torch.tensor([[True, False], [False, True]])).picture(1, 2)
    assert padded.splitlines() == [
        "sample 0, head 0", "  0 1", "0 ■ ·", "", "sample 1, head 0", "  0 1", "0 · ■",
    ]  # fmt: skip


def test_wide_picture_keeps_its_columns_apart() -> None:
    header, *rows = mh.Causal().picture(11, 11).splitlines()
    assert {len(row) for row in rows} == {len(header)}


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: mh.SlidingWindow(0), mh.MaskError, "at least 1"),
        (lambda: mh.SlidingWindow(2.5), mh.DtypeError, "integer"),
        (lambda: mh.Window(-1), mh.MaskError, "None means unbounded"),
        (lambda: mh.Window(torch.tensor([1.0])), mh.DtypeError, "integers"),
        (lambda: mh.PrefixCausal(-2), mh.MaskError, "at least 0"),
        (lambda: mh.KeyPadding(torch.ones(2, 3)), mh.DtypeError, "x.bool()"),
        (lambda: mh.KeyPadding(torch.ones(3, dtype=torch.bool)), mh.MaskError, "[B, Lk]"),
        (lambda: mh.Dense(torch.zeros(3, 3)), mh.DtypeError, "`bias`"),
        (lambda: mh.Dense(torch.ones(3, 4, 5).bool()), mh.MaskError, "mask[:, None]"),
        (lambda: mh.Documents(torch.tensor([0.5])), mh.DtypeError, "integers"),
        (lambda: mh.KeyLengths(torch.tensor([[3]])), mh.MaskError, "[L]"),
        (lambda: mh.Positions(torch.ones(2).bool(), torch.arange(2)), mh.DtypeError, "integers"),
    ],
)  # fmt: skip
def test_what_a_mask_refuses(make: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (mh.QueryStart(0) & mh.KeyLengths(torch.tensor([5, 5])), "one frame"),
        (mh.QueryStart(0) & mh.QueryStart(1), "one frame"),
        (mh.KeyLengths(torch.tensor([5, 2])), "query_lengths"),
        (mh.KeyLengths(torch.tensor([5, 9])), "between 0 and the 5 keys"),
        (mh.KeyPadding(torch.ones(2, 7, dtype=torch.bool)), "covers 7 positions, but key has 5"),
        (mh.Documents(torch.arange(3)), "key_ids"),
        (mh.QueryStart(torch.tensor([1, 2, 3])), "the batch is 2"),
        (mh.Window(torch.tensor([-1])), "Window.left must be at least 0; got -1"),
        (mh.PrefixCausal(torch.tensor([2, -1])), "PrefixCausal.length must be at least 0"),
        (mh.KeyLengths(torch.tensor([5, 9]), torch.tensor([3, 3])), "between 0 and the 5 keys"),
        (mh.KeyLengths(torch.tensor([5, 5]), torch.tensor([4, 3])), "between 0 and the 3 queries"),
    ],
)
def test_what_does_not_fit_the_call(mask: mh.Mask, words: str) -> None:
    query, key = torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 5, 4)
    with pytest.raises(mh.MaskError, match=re.escape(words)):
        mh.attention(query, key, key, mask=mask)


def test_the_same_frame_twice_is_one_frame() -> None:
    mask = mh.Causal() & mh.QueryStart(2) & mh.QueryStart(2)
    assert mask.visible_pairs(3, 5) == mh.Causal().visible_pairs(3, 5)


def test_masks_compare_by_identity_and_stay_as_made() -> None:
    assert mh.Causal() != mh.Causal()
    with pytest.raises(dataclasses.FrozenInstanceError):
        mh.Window(1).left = 2  # type: ignore[misc]


def test_intersection_is_flat_and_order_does_not_matter() -> None:
    rules = [mh.Causal(), mh.Window(4, 2, keep_first=1), mh.PrefixCausal(3), mh.Window(2, None, 2)]
    expected = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    for rule in rules:
        expected = expected & rule.to_dense(9, 9)
    forward = rules[0] & rules[1] & (rules[2] & rules[3])
    backward = rules[3] & rules[2] & rules[1] & rules[0]
    assert torch.equal(forward.to_dense(9, 9), expected)
    assert torch.equal(backward.to_dense(9, 9), expected)


def test_positions_below_the_padding_stay_causal() -> None:
    """Left padding with restarted positions: no exemption where none was asked for."""
    padding = torch.tensor([[0, 0, 1, 1, 1, 1]]).bool()
    position = torch.tensor([[0, 0, 0, 1, 2, 3]])
    mask = mh.Causal() & mh.KeyPadding(padding) & mh.Positions(position, position)
    expected = torch.tril(torch.ones(6, 6)).bool() & padding
    assert torch.equal(mask.to_dense(6, 6)[0, 0, 2:], expected[2:])
    negative = torch.tensor([-2, -1, 0])
    below_zero = mh.Causal() & mh.Positions(negative, negative)
    assert torch.equal(below_zero.to_dense(3, 3)[0, 0], torch.tril(torch.ones(3, 3)).bool())


def test_numbers_beyond_32_bits_keep_their_meaning() -> None:
    ids = torch.tensor([0, 2**32, 1, 2**32 + 1, 2**31, -(2**40)])
    same = (ids[:, None] == ids) & (ids >= 0)[:, None]
    assert torch.equal(mh.Documents(ids).to_dense(6, 6)[0, 0], same)
    assert torch.equal(mh.Documents(ids, ids).to_dense(6, 6)[0, 0], same)
    query, value = torch.zeros(1, 1, 4, 4), torch.eye(4)[None, None]
    free = mh.attention(query, query, value)
    far = torch.tensor([2**31])
    for mask in (
        mh.Window(2**31),
        mh.Window(far),
        mh.Window(None, sys.maxsize),
        mh.Window(far, far),
    ):
        expected = mh.attention(query, query, value, mask=mh.Causal())
        both_sides = mask.right != 0
        out = mh.attention(query, query, value, mask=mask)
        assert torch.equal(out, free if both_sides else expected)
    kept = mh.Window(0, 0, keep_first=sys.maxsize) & mh.PrefixCausal(2**40)
    assert kept.visible_pairs(4, 4) == 10
    for refused in (mh.QueryStart(2**31), mh.Positions(torch.tensor([2**31] * 4), torch.arange(4))):
        with pytest.raises(mh.MaskError, match=r"2\*\*30"):
            mh.attention(query, query, value, mask=refused)


def test_masks_that_come_twice() -> None:
    one, other = (
        mh.KeyLengths(torch.tensor([n]), query_lengths=torch.tensor([n - 2])) for n in (3, 4)
    )
    assert (one & other).visible_pairs(4, 4) == (other & one).visible_pairs(4, 4) == 3
    positions = mh.Positions(torch.arange(4), torch.arange(4))
    documents = mh.Documents(torch.tensor([0, 1]), torch.tensor([0, 0, 1, 1]))
    assert torch.equal((positions & positions).to_dense(4, 4), positions.to_dense(4, 4))
    assert torch.equal((documents & documents).to_dense(2, 4), documents.to_dense(2, 4))


def test_counts_where_only_some_intervals_differ_by_head() -> None:
    mask = mh.Window(torch.tensor([0, 1]), 0, keep_first=2)
    assert mask.visible_pairs(4, 4) == int(mask.to_dense(4, 4).sum()) == 19


def test_masks_of_nothing() -> None:
    query, empty = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 0, 8)
    padding = mh.KeyPadding(torch.ones(1, 0, dtype=torch.bool))
    assert bool((mh.attention(query, empty, empty, mask=padding) == 0).all())
    nobody = torch.zeros(0, 4, dtype=torch.long)
    for mask in (
        mh.KeyPadding(nobody.bool()),
        mh.Documents(nobody, torch.arange(4)),
        mh.Documents(nobody) & mh.Documents(nobody),
        mh.PrefixCausal(nobody[:, 0]),
    ):
        assert mask.visible_pairs(4, 4) == 0
        assert mh.attention(query[:0], query[:0], query[:0], mask=mask).shape == (0, 2, 4, 8)
