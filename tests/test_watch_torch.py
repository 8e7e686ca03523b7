"""Watching plain torch modules: nothing changes, and masks are read for what they mean."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import multihead as mh
from dense_heads import Dense, attend, over_queries
from multihead.integrations.sdpa_masks import lower
from multihead.ops import dispatch

WIDTH, HEADS = 12, 3
LENGTH = 13


class Attention(nn.Module):
    """What a small GPT in one file has: projections and torch's attention."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * kv_heads * WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.cache: list[Tensor] | None = None
        self.dropout = 0.0

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.qkv(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        query, key, value = parts.split((HEADS, self.kv_heads, self.kv_heads), 1)
        return query, key, value

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        query, key, value = self.split(x)
        if self.cache is not None:
            self.cache = (
                [
                    torch.cat((old, new), 2)
                    for old, new in zip(self.cache, (key, value), strict=True)
                ]
                if self.cache
                else [key, value]
            )
            key, value = self.cache
        y = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            enable_gqa=self.kv_heads != HEADS,
        )
        return self.out(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Two blocks, causal."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(layers))
        self.checkpointed: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            is_causal = x.shape[1] > 1
            if self.checkpointed is None:
                x = x + block(x, None, is_causal)
            else:
                x = x + checkpoint(block, x, None, is_causal, use_reentrant=self.checkpointed)
        return x


def build(model: type[nn.Module] | nn.Module, *args, **options) -> nn.Module:
    torch.manual_seed(5)
    model = model(*args, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.6)
    return model.eval()


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(heads: mh.heads.Heads, layer: int, expected: dict[str, Tensor]) -> None:
    assert set(heads.statistics) == set(expected)
    for name, want in expected.items():
        got = heads.statistics[name][layer, : len(want)]
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6, err_msg=name)


# --- what a mask tensor says --------------------------------------------------------------------

_row = torch.arange(LENGTH)
_column = _row
_causal = _column <= _row[:, None]
_documents = torch.tensor([0] * 4 + [1] * 6 + [2] * 3)
_same = _documents == _documents[:, None]
_begin = torch.tensor([0] * 4 + [4] * 6 + [10] * 3)
_left = _column >= torch.tensor([[0], [5]])
_right = _column < torch.tensor([[LENGTH], [8]])


def square(visible: Tensor, real: Tensor | None = None, first: Tensor | int = 0) -> Dense:
    """Self-attention of whole texts."""
    visible = visible.expand(-1 if visible.ndim == 3 else 2, LENGTH, LENGTH)
    batch = len(visible)
    real = torch.ones(batch, LENGTH, dtype=torch.bool) if real is None else real
    return Dense(
        visible=visible,
        real=real,
        position=_row.expand(batch, -1),
        first=torch.as_tensor(first).expand(batch, LENGTH),
        previous=(_row - 1).expand(batch, -1),
    )


def newest(visible: Tensor, position: Tensor) -> Dense:
    """Queries at the end of what a cache holds."""
    return Dense(
        visible=visible.expand(2, -1, -1),
        real=torch.ones(2, len(position), dtype=torch.bool),
        position=position.expand(2, -1),
        first=torch.zeros(2, len(position), dtype=torch.long),
        previous=(position - 1).expand(2, -1),
    )


MASKS = {
    "triangle": square(_causal),
    "everything": square(torch.ones(LENGTH, LENGTH, dtype=torch.bool)),
    "window": square(_causal & (_column > _row[:, None] - 4)),
    "both-sided window": square((_column - _row[:, None]).abs() <= 3),
    "strictly earlier": square(_column < _row[:, None], real=(_row > 0).expand(2, -1)),
    "packed": square(_causal & _same, first=_begin),
    "packed, both sides": square(_same, first=_begin),
    "padded left": square(_causal & _left[:, None], _left, first=torch.tensor([[0], [5]])),
    "padded right": square(_causal & _right[:, None], _right),
    "padded right, both sides": square(
        torch.ones(1, LENGTH, 1, dtype=torch.bool) & _right[:, None], _right
    ),
    "prefix": square(_causal | (_column < 5)),
    "chunk": newest(_column <= _row[8:, None], _row[8:]),
    "chunk with a window": newest(
        (_column <= _row[8:, None]) & (_column > _row[8:, None] - 4), _row[8:]
    ),
    "chunk before room": newest(_column <= _row[4:9, None], _row[4:9]),
    "step before room": newest(_column <= _row[6:7, None], _row[6:7]),
}


