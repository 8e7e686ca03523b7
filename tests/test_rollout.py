"""Rollout of chosen rows equals the dense product of the layers' matrices."""

import copy

import numpy as np
import pytest
import torch

import families
import multihead as mh
import tiny
from close import assert_close
from multihead.heads import rollout
from multihead.heads.comparing import rollout as module
from requires import require

LENGTH = 23
ROWS = [0, 7, -1]
IDS = torch.randint(3, 101, (LENGTH,), generator=torch.Generator().manual_seed(5))


def dense(matrices, rows, residual=0.5, heads=None):
    """The rows of the product of the layers' [h, q, k] matrices, the whole of it formed."""
    identity = torch.eye(matrices[0].shape[-1], dtype=matrices[0].dtype)
    product = identity
    for layer, matrix in enumerate(matrices):
        named = (heads or {}).get(layer)
        mean = (matrix if named is None else matrix[list(named)]).mean(0)
        product = (residual * identity + (1 - residual) * mean) @ product
    return product[rows]


def eager(model):
    """The matrices of every layer [h, q, k] as transformers' own attention forms them."""
    model.set_attn_implementation("eager")
    attentions = families.output(model, input_ids=IDS[None], output_attentions=True).attentions
    return [it[0] for it in attentions]


@pytest.mark.parametrize(
    "family", ["llama", "gpt2", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "bert"]
)
def test_equals_the_dense_product(family):
    require("models")
    model = families.build(family)
    exact = dense(eager(copy.deepcopy(model).double()), ROWS)
    plain = dense(eager(copy.deepcopy(model)), ROWS)
    found = rollout(model, IDS, ROWS)
    assert_close(found.shares, exact, plain, factor=4.0)
    assert found.shares.dtype == torch.float32
    assert found.rows.tolist() == [0, 7, LENGTH - 1]
    if family != "gpt_oss":  # learned sinks take a part
        torch.testing.assert_close(found.shares.sum(-1), torch.ones(3), rtol=1e-5, atol=0)


def matrices_of(model):
    """The matrices [h, q, k] of a model of ours."""
    with torch.no_grad(), mh.watch(model, statistics=(), keep="weights") as heads:
        model(IDS[None])
    patterns = heads.record().patterns
    return [patterns[name][:][0] for name in patterns if name.endswith("hook_pattern")]


@pytest.mark.parametrize("residual", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["rope", "alibi"])
def test_float64_residuals_and_heads(kind, residual):
    model = tiny.language_model(kind, layers=3, dtype=torch.float64)
    matrices = matrices_of(model)
    for heads in (None, {0: [4], 2: [0, 3]}, {1: (5, 1, 1)}):
        named = {layer: sorted(set(it)) for layer, it in (heads or {}).items()}
        exact = dense(matrices, ROWS, residual, named)
        found = rollout(model, IDS, ROWS, residual=residual, heads=heads)
        # Shares of at most 1; the dense product in float64 has roundings of its own.
        torch.testing.assert_close(found.shares, exact, rtol=0, atol=1e-14)
        assert found.residual == residual
        assert [len(it) for it in found.heads] == [
            len(named.get(layer, range(6))) for layer in range(3)
        ]
    if residual == 1.0:
        assert torch.equal(found.shares, torch.eye(LENGTH, dtype=torch.float64)[ROWS])


def test_sinks_and_windows_of_ours():
    model = tiny.language_model("rope", sinks=True, window=6, softcap=3.0, dtype=torch.float64)
    found = rollout(model, IDS, slice(None))
    exact = dense(matrices_of(model), slice(None))
    torch.testing.assert_close(found.shares, exact, rtol=0, atol=1e-13)
    assert (found.shares.sum(-1) < 0.999).all()
    assert (found.shares[-1, : LENGTH - 13] == 0).all()  # two layers reach back by 2 x 6


@pytest.mark.parametrize("changes", [{}, {"sinks": True, "window": 6, "softcap": 3.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_rows_are_those_of_many(changes, dtype):
    model = tiny.language_model("rope", dtype=dtype, **changes)
    doubles = matrices_of(copy.deepcopy(model).double())
    singles = matrices_of(copy.deepcopy(model).float())
    for heads in (None, {1: [2, 5]}):
        many = rollout(model, IDS, slice(None), heads=heads).shares
        few = torch.cat([rollout(model, IDS, row, heads=heads).shares for row in range(LENGTH)])
        if dtype == torch.float64:
            torch.testing.assert_close(few, many, rtol=0, atol=1e-14)
        else:
            exact = dense(doubles, slice(None), heads=heads)
            plain = dense(singles, slice(None), heads=heads)
            assert_close(few, exact, plain, factor=4.0)
            assert_close(many, exact, plain, factor=4.0)


def test_blocks_of_rows_change_nothing(monkeypatch):
    model = tiny.language_model("rope", dtype=torch.float64)
    whole = rollout(model, IDS, slice(None)).shares
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 6 * LENGTH * 4)
    torch.testing.assert_close(rollout(model, IDS, slice(None)).shares, whole, rtol=0, atol=1e-14)
    one = rollout(model, IDS[None], np.int64(-5))
    torch.testing.assert_close(one.shares[0], whole[-5], rtol=0, atol=1e-14)
    tokens, shares = one.top(3)
    assert torch.equal(shares[0], one.shares[0].sort(descending=True).values[:3])
    assert torch.equal(one.shares[0, tokens[0]], shares[0])


def test_no_rows_and_the_models_mode():
    model = tiny.language_model("rope").train()
    assert rollout(model, IDS, []).shares.shape == (0, LENGTH)
    assert model.training


def test_refusals():
    model = tiny.language_model("rope")
    for residual in (-0.1, 1.5):
        with pytest.raises(mh.ArgumentError, match="residual must be the share from 0 to 1"):
            rollout(model, IDS, 0, residual=residual)
    with pytest.raises(mh.ArgumentError, match=r"rows must lie between -23 and 22.*got 23"):
        rollout(model, IDS, [0, 23])
    with pytest.raises(mh.ArgumentError, match="tokens of one text"):
        rollout(model, IDS[None].expand(2, -1), 0)
    with pytest.raises(mh.ArgumentError, match="integers from 0 to 100"):
        rollout(model, [3, 101], 0)
    with pytest.raises(mh.ArgumentError, match="heads names layer 2; the model has layers 0 to 1"):
        rollout(model, IDS, 0, heads={2: [0]})
    with pytest.raises(
        mh.ArgumentError, match=r"heads\[1\] must name heads from 0 to 5.*got \[6\]"
    ):
        rollout(model, IDS, 0, heads={1: [6]})
    with pytest.raises(mh.ArgumentError, match=r"at least one; got \[\]"):
        rollout(model, IDS, 0, heads={1: []})
    with pytest.raises(mh.ModelError, match="an encoder with a decoder"):
        rollout(tiny.encoder_decoder(), IDS, 0)
