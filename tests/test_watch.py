"""Watching a model: nothing changes, and every real query counts once."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import families
import multihead as mh
from close import assert_close
from multihead.heads import STATISTICS
from multihead.ops import dispatch
from requires import require

LENGTHS = [13, 7, 2]


def expected(
    model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Statistics [layers, heads] over the real queries, from eager's own whole matrices.

    Each text alone and without padding: rotary positions are relative.
    """
    model = model.to(dtype)
    model.set_attn_implementation("eager")
    texts = [text[real][None] for text, real in zip(ids, mask.bool(), strict=True)]
    with torch.no_grad():
        outputs = [model(text, output_attentions=True) for text in texts]
    per_text = [of_matrices(torch.cat(output.attentions)) for output in outputs]
    return {name: torch.cat([rows[name] for rows in per_text], -1).mean(-1) for name in per_text[0]}


def of_matrices(weights: torch.Tensor) -> dict[str, torch.Tensor]:
    """Statistics of causal matrices [layers, heads, n, n], query by query where they count."""
    column = torch.arange(weights.shape[-1])
    logs = torch.where(weights > 0, weights, 1).log()
    entropy = -(weights * logs).sum(-1)
    distance = (column[:, None] - column).abs()
    return {
        "entropy": entropy,
        "entropy_share": (entropy / (column + 1).to(weights.dtype).log())[..., 1:],
        "max_weight": weights.amax(-1),
        "mean_distance": (weights * distance).sum(-1),
        "sink_mass": weights[..., 0],
        "participation": 1 / weights.square().sum(-1),
        "previous_token": weights.diagonal(-1, -2, -1),
        "first_key": weights[..., 0],
    }


def close_to(statistics: dict[str, np.ndarray], exact: dict, plain: dict) -> None:
    for name, values in exact.items():
        # Means have smaller errors than rows, and a small model's can be exact by luck.
        assert_close(torch.from_numpy(statistics[name]), values, plain[name], factor=4.0, what=name)


@pytest.mark.parametrize("side", ["left", "right"])
def test_statistics_of_real_queries_only(side: str) -> None:
    require("models")
    ids, mask = families.padded(LENGTHS, side)
    model = families.build("llama")
    with torch.no_grad(), mh.watch(model) as heads:
        model(ids, attention_mask=mask)
    assert heads.layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert (heads.queries == sum(LENGTHS)).all()
    assert set(heads.statistics) == set(STATISTICS)
    plain = expected(families.build("llama"), ids, mask, torch.float32)
    close_to(heads.statistics, expected(model, ids, mask, torch.float64), plain)


def test_maxima_are_over_real_queries() -> None:
    require("models")
    ids, mask = families.padded([11], "left")
    wide_ids, wide_mask = (nn.functional.pad(x, (5, 0)) for x in (ids, mask))
    model = families.build("gpt2")
    positions = (wide_mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), mh.watch(model) as alone:
        model(ids)
    with torch.no_grad(), mh.watch(model) as padded:
        model(wide_ids, attention_mask=wide_mask, position_ids=positions)
    for name in ("max_logit", "max_qk"):
        np.testing.assert_allclose(padded.statistics[name], alone.statistics[name], rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "bert"])
def test_results_are_those_without_watching_bit_for_bit(family: str) -> None:
    require("models")
    from multihead.integrations.transformers import use

    ids, mask = families.padded(LENGTHS, "left")
    plain, watched = families.build(family), families.build(family)
    use(plain)
    with torch.no_grad():
        want = plain(ids, attention_mask=mask)[0]
        with mh.watch(watched):
            got = watched(ids, attention_mask=mask)[0]
    assert torch.equal(got, want)


