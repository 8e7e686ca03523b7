"""Restricting heads: the far ones are left, the near ones cost nothing."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import families
import multihead as mh
from close import assert_close
from multihead.heads import HeadWindows, decoding_cost, restrict, restricted, streaming
from multihead.heads.loss import next_token_loss
from multihead.heads.restricting.far_mass import far_mass
from requires import require


def model_of(**options: object) -> mh.LanguageModel:
    """Two layers of 6 heads on 3 KV heads, with weights so wide that attention is not flat."""
    torch.manual_seed(3)
    block = mh.BlockConfig(48, 6, 32, num_kv_heads=3, head_dim=8, rope=mh.RoPE(), **options)
    model = mh.LanguageModel(mh.LanguageModelConfig(41, (block,) * 2)).eval()
    with torch.no_grad():
        for layer in model.blocks:
            layer.attention.qkv_proj.weight.mul_(4)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 41, shape, generator=torch.Generator().manual_seed(8))


WINDOWS = HeadWindows(
    5,
    2,
    {"blocks.0.attention": 6, "blocks.1.attention": 6},
    {"blocks.0.attention": (0, 1, 4), "blocks.1.attention": (2, 3)},
)


def dense_masks(windows: HeadWindows, length: int) -> list[torch.Tensor]:
    """Who sees whom in each layer, [1, H, L, L], spelled out."""
    row, column = torch.arange(length)[:, None], torch.arange(length)
    masks = []
    for name, heads in windows.heads.items():
        near = (column > row - windows.window) | (column < windows.keep_first)
        chosen = torch.zeros(heads, dtype=torch.bool)
        chosen[list(windows.restricted.get(name, ()))] = True
        masks.append(((column <= row) & (near | ~chosen[:, None, None]))[None])
    return masks


def by_dense_masks(model: mh.LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    """The restricted model's logits, each layer given its whole mask."""
    plain = copy.deepcopy(model)
    for block, mask in zip(plain.blocks, dense_masks(WINDOWS, ids.shape[1]), strict=True):
        block.attention.register_forward_pre_hook(
            lambda module, args, kwargs, mask=mask: (args, {**kwargs, "mask": mh.Dense(mask)}),
            with_kwargs=True,
        )
    with torch.no_grad():
        return plain(ids)


@pytest.mark.parametrize("cache", [None, "growing", "window", "static"])
def test_a_language_model_sees_what_its_windows_let_in(cache: str | None) -> None:
    model, ids = model_of(), tokens(2, 23)
    exact = by_dense_masks(copy.deepcopy(model).double(), ids)
    plain = by_dense_masks(model, ids)
    with torch.no_grad(), restricted(model, WINDOWS):
        if cache is None:
            got = model(ids)
        else:
            caches = model.make_caches(cache, batch=2, capacity=23)
            parts = [model(ids[:, :9], caches=caches)]
            parts += [model(ids[:, i : i + 1], caches=caches) for i in range(9, 23)]
            got = torch.cat(parts, 1)
    assert_close(got, exact, plain)
    assert model.blocks[0].attention.window is None


def test_generating_with_window_caches_gives_the_same_tokens() -> None:
    model, prompt = model_of().double(), tokens(1, 11)
    with restricted(model, WINDOWS):
        want = mh.generate(model, prompt, max_new_tokens=20)
        got = mh.generate(model, prompt, max_new_tokens=20, cache="window")
    free = mh.generate(model, prompt, max_new_tokens=20)
    assert got == want
    assert got != free