@pytest.mark.parametrize("kind", ["bool", "float", "lowest"])
@pytest.mark.parametrize("name", MASKS)
def test_statistics_of_every_mask_tensor(name: str, kind: str) -> None:
    call = MASKS[name]
    rows, columns = call.visible.shape[1:]
    layer = build(Attention)
    x = draw(2, columns, WIDTH)
    with torch.no_grad():
        if rows != columns:
            layer.cache = list(layer.split(x)[1:])
            layer.forward = cached_forward.__get__(layer)  # queries of the first rows, keys of all
        mask = call.visible[:, None]
        if kind != "bool":
            lowest = -torch.inf if kind == "float" else torch.finfo(torch.float32).min
            mask = torch.zeros(mask.shape).masked_fill(~mask, lowest)
        start = int(call.position[0, 0])
        arguments = (x[:, start : start + rows], mask)
        with mh.replace_sdpa(layer):
            plain = layer(*arguments)
        with mh.watch(layer) as heads:
            watched = layer(*arguments)
        query, key, _ = layer.split(x)
    assert torch.equal(watched, plain)
    close(heads, 0, over_queries(attend(query[:, :, start : start + rows], key, call)))
    assert (heads.queries == int(call.real.sum())).all()


def cached_forward(self: Attention, x: Tensor, mask: Tensor) -> Tensor:
    query = self.split(x)[0]
    y = F.scaled_dot_product_attention(query, *self.cache, attn_mask=mask)
    return self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("triangle", 1),
        ("both-sided window", 17),
        ("strictly earlier", 1),
        ("packed", 3),
        ("packed, both sides", 3),
    ],
)
def test_masks_of_blocks_that_are_computed_apart(name: str, blocks: int) -> None:
    """So long that a mask tensor is cut into blocks, each at a place of its own."""
    times = 16
    wide = square_of_blocks(name, times)
    assert len(lower(wide.visible[:, None]).blocks) == blocks
    layer = build(Attention)
    x = draw(1, LENGTH * times, WIDTH)
    arguments = (x, wide.visible)
    with torch.no_grad():
        with mh.replace_sdpa(layer):
            plain = layer(*arguments)
        with mh.watch(layer) as heads:
            watched = layer(*arguments)
        query, key, _ = layer.split(x)
    assert torch.equal(watched, plain)
    close(heads, 0, over_queries(attend(query, key, wide)))
    assert heads.record().texts == max(1, wide.texts)


def square_of_blocks(name: str, times: int) -> Dense:
    """One text in which each token of `MASKS[name]` stands `times` over."""
    call = MASKS[name]
    length = LENGTH * times
    row = torch.arange(length)
    old = row // times
    visible = call.visible[0][old][:, old]
    if "strictly" in name:
        visible = row < row[:, None]
    elif "both" not in name:
        visible = visible & (row <= row[:, None])
    if "window" in name:
        visible = (row - row[:, None]).abs() <= times
    return Dense(
        visible=visible[None],
        real=visible.any(-1)[None],
        position=row[None],
        first=call.first[:1, old] * times,
        previous=row[None] - 1,
    )


# --- modules that people have -------------------------------------------------------------------