def test_batches_stream_to_the_same_means() -> None:
    require("models")
    model = families.build("llama")
    ids, _ = families.padded([17, 17, 17], "left")
    with torch.no_grad(), mh.watch(model) as together:
        model(ids)
    with torch.no_grad(), mh.watch(model) as apart:
        model(ids[:2])
        model(ids[2:])
    assert np.array_equal(apart.queries, together.queries)
    for name in STATISTICS:
        np.testing.assert_allclose(
            apart.statistics[name], together.statistics[name], rtol=1e-5, atol=1e-7, err_msg=name
        )


def test_decoding_steps_join_the_prefill() -> None:
    require("models")
    model = families.build("llama")
    ids, mask = families.padded([9, 5], "left")
    with torch.no_grad(), mh.watch(model) as stepwise:
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False
        )
    # The last token that generate returns is chosen but not read.
    seen = torch.nn.functional.pad(mask, (0, 5), value=1)
    positions = (seen.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), mh.watch(model) as whole:
        model(out[:, :-1], attention_mask=seen, position_ids=positions)
    assert np.array_equal(stepwise.queries, whole.queries)
    assert (whole.queries == 9 + 5 + 2 * 5).all()
    for name in STATISTICS:
        np.testing.assert_allclose(
            stepwise.statistics[name], whole.statistics[name], rtol=1e-4, atol=1e-6, err_msg=name
        )


def test_a_recomputed_forward_is_not_counted_again() -> None:
    layer = mh.MultiHeadAttention(12, 3)
    x = torch.randn(2, 7, 12, requires_grad=True)
    with mh.watch(layer) as heads:
        checkpoint(layer, x, mask=mh.Causal(), use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert heads.queries.tolist() == [[14, 14, 14]]


def test_gradients_are_those_without_watching() -> None:
    layer = mh.MultiHeadAttention(12, 3)
    x = torch.randn(2, 7, 12, requires_grad=True)
    (want,) = torch.autograd.grad(layer(x, mask=mh.Causal()).square().sum(), x)
    with mh.watch(layer) as heads:
        (got,) = torch.autograd.grad(layer(x, mask=mh.Causal()).square().sum(), x)
    assert torch.equal(got, want)
    assert (heads.queries == 14).all()


class Tower(nn.Module):
    """Self-attention, then a cross-attention to what may be padded."""

    def __init__(self) -> None:
        super().__init__()
        self.cross = mh.MultiHeadAttention(12, 2, context_dim=5)
        self.own = mh.MultiHeadAttention(12, 3)

    def forward(self, x: torch.Tensor, context: torch.Tensor, mask: mh.Mask) -> torch.Tensor:
        return self.cross(self.own(x), context, mask=mask)


def test_our_own_layers_and_layers_of_different_size() -> None:
    tower = Tower()
    padding = mh.KeyPadding(torch.arange(7) < torch.tensor([[3], [7]]))
    with torch.no_grad(), mh.watch(tower) as heads:
        tower(torch.randn(2, 7, 12), torch.randn(2, 7, 5), padding)
    assert heads.layers == ("cross", "own")
    # In a cross-attention the padded key of the same number is not the query's own.
    assert heads.queries.tolist() == [[14, 14, 0], [14, 14, 14]]
    assert np.isnan(heads.statistics["entropy"]).tolist() == [[False, False, True], [False] * 3]


def test_a_context_that_a_cache_holds_is_another_sequence_too() -> None:
    """Called without the context, the layer does not read itself."""
    cross = Tower().cross
    x, context = torch.randn(2, 7, 12), torch.randn(2, 7, 5)
    mask = mh.KeyPadding(torch.arange(7) < torch.tensor([[3], [7]]))
    cache = mh.KVCache()
    with torch.no_grad():
        cross(x[:, :0], context, mask=mask, cache=cache)
        with mh.watch(cross) as heads:
            cross(x, mask=mask, cache=cache)
    assert heads.queries.tolist() == [[14, 14]]


def test_no_text_begins_in_a_cross_attention() -> None:
    """Each step's query stands where the only key stands."""
    cross = mh.MultiHeadAttention(12, 3, context_dim=5)
    context = torch.randn(1, 1, 5)
    with torch.no_grad(), mh.watch(cross) as heads:
        for _ in range(4):
            cross(torch.randn(1, 1, 12), context)
    assert heads.record().tokens == 4
    assert heads.record().one_text


def test_what_sees_nothing_does_not_count() -> None:
    layer = mh.MultiHeadAttention(12, 3)
    visible = torch.ones(5, 5, dtype=torch.bool)
    visible[2] = False
    with torch.no_grad(), mh.watch(layer) as heads:
        layer(torch.randn(1, 5, 12), mask=visible)
    assert (heads.queries == 4).all()


@pytest.mark.parametrize("sinks", [False, True])
def test_packed_documents_are_their_texts_alone(sinks: bool) -> None:
    torch.manual_seed(3)
    layer = mh.MultiHeadAttention(12, 3, sinks=sinks)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.8)
    x = torch.randn(1, sum(LENGTHS), 12)
    ids = torch.repeat_interleave(torch.tensor(LENGTHS))[None]
    with torch.no_grad(), mh.watch(layer) as packed:
        layer(x, mask=mh.Causal() & mh.Documents(ids))
    with torch.no_grad(), mh.watch(layer) as alone:
        for text in x.split(LENGTHS, dim=1):
            layer(text, mask=mh.Causal())
    assert (packed.queries == sum(LENGTHS)).all()
    assert packed.record().texts == alone.record().texts == 3
    for name, table in alone.statistics.items():
        np.testing.assert_allclose(
            packed.statistics[name], table, rtol=1e-5, atol=1e-6, err_msg=name
        )