def test_caches_hold_what_is_seen() -> None:
    model, ids = model_of(), tokens(1, 23)
    whole = model.make_caches("window")
    with torch.no_grad():
        model(ids, caches=whole)
        with restricted(model, WINDOWS):
            split = model.make_caches("window")
            model(ids, caches=split)
    # Layer 0 restricts both heads of KV head 0 and one of KV head 2; layer 1 both of KV head 1.
    assert [cache.windows for cache in split] == [(5, None, None), (None, 5, None)]
    token = 2 * 8 * 4
    for cache, full in zip(split, whole, strict=True):
        assert full.filled_nbytes == 3 * 23 * token
        assert cache.filled_nbytes == (2 * 23 + 7) * token + 7 * 4


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("cached", [False, True])
def test_transformers_models(family: str, cached: bool) -> None:
    require("models")
    from multihead.integrations.transformers import use

    model = families.build(family)
    use(model)
    ids, mask = families.padded([17, 11], "left")
    heads = model.config.num_attention_heads
    attention = "transformer.h.{}.attn" if family == "gpt2" else "model.layers.{}.self_attn"
    names = [attention.format(place) for place in range(2)]
    windows = HeadWindows(4, 2, dict.fromkeys(names, heads), {names[0]: (1,), names[1]: (0, 2)})
    # The same by eager, which is given each layer's whole mask, counted from the first real token.
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    wanted = dense_masks(windows, 17)

    def replace_mask(place: int):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
            rows = [
                nn.functional.pad(wanted[place][0, :, :n, :n], (17 - n, 0, 17 - n, 0))
                for n in (17, 11)
            ]
            seen = torch.stack(rows)
            lowest = torch.finfo(torch.float32).min
            return args, {**kwargs, "attention_mask": torch.where(seen, 0.0, lowest)}

        return hook

    for place, name in enumerate(names):
        eager.get_submodule(name).register_forward_pre_hook(replace_mask(place), with_kwargs=True)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        want = eager(ids, attention_mask=mask, position_ids=positions).logits
        before = model(ids, attention_mask=mask, position_ids=positions).logits
        with restricted(model, windows):
            if cached:
                first = model(
                    ids[:, :8],
                    attention_mask=mask[:, :8],
                    use_cache=True,
                    position_ids=positions[:, :8],
                )
                rest = model(
                    ids[:, 8:],
                    attention_mask=mask,
                    position_ids=positions[:, 8:],
                    past_key_values=first.past_key_values,
                )
                got = torch.cat((first.logits, rest.logits), 1)
            else:
                got = model(ids, attention_mask=mask, position_ids=positions).logits
        after = model(ids, attention_mask=mask, position_ids=positions).logits
    real = mask.bool()
    assert torch.allclose(got[real], want[real], atol=2e-4)
    assert not torch.allclose(got[real], before[real], atol=1e-2)
    assert torch.equal(before, after)