def test_prefill_chunks_and_steps_join_by_position() -> None:
    model = build(GPT)
    x = draw(2, 11, WIDTH)
    with torch.no_grad():
        with mh.watch(model) as whole:
            model(x)
        for layer in model.blocks:
            layer.cache = []
        with mh.watch(model) as pieces:
            model(x[:, :7])
            for token in range(7, 11):
                model(x[:, token : token + 1])
    assert whole.layers == pieces.layers == ("blocks.0", "blocks.1")
    assert (pieces.queries == 22).all()
    assert pieces.record().texts == 2
    for name, table in whole.statistics.items():
        np.testing.assert_allclose(
            pieces.statistics[name], table, rtol=1e-5, atol=1e-6, err_msg=name
        )


def test_output_equals_ours_bit_for_bit_and_torch_is_back_after_it() -> None:
    model = build(GPT)
    x = draw(2, 37, WIDTH)
    with torch.no_grad():
        before = model(x)
        with mh.replace_sdpa(model):
            ours = model(x)
        with mh.watch(model):
            watched = model(x)
        assert torch.equal(model(x), before)
    assert torch.equal(watched, ours)
    assert not any(it._forward_pre_hooks or it._forward_hooks for it in model.modules())


def test_an_error_inside_the_block_leaves_torch_as_it_was() -> None:
    model = build(GPT)
    x = draw(1, 5, WIDTH)
    before = model(x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), mh.watch(model):
        model(draw(1, 5, 7))
    assert dispatch.observer.get() is None
    assert not any(it._forward_pre_hooks or it._forward_hooks for it in model.modules())
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_count_once_and_gradients_are_those_without_watching(reentrant: bool) -> None:
    def gradients(watched: bool) -> tuple[list[Tensor], int]:
        model = build(GPT).train()
        model.checkpointed = reentrant
        x = draw(2, 7, WIDTH).requires_grad_()
        with mh.watch(model) if watched else mh.replace_sdpa(model) as heads:
            model(x).square().sum().backward()
        counted = int(heads.queries.max()) if watched else 0
        return [x.grad, *(it.grad for it in model.parameters())], counted

    want, _ = gradients(watched=False)
    got, counted = gradients(watched=True)
    assert counted == 14
    assert all(torch.equal(mine, yours) for mine, yours in zip(got, want, strict=True))


def test_accumulated_batches_add_up() -> None:
    model = build(GPT).train()
    with mh.watch(model) as heads:
        for seed in range(3):
            model(draw(2, 7, WIDTH, seed=seed)).sum().backward()
    assert (heads.queries == 3 * 14).all()
    assert heads.record().texts == 6


def test_dropout_is_torchs_and_statistics_are_those_before_it() -> None:
    def run(watched: bool) -> tuple[Tensor, object]:
        model = build(GPT, layers=1).train()
        model.blocks[0].dropout = 0.5
        torch.manual_seed(11)
        with mh.watch(model) if watched else mh.replace_sdpa(model) as heads:
            out = model(draw(2, 7, WIDTH))
        return out, heads

    (want, _), (got, heads) = run(False), run(True)
    assert torch.equal(got, want)
    layer = build(GPT, layers=1)
    with torch.no_grad(), mh.watch(layer) as calm:
        layer(draw(2, 7, WIDTH))
    assert (heads.queries == 14).all()
    for name, table in calm.statistics.items():
        assert np.array_equal(heads.statistics[name], table), name


def test_inference_mode_and_autograd_add_up_in_one_block() -> None:
    model = build(GPT)
    x = draw(1, 7, WIDTH)
    with mh.watch(model, keep="weights") as heads:
        with torch.inference_mode():
            model(x)
        model(x).sum().backward()
        with torch.inference_mode():
            model(x)
    assert (heads.queries == 21).all()
    assert heads.record().patterns["blocks.0.attn.hook_pattern"][0, 1].sum() == pytest.approx(7)