def test_rolling_caches_name_keys_by_their_positions() -> None:
    layer = mh.MultiHeadAttention(12, 3)
    x = torch.randn(1, 17, 12)
    window = mh.Window(4, 0, keep_first=1)
    with torch.no_grad(), mh.watch(layer) as whole:
        layer(x, mask=mh.Causal() & window)
    cache = mh.WindowKVCache(5, keep_first=1)
    with torch.no_grad(), mh.watch(layer) as rolling:
        for begin in range(0, 17, 3):
            layer(x[:, begin : begin + 3], mask=mh.Causal() & window, cache=cache)
    assert np.array_equal(rolling.queries, whole.queries)
    for name, table in whole.statistics.items():
        np.testing.assert_allclose(
            rolling.statistics[name], table, rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "cache",
    [
        lambda dtype: mh.KVCache(),
        lambda dtype: mh.PagedKVCache(1, 2, 64, dtype=dtype),
        lambda dtype: mh.QuantizedKVCache(),
    ],
    ids=["growing", "paged", "int8"],
)
def test_caches_that_kernels_read_in_place_are_read_so_when_watched(cache, dtype) -> None:
    torch.manual_seed(6)
    layer = mh.MultiHeadAttention(256, 4, num_kv_heads=2).to(dtype)
    x = torch.randn(1, 80, 256, dtype=dtype)

    def run() -> torch.Tensor:
        held = cache(dtype)
        outs = [layer(x[:, :70], mask=mh.Causal(), cache=held)]
        outs += [layer(x[:, at : at + 1], mask=mh.Causal(), cache=held) for at in range(70, 80)]
        return torch.cat(outs, dim=1)

    with torch.inference_mode():
        want = run()
        with mh.watch(layer) as heads:
            assert torch.equal(run(), want)
        with mh.watch(layer) as whole:
            layer(x, mask=mh.Causal())
    assert (heads.queries == 80).all()
    for name, table in whole.statistics.items():
        np.testing.assert_allclose(
            heads.statistics[name], table, rtol=0.02, atol=2e-3, err_msg=name
        )


