"""Key-value caches: decoding step by step is the whole at once."""

import pytest
import torch

import multihead as mh
from serving import draw, draw_qkv


def test_growing_continues_prefill():
    query, key, value = draw_qkv((2, 6, 11, 5), (2, 2, 11, 5), 7)
    cache = mh.KVCache()
    parts = []
    for begin, end in ((0, 5), (5, 6), (6, 6), (6, 11)):
        kv = cache.update(key[:, :, begin:end], value[:, :, begin:end])
        parts.append(mh.attention(query[:, :, begin:end], kv, mask=mh.Causal()))
    whole = mh.attention(query, key, value, mask=mh.Causal())
    assert torch.allclose(torch.cat(parts, 2), whole, atol=1e-6)


def test_key_values_stand_in_place_of_key_and_value():
    query, key, value = draw_qkv((2, 6, 3, 5), (2, 2, 11, 5))
    lengths = torch.tensor([7, 4], dtype=torch.int32)
    kv = mh.KeyValues(key, value, mh.KeyLengths(lengths))
    for mask in (None, mh.Causal(), mh.Window(2, None), torch.rand(3, 11) < 0.6):
        rule = mh.Dense(mask) if isinstance(mask, torch.Tensor) else mask
        joined = mh.KeyLengths(lengths) if rule is None else rule & mh.KeyLengths(lengths)
        expected = mh.attention(query, key, value, mask=joined)
        assert torch.equal(mh.attention(query, kv, mask=mask), expected)
        stats = mh.attention_with_stats(query, kv, mask=mask)
        assert torch.equal(stats.out, expected)
        assert mh.explain(query, kv, mask=mask).backend == mh.explain(query, key, value).backend


def test_what_is_missing_or_too_much_is_named():
    query, key, value = draw_qkv((1, 2, 3, 5), (1, 2, 3, 5))
    with pytest.raises(mh.ArgumentError, match="value is missing"):
        mh.attention(query, key)
    with pytest.raises(mh.ArgumentError, match="beside KeyValues"):
        mh.attention(query, mh.KeyValues(key, value), value)


@pytest.mark.parametrize(("length", "kept"), [(0, 0), (-5, 0), (-1, 2), (5, 3)])
def test_crop(length, kept):
    cache = mh.KVCache()
    cache.update(draw(1, 2, 3, 5, seed=0), draw(1, 2, 3, 5, seed=1))
    cache.crop(length)
    assert cache.length == kept