def test_far_mass_is_the_dense_one() -> None:
    model, rows = model_of(sinks=True).double(), tokens(2, 19)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.sinks.normal_()
    found = far_mass(model, rows, next_token_loss, window=5, keep_first=2)
    far = ~dense_masks(HeadWindows(5, 2, {"x": 1}, {"x": (0,)}), 19)[0][0, 0]
    want = {}

    def keep(name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            _, result = module.forward_with_stats(*args, **kwargs)
            weights = result.weights(slice(None), slice(None))
            want[name] = (weights * far).sum(-1)[..., 7:].mean((0, 2))

        return hook

    for name, module in model.named_modules():
        if isinstance(module, mh.MultiHeadAttention):
            module.register_forward_pre_hook(keep(name), with_kwargs=True)
    with torch.no_grad():
        model(rows)
    assert list(found.mass) == list(want)
    assert found.queries == 2 * 12
    assert found.kv_heads == dict.fromkeys(want, 3)
    for name, mass in want.items():
        np.testing.assert_allclose(found.mass[name], mass.numpy(), rtol=1e-10)


@pytest.mark.parametrize("unit", ["kv", "head"])
def test_heads_are_restricted_from_the_least_mass_on(unit: str) -> None:
    model = model_of()
    found = streaming(
        model, tokens(3 * 40), window=6, keep_first=2, length=40, unit=unit, count=3, controls=2
    )
    size = 2 if unit == "kv" else 1
    units = {
        (name, begin): mass[begin : begin + size].mean()
        for name, mass in found.far_mass.items()
        for begin in range(0, 6, size)
    }
    least = sorted(units, key=units.get)[:3]
    want = {name: [] for name, _ in least}
    for name, begin in least:
        want[name] += range(begin, begin + size)
    assert {name: sorted(heads) for name, heads in want.items()} == {
        name: list(heads) for name, heads in found.windows.restricted.items()
    }
    assert (found.units, found.chosen) == (6 if unit == "kv" else 12, 3)
    assert len(found.random_changes) == 2
    # What is said of the loss is so.
    last = tokens(3 * 40)[80:][None]
    with torch.no_grad():
        plain = float(next_token_loss(model, last))
        with restricted(model, found.windows):
            change = float(next_token_loss(model, last)) - plain
    assert found.loss == pytest.approx(plain, abs=1e-6)
    assert found.change == pytest.approx(change, abs=1e-5)
    assert str(found).count("\n") == (3 if unit == "kv" else 2)


@pytest.mark.parametrize("allowed", [0.0, 0.02, 1e9])
def test_the_largest_number_within_the_limit_is_found(allowed: float) -> None:
    model, text = model_of(), tokens(6 * 40)
    found = streaming(model, text, window=4, keep_first=0, length=40, max_loss=allowed, controls=1)
    tried = dict(found.tried)
    assert found.chosen == 6 if allowed > 1 else found.chosen <= 6
    assert found.chosen == 0 or tried[found.chosen] <= allowed
    assert found.chosen == 6 or tried[found.chosen + 1] > allowed
    assert len(found.random_changes) == (0 if found.chosen in (0, 6) else 1)
    assert found.rows == 2


def test_layers_with_windows_of_their_own_are_left() -> None:
    near = mh.BlockConfig(48, 6, 32, window=3)
    far = mh.BlockConfig(48, 6, 32)
    model = mh.LanguageModel(mh.LanguageModelConfig(41, (near, far)))
    found = streaming(model, tokens(90), window=4, keep_first=1, length=30, count=2, controls=0)
    assert list(found.far_mass) == ["blocks.1.attention"]
    with restricted(model, found.windows):
        assert model.blocks[0].attention.window.left == 2
    only = mh.LanguageModel(mh.LanguageModelConfig(41, (near,)))
    with pytest.raises(mh.ModelError, match="no head to restrict"):
        streaming(only, tokens(90), window=4, length=30, count=1)
    names = HeadWindows(4, 0, {"blocks.0.attention": 6}, {"blocks.0.attention": (1,)})
    with pytest.raises(mh.ModelError, match="has a window of its own for all heads"):
        restrict(model, names)


def test_windows_are_data() -> None:
    again = HeadWindows.from_json(WINDOWS.to_json())
    assert again == WINDOWS
    assert (again.count, again.total) == (5, 12)
    want = sum(int(mask.sum()) for mask in dense_masks(WINDOWS, 23))
    assert again.visible_pairs(23, 23) == want
    last = sum(int(mask[..., -1:, :].sum()) for mask in dense_masks(WINDOWS, 23))
    assert again.visible_pairs(1, 23) == last
    with pytest.raises(mh.InputError, match="no JSON of HeadWindows"):
        HeadWindows.from_json("{}")


def test_restricting_for_good_and_freeing() -> None:
    from multihead.models.checkpoints import to_checkpoint

    model, ids = model_of(), tokens(1, 23)
    with torch.no_grad():
        before = model(ids)
        restrict(model, WINDOWS)
        assert not torch.allclose(model(ids), before)
        with pytest.raises(mh.ModelError, match="windows of their own, which no checkpoint holds"):
            to_checkpoint(model, "llama")
        restrict(model, HeadWindows(5, 2, WINDOWS.heads, {}))
        assert torch.equal(model(ids), before)
    to_checkpoint(model, "llama")


def test_restricting_a_transformers_model_is_for_good() -> None:
    require("models")
    model, ids = families.build("llama"), tokens(1, 23)
    names = [f"model.layers.{place}.self_attn" for place in range(2)]
    count = model.config.num_attention_heads
    windows = HeadWindows(4, 1, dict.fromkeys(names, count), {names[0]: (0, 1)})
    with torch.no_grad():
        whole = model(ids).logits
        with restricted(model, windows):
            want = model(ids).logits
        assert model.config._attn_implementation != "multihead"
        restrict(model, windows)
        assert model.config._attn_implementation == "multihead"
        assert torch.equal(model(ids).logits, want)
        assert not torch.allclose(want, whole, atol=1e-3)
        restrict(model, HeadWindows(4, 1, windows.heads, {}))
        assert torch.allclose(model(ids).logits, whole, atol=1e-5)


def test_a_model_that_reads_no_windows_is_refused() -> None:
    require("models")
    import transformers

    config = transformers.BloomConfig(vocab_size=41, hidden_size=32, n_layer=1, n_head=4)
    model, name = transformers.BloomForCausalLM(config), "transformer.h.0.self_attention"
    windows = HeadWindows(4, 1, {name: 4}, {name: (0,)})
    with pytest.raises(mh.ModelError, match="computes attention in its own code"):
        restrict(model, windows)
    with pytest.raises(mh.ModelError, match="its own code"), restricted(model, windows):
        pass


@pytest.mark.parametrize("wrong", [(0, 0, 1), (0.5,), (True,)])
def test_restricted_heads_are_integers_each_once(wrong: tuple) -> None:
    with pytest.raises(mh.ArgumentError, match="integers, each once"):
        HeadWindows(4, 1, {"x": 4}, {"x": wrong})


def test_mistakes_are_named() -> None:
    model, text = model_of(), tokens(120)
    for options, message in (
        ({"window": 0}, "window must be a whole number from 1 on"),
        ({"keep_first": -1}, "keep_first must be a whole number from 0 on"),
        ({"max_loss": float("nan")}, "max_loss must be a number from 0 on"),
        ({"unit": "group"}, "unit must be 'kv' or 'head'"),
        ({"count": 7}, "count must lie between 0 and 6"),
    ):
        with pytest.raises(mh.ArgumentError, match=message):
            streaming(model, text, **{"window": 4, "length": 40, **options})
    with pytest.raises(mh.InputError, match="length must be above window"):
        streaming(model, text, window=40, length=40)
    with pytest.raises(mh.InputError, match=r"120 tokens, but three parts .* length=40 or less"):
        streaming(model, text, window=4, length=50)
    with pytest.raises(mh.ArgumentError, match="tokens must be the ids of one text"):
        streaming(model, text[None], window=4, length=40)
    with pytest.raises(mh.ModelError, match="has no module 'x'"):
        restrict(model, HeadWindows(4, 0, {"x": 2}, {"x": (1,)}))
    with pytest.raises(mh.ModelError, match="has 6 heads, but the windows are of 4"):
        restrict(model, HeadWindows(4, 0, {"blocks.0.attention": 4}, {}))
    latent = mh.LatentAttention(12, 2, latent_dim=4, nope_dim=4, rope_dim=2, value_dim=4)
    with pytest.raises(mh.ModelError, match="0 is a LatentAttention, which reads no windows"):
        restrict(nn.Sequential(latent), HeadWindows(4, 0, {"0": 2}, {"0": (1,)}))
    with pytest.raises(mh.ArgumentError, match=r"has heads 0 to 1; got \[2\]"):
        HeadWindows(4, 0, {"x": 2}, {"x": (2,)})


def test_an_encoder_has_nothing_far_behind() -> None:
    require("models")
    bert = families.build("bert")

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return model(ids)[0].mean((1, 2))

    with pytest.raises(mh.ModelError, match="does not read its own text from left to right"):
        streaming(bert, tokens(90), window=4, length=30, loss=loss)


def test_what_decoding_saves_is_measured() -> None:
    model, text = model_of(), tokens(203)
    cost = decoding_cost(model, WINDOWS, text, steps=3)
    assert (cost.context, cost.steps) == (200, 3)
    token = 2 * 8 * 4
    assert cost.whole_bytes == 2 * 3 * 200 * token
    assert cost.restricted_bytes == 2 * ((2 * 200 + 7) * token + 7 * 4)
    assert min(cost.whole_seconds, cost.restricted_seconds) > 0
    assert "caches 0.1 MiB, restricted 0.0 MiB (68 %)" in str(cost)
    assert model.blocks[0].attention.window is None
    with pytest.raises(mh.ModelError, match=r"Linear is no multihead\.LanguageModel"):
        decoding_cost(nn.Linear(2, 2), WINDOWS, text)
    with pytest.raises(mh.InputError, match="more than steps=16"):
        decoding_cost(model, WINDOWS, text[:16])
    with pytest.raises(mh.ArgumentError, match="steps must be"):
        decoding_cost(model, WINDOWS, text, steps=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_compiled_models_follow_their_windows(kind: str) -> None:
    torch._dynamo.reset()
    if kind == "ours":
        model, windows = model_of(), WINDOWS
    else:
        require("models")
        from multihead.integrations.transformers import use

        model = families.build("llama")
        use(model)
        names = ("model.layers.0.self_attn", "model.layers.1.self_attn")
        windows = HeadWindows(4, 2, dict.fromkeys(names, 6), {names[0]: (1, 2)})
    ids = tokens(2, 23)

    def logits(run: nn.Module) -> torch.Tensor:
        found = run(ids)
        return found if kind == "ours" else found.logits

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        free = logits(model)
        assert torch.equal(logits(compiled), free)
        with restricted(model, windows):
            near = logits(model)
            assert torch.equal(logits(compiled), near)
        assert not torch.equal(near, free)
        assert torch.equal(logits(compiled), free)
