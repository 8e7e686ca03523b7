"""Rows of weights under TransformerLens' names: those of the whole matrix, computed when asked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.heads.watching.lazy_weights import Copies, KeptCall, LazyRows, LazyWeights
from multihead.ops import library
from multihead.ops.problem import ALiBi, describe

B, H, HKV, L = 2, 6, 2, 13
_SOME = torch.rand(B, H, L, L, generator=torch.Generator().manual_seed(4)) < 0.6
_SOME |= torch.eye(L, dtype=torch.bool)
CALLS = {
    "plain": {},
    "causal": dict(mask=mh.Causal()),
    "window by head": dict(mask=mh.Window(torch.arange(H), 0, keep_first=1)),
    "padded": dict(mask=mh.Causal() & mh.KeyPadding(torch.arange(L) >= torch.tensor([[0], [4]]))),
    "lengths": dict(mask=mh.KeyLengths(torch.tensor([13, 9]), torch.tensor([13, 9]))),
    "packed": dict(mask=mh.Causal() & mh.Documents(torch.tensor([[0] * 13, [0] * 5 + [1] * 8]))),
    "booleans": dict(mask=mh.Dense(_SOME)),
    "positions": dict(mask=mh.Causal() & mh.Positions(torch.arange(L), torch.arange(L))),
    "alibi": dict(mask=mh.Causal(), bias=ALiBi(torch.linspace(0.1, 1, H))),
    "bias": dict(bias=torch.randn(1, H, L, L, generator=torch.Generator().manual_seed(5))),
    "capped, scaled": dict(softcap=1.5, scale=0.9),
    "sinks": dict(mask=mh.Causal(), sinks=torch.linspace(-1, 2, H)),
}
INDICES = [
    (0, 5, slice(3, 9)),
    (1, 2, 7),
    (slice(None), [4, 0, 0], slice(None, None, 3), [12, -1]),
    (..., slice(2, 4)),
    (1, ..., torch.tensor([3, 1])),
    (-1,),
    1,
    (slice(None), np.array([2, 5]), 4, slice(0, 0)),
    (slice(None), [2, 5], [0, 12, 3], [5, 6]),
]


def kept(options: dict) -> tuple[KeptCall, Tensor, Tensor]:
    """A call to keep; its whole weights and logits in float64."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(B, H, L, 8, generator=generator)
    key = torch.randn(B, HKV, L, 8, generator=generator)
    fields = dict(mask=None, bias=None, scale=None, softcap=None, sinks=None, dropout_p=0.0)
    problem = describe(query, key, key, **(fields | options), stats=("lse",))
    call = KeptCall.of(problem, library.run(problem, "auto")[1]["lse"], Copies())
    logits = call.call.query.double() @ call.call.key.double().repeat_interleave(3, 1).mT
    logits = logits * problem.scale
    if problem.softcap is not None:
        logits = problem.softcap * torch.tanh(logits / problem.softcap)
    if isinstance(problem.bias, Tensor):
        logits = logits + problem.bias
    elif problem.bias is not None:
        distance = (torch.arange(L)[:, None] - torch.arange(L)).abs()
        logits = logits - problem.bias.slopes.double()[:, None, None] * distance
    logits = logits.masked_fill(~problem.parts.visible().expand(logits.shape), -torch.inf)
    outcomes = logits
    if problem.sinks is not None:
        sink = problem.sinks.double()[None, :, None, None].expand(B, H, L, 1)
        outcomes = torch.cat((logits, sink), -1)
    return call, outcomes.softmax(-1).nan_to_num(0.0)[..., :L], logits