def test_calls_outside_of_the_model_are_not_counted() -> None:
    layer, other = mh.MultiHeadAttention(12, 3), mh.MultiHeadAttention(12, 3)
    with torch.no_grad(), mh.watch(layer) as heads:
        other(torch.randn(1, 5, 12))
        assert heads.layers == ()
        assert heads.statistics["entropy"].shape == (0, 0)
        layer(torch.randn(1, 5, 12))
    layer(torch.randn(1, 5, 12))
    assert heads.queries.tolist() == [[5, 5, 5]]


def test_everything_is_as_before_after_an_error() -> None:
    require("models")
    model = families.build("llama")
    model.model.layers[0].self_attn.o_proj = nn.Linear(3, 3)  # of a width that nothing has
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), mh.watch(model):
        model(torch.tensor([[3, 5]]))
    assert model.config._attn_implementation == "eager"
    assert dispatch.observer.get() is None
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert not any(module._forward_hooks for module in model.modules())


def test_an_error_inside_the_model_leaves_the_next_call_right() -> None:
    layer = mh.MultiHeadAttention(12, 3)
    with torch.no_grad(), mh.watch(nn.Sequential(layer, nn.Linear(12, 5))) as heads:
        with pytest.raises(mh.ArgumentError):
            layer(torch.randn(1, 5, 11))
        layer(torch.randn(1, 5, 12))
    assert heads.layers == ("0",)
    assert (heads.queries == 5).all()


def test_an_interrupted_call_leaves_nothing_running() -> None:
    """No hooks run after a KeyboardInterrupt."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([mh.MultiHeadAttention(12, 3)])
            self.is_interrupted = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner[0](x)
            if self.is_interrupted:
                raise KeyboardInterrupt
            return y

    model, other = nn.Sequential(Model()), mh.MultiHeadAttention(12, 3)
    x = torch.randn(1, 5, 12)
    with torch.no_grad(), mh.watch(model) as heads:
        with pytest.raises(KeyboardInterrupt):
            model(x)
        other(x)
        model[0].is_interrupted = False
        model(x)
        other(x)
    assert heads.layers == ("0.inner.0",)
    assert (heads.queries == 10).all()


def test_a_compiled_model_is_seen_too() -> None:
    layer = mh.MultiHeadAttention(16, 2)
    compiled = torch.compile(layer, backend="eager")
    x = torch.randn(1, 5, 16)
    with torch.no_grad(), mh.watch(layer) as expected:
        layer(x)
    for watched in (layer, compiled):
        with torch.no_grad(), mh.watch(watched) as heads:
            compiled(x)
        assert heads.layers == expected.layers
        assert np.array_equal(heads.statistics["entropy"], expected.statistics["entropy"])


def test_other_models_are_refused() -> None:
    for model, message in (
        (nn.Sequential(nn.Linear(3, 3)), r"Sequential has no attention to watch.*Watch the model"),
        ("smollm2", r"Only a torch\.nn\.Module can be watched; got a str"),
    ):
        with pytest.raises(mh.ModelError, match=message), mh.watch(model):
            pass


@pytest.mark.parametrize("family", ["llama", "gemma3", "bert"])
def test_a_module_of_the_users_around_a_transformers_model(family: str) -> None:
    require("models")
    from multihead.integrations.transformers import use

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = families.build(family)
            self.extra = nn.MultiheadAttention(5, 1, batch_first=True)

        def forward(self, ids: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(ids)[0], self.extra(x, x, x, need_weights=False)[0]

    torch.manual_seed(2)
    model = Wrapper().eval()
    ids, _ = families.padded([9, 9], "left")
    x = torch.randn(2, 7, 5)
    with torch.no_grad(), mh.watch(model) as heads:
        got = model(ids, x)
    assert heads.layers[-1] == "extra"
    assert heads.queries[:, 0].tolist() == [18] * (len(heads.layers) - 1) + [14]
    assert model.inner.config._attn_implementation == "eager"
    use(model.inner)
    with torch.no_grad(), mh.replace_sdpa(model):
        want = model(ids, x)
    assert all(torch.equal(mine, yours) for mine, yours in zip(got, want, strict=True))