def test_one_module_that_runs_twice_is_one_layer() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x, None, True), None, True)

    model = build(Shared)
    with torch.no_grad(), mh.watch(model) as heads:
        model(draw(2, 7, WIDTH))
    assert heads.layers == ("block",)
    assert (heads.queries == 28).all()


def test_a_module_whose_heads_change_is_refused() -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for heads in (2, 3):
                parts = x.unflatten(-1, (heads, -1)).transpose(1, 2)
                F.scaled_dot_product_attention(parts, parts, parts)
            return x

    model = Changing()
    with (
        pytest.raises(mh.ModelError, match="attended with 2 heads and now with 3"),
        mh.watch(model),
    ):
        model(draw(1, 5, WIDTH))


def test_an_inner_watch_counts_alone() -> None:
    model = build(GPT)
    x = draw(1, 7, WIDTH)
    with torch.no_grad(), mh.replace_sdpa(model):
        want = model(x)
    with torch.no_grad(), mh.watch(model) as outer:
        model(x)
        with mh.watch(model) as inner:
            assert torch.equal(model(x), want)
        assert torch.equal(model(x), want)
    assert (inner.queries == 7).all()
    assert (outer.queries == 14).all()


def test_a_compiled_model_is_watched_eagerly() -> None:
    model = build(GPT)
    compiled = torch.compile(model, backend="eager")
    x = draw(1, 7, WIDTH)
    with torch.no_grad(), mh.watch(compiled) as heads:
        compiled(x)
    assert heads.layers == ("blocks.0", "blocks.1")
    assert (heads.queries == 7).all()