def product(whole: Tensor, index: object) -> Tensor:
    """The same index, lists taken axis by axis."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part if part is Ellipsis else None for part in parts]:
        at = next(place for place, part in enumerate(parts) if part is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (5 - len(parts))
    for axis in reversed(range(len(parts))):
        part = parts[axis]
        part = torch.as_tensor(part) if isinstance(part, list | np.ndarray) else part
        whole = whole[(slice(None),) * axis + (part,)]
    return whole


@pytest.mark.parametrize("name", CALLS)
def test_any_cells_are_those_of_the_whole_matrix(name: str) -> None:
    call, weights, logits = kept(CALLS[name])
    for rows, whole in ((LazyRows(call, "softmax"), weights), (LazyRows(call, "logits"), logits)):
        assert (rows.shape, rows.ndim, len(rows)) == ((B, H, L, L), 4, B)
        for index in INDICES:
            got, want = rows[index], product(whole, index)
            assert got.shape == want.shape, index
            assert got.dtype == rows.dtype == torch.float32
            torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-6)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(mh.MultiHeadAttention(12, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=mh.Causal())
        return x


def patterns(length: int = 9, **choice) -> LazyWeights:
    model = Two()
    with torch.inference_mode(), mh.watch(model, keep="weights", **choice) as heads:
        model(torch.randn(2, length, 12))
    return heads.record().patterns


def test_names_are_those_of_transformer_lens() -> None:
    found = patterns()
    assert list(found) == [
        f"blocks.{layer}.attn.{name}"
        for layer in range(2)
        for name in ("hook_attn_scores", "hook_pattern")
    ]
    assert found.layers == {0: "layers.0", 1: "layers.1"}
    assert patterns(layers=[1]).layers == {1: "layers.1"}
    scores = found["blocks.1.attn.hook_attn_scores"]
    assert scores.shape == (2, 3, 9, 9)
    assert scores[0, 0, 2, 3] == -torch.inf
    torch.testing.assert_close(
        scores[:].softmax(-1), found["blocks.1.attn.hook_pattern"][:], rtol=1e-5, atol=1e-6
    )
    assert "blocks.2.attn.hook_pattern" not in found
    with pytest.raises(KeyError, match=r"blocks\.\{l\}\.attn\.hook_pattern .*for l in 0, 1"):
        found["blocks.2.attn.hook_pattern"]


def test_what_other_tools_take() -> None:
    found = patterns()
    matrices = found.matrices(sample=1)
    assert [tuple(it.shape) for it in matrices] == [(1, 3, 9, 9)] * 2
    for layer, matrix in enumerate(matrices):
        lazy = found[f"blocks.{layer}.attn.hook_pattern"]
        assert torch.equal(matrix[0], lazy[1])
        assert np.array_equal(np.asarray(lazy)[1], matrix[0])
        assert torch.equal(lazy.detach(), lazy[:])
        torch.testing.assert_close(matrix.sum(-1), torch.ones(1, 3, 9))
    long = patterns(length=600)
    with pytest.raises(mh.ArgumentError, match="up to 512 tokens; this text has 600"):
        long.matrices()
    with pytest.raises(mh.ArgumentError, match=r"Ask for rows, as in patterns\[name\]"):
        np.asarray(long["blocks.0.attn.hook_pattern"])
    assert long.matrices(most_tokens=600)[0].shape == (1, 3, 600, 600)
    assert long["blocks.0.attn.hook_pattern"][0, 1, 599].sum() == pytest.approx(1)


def test_what_is_kept_does_not_change_with_a_cache() -> None:
    layer = mh.MultiHeadAttention(12, 3)
    x = torch.randn(1, 9, 12)
    cache = mh.StaticKVCache(1, 3, 9, 4)
    with torch.no_grad(), mh.watch(layer, keep="weights") as heads:
        layer(x, mask=mh.Causal(), cache=cache)
        before = heads.record().patterns["blocks.0.attn.hook_pattern"]
        want = before[:].clone()
        cache.reset()
        layer(torch.randn(1, 9, 12), mask=mh.Causal(), cache=cache)
    assert torch.equal(before[:], want)
    after = heads.record().patterns["blocks.0.attn.hook_pattern"]
    assert not torch.equal(after[:], want)


def test_without_keep_one_sentence_says_what_to_do() -> None:
    model = Two()
    with torch.no_grad(), mh.watch(model) as heads:
        model(torch.randn(1, 5, 12))
    found = heads.record().patterns
    assert len(found) == 0
    with pytest.raises(KeyError, match="keep='weights'"):
        found["blocks.0.attn.hook_pattern"]
    with pytest.raises(mh.ModelError, match="keep='weights'"):
        found.matrices()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 6), "The head axis has 6 places, -6 to 5; got 6"),
        ((0, 0, 1.5), "The query axis takes an integer, a slice or a list of integers; got 1.5"),
        ((0, 0, 0, 0, 0), "There are four axes"),
        ((0, 0, torch.ones(L, dtype=torch.bool)), "The query axis takes an integer"),
    ],
)
def test_indices_that_are_none(index: tuple, message: str) -> None:
    rows = LazyRows(kept({})[0], "softmax")
    with pytest.raises(mh.ArgumentError, match=message):
        rows[index]


@pytest.mark.parametrize("what", ["booleans", "padding", "bias", "slopes"])
def test_what_is_kept_does_not_change_with_the_masks_of_the_caller(what: str) -> None:
    numbers = torch.ones(L, L) if what != "padding" else torch.ones(1, L)
    options = {
        "booleans": lambda: dict(mask=mh.Dense(shown)),
        "padding": lambda: dict(mask=mh.KeyPadding(shown)),
        "bias": lambda: dict(bias=numbers),
        "slopes": lambda: dict(bias=ALiBi(numbers[0, :H])),
    }
    shown = numbers.bool()
    call, weights, _ = kept(options[what]())
    numbers[:, 1:3] = 5.0
    shown[:, 1:3] = False
    torch.testing.assert_close(
        LazyRows(call, "softmax").detach().double(), weights, rtol=1e-5, atol=1e-6
    )


def test_layers_that_share_a_mask_share_its_copy() -> None:
    copies = Copies()
    mask = torch.rand(1, 1, L, L) < 0.5
    first, second = copies.of(mask), copies.of(mask.clone())
    assert first.data_ptr() == second.data_ptr() != mask.data_ptr()
    wide = copies.of(mask.expand(7, 3, L, L))
    assert wide.shape == (7, 3, L, L)
    assert wide.untyped_storage().nbytes() == L * L
    mask.logical_not_()
    assert torch.equal(copies.of(mask), mask)
    assert torch.equal(first, ~mask)


def test_samples_are_iterated_over() -> None:
    call, weights, _ = kept({})
    rows = list(LazyRows(call, "softmax"))
    assert len(rows) == B
    for row, want in zip(rows, weights, strict=True):
        torch.testing.assert_close(row.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [None, "a", ["a"], {}])
def test_what_is_no_index_is_refused(wrong: object) -> None:
    call, _, _ = kept({})
    with pytest.raises(mh.ArgumentError, match="The head axis takes an integer, a slice or a list"):
        LazyRows(call, "softmax")[0, wrong]