class Vision(nn.Module):
    """A vision transformer's block as people write it: the weights that it does not use are asked
    for, since that is what nn.MultiheadAttention does unless told.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        y = self.norm(x)
        return x + self.attention(y, y, y)[0]


def test_a_vision_transformer() -> None:
    model = build(Vision)
    image = draw(2, 3, 12, 16)
    with torch.no_grad():
        with mh.replace_sdpa(model):
            want = model(image)
        with mh.watch(model) as heads:
            assert torch.equal(model(image), want)
        y = model.norm(model.patch(image).flatten(2).transpose(1, 2))
        exact = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
        exact.load_state_dict({k: v.double() for k, v in model.attention.state_dict().items()})
        weights = exact(y.double(), y.double(), y.double(), average_attn_weights=False)[1]
    assert heads.layers == ("attention",)
    assert (heads.queries == 2 * 12).all()
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1).mean((0, 2))
    np.testing.assert_allclose(heads.statistics["entropy"][0], entropy, rtol=1e-5)
    first = weights[..., 0].mean((0, 2))
    np.testing.assert_allclose(heads.statistics["first_key"][0], first, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("wants_weights", [False, True])
def test_padding_of_torchs_own_attention(causal: bool, wants_weights: bool) -> None:
    layer = build(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True)
    x = draw(2, LENGTH, WIDTH)
    mask = ~_causal if causal else None
    call = square((_causal if causal else torch.ones_like(_causal)) & _right[:, None], _right)
    options = dict(key_padding_mask=~_right, attn_mask=mask, need_weights=wants_weights)
    with torch.no_grad():
        with mh.replace_sdpa(layer):
            want = layer(x, x, x, **options)
        with mh.watch(layer) as heads:
            got = layer(x, x, x, **options)
        parts = F.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    assert torch.equal(got[0], want[0])
    assert (got[1] is None) == (not wants_weights)
    if wants_weights:
        assert torch.equal(got[1], want[1])
    query, key, _ = parts.unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
    close(heads, 0, over_queries(attend(query, key, call)))
    assert (heads.queries == LENGTH + 8).all()


def test_an_encoder_of_torch_with_padding() -> None:
    block = nn.TransformerEncoderLayer(WIDTH, HEADS, 17, batch_first=True, dropout=0.0)
    model = build(nn.TransformerEncoder, block, 2, enable_nested_tensor=False)
    x = draw(2, LENGTH, WIDTH)
    with torch.no_grad():
        with mh.replace_sdpa(model):
            want = model(x, src_key_padding_mask=~_right)
        with mh.watch(model) as heads:
            assert torch.equal(model(x, src_key_padding_mask=~_right), want)
    assert heads.layers == ("layers.0.self_attn", "layers.1.self_attn")
    assert (heads.queries == LENGTH + 8).all()
    alone = build(nn.TransformerEncoder, block, 2, enable_nested_tensor=False)
    with torch.no_grad(), mh.watch(alone) as apart:
        alone(x[:1])
        alone(x[1:, :8])
    for name, table in apart.statistics.items():
        np.testing.assert_allclose(heads.statistics[name], table, rtol=1e-4, atol=1e-6)


def test_a_decoder_of_torch_reads_another_sequence() -> None:
    model = build(nn.Transformer, WIDTH, HEADS, 1, 1, 17, dropout=0.0, batch_first=True)
    source, target = draw(2, LENGTH, WIDTH), draw(2, 9, WIDTH)
    padding = ~_right
    with torch.no_grad(), mh.watch(model) as heads:
        model(source, target, src_key_padding_mask=padding, memory_key_padding_mask=padding)
    queries = dict(zip(heads.layers, heads.queries[:, 0].tolist(), strict=True))
    assert queries == {
        "encoder.layers.0.self_attn": LENGTH + 8,
        "decoder.layers.0.self_attn": 18,
        "decoder.layers.0.multihead_attn": 18,
    }


@pytest.mark.parametrize("by_name", [False, True])
def test_a_context_is_another_sequence_however_it_is_passed(by_name: bool) -> None:
    class Cross(nn.Module):
        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            other = x if context is None else context
            mask = torch.arange(other.shape[-2]) < 6  # at most
            return F.scaled_dot_product_attention(x, other, other, attn_mask=mask[None])

    model = Cross()
    x, context = draw(2, 3, 4, 5), draw(2, 3, 10, 5)
    with torch.no_grad(), mh.watch(model) as heads:
        model(x, context=context) if by_name else model(x, context)
    assert heads.queries.tolist() == [[8, 8, 8]]
    with torch.no_grad(), mh.watch(model) as alone:
        model(context, context=None) if by_name else model(context, None)
    assert alone.queries.tolist() == [[12, 12, 12]]


def test_layers_of_ours_and_of_torch_in_one_model() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ours = mh.MultiHeadAttention(WIDTH, HEADS)
            self.theirs = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.theirs(self.ours(x, mask=mh.Causal()), None, True)

    model = build(Mixed)
    x = draw(2, 7, WIDTH)
    with torch.no_grad():
        with mh.replace_sdpa(model):
            want = model(x)
        with mh.watch(model) as heads:
            assert torch.equal(model(x), want)
    assert heads.layers == ("ours", "theirs")
    assert (heads.queries == 14).all()


def test_grouped_heads_and_calls_of_any_leading_axes() -> None:
    layer = build(Attention, kv_heads=1)
    with torch.no_grad(), mh.watch(layer) as heads:
        layer(draw(2, 7, WIDTH), None, True)
    assert heads.queries.tolist() == [[14] * HEADS]

    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    model = Flat()
    with torch.no_grad(), mh.watch(model) as heads:
        model(draw(2, 5, 3, 7, 4))
    assert heads.queries.tolist() == [[2 * 5 * 7] * 3]


def test_a_model_without_calls_says_so_when_it_is_asked() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x.mT).softmax(-1) @ x

    model = Own()
    with mh.watch(model) as heads:
        with pytest.raises(mh.ModelError, match="did not run inside the block"):
            heads.record()
        model(draw(1, 5, 4))
    with pytest.raises(mh.ModelError, match=r"ran, but no attention was seen.*multiplies queries"):
        heads.record()
