"""QK-clip: the largest logit becomes tau, and nothing else changes."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import families
import multihead as mh
from multihead.heads import qk_clip, stability
from multihead.nn.packed_linear import Rows
from multihead.nn.prepack import Shape
from requires import require

TAU = 2.0


def measured(model: nn.Module, run: Callable[[], object]) -> tuple[object, torch.Tensor]:
    """The report of one run, and its max_qk [layers, heads]."""
    with stability(model) as monitor:
        run()
        report = monitor.step()
    return report, torch.from_numpy(report.max_qk)


def layer(**options: object) -> mh.MultiHeadAttention:
    torch.manual_seed(1)
    built = mh.MultiHeadAttention(21, 6, head_dim=10, qkv_bias=True, rope=mh.RoPE(), **options)
    with torch.no_grad():
        built.qkv_proj.weight.mul_(5)
        built.qkv_proj.bias.normal_()
    return built.double()


def rows_of(built: mh.MultiHeadAttention, changed: torch.Tensor) -> tuple[set[int], set[int]]:
    """The query heads and the KV heads whose rows of the weight changed."""
    different = (changed != built.qkv_proj.weight).any(1)
    width, heads, kv_heads = built.head_dim, built.num_heads, built.num_kv_heads
    queries = {h for h in range(heads) if different[h * width : (h + 1) * width].all()}
    begin = heads * width
    keys = {g for g in range(kv_heads) if different[begin + g * width :][:width].all()}
    assert int(different.sum()) == width * (len(queries) + len(keys))
    return queries, keys


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
def test_a_clipped_head_has_tau_and_others_keep_their_bits(kv_heads: int) -> None:
    built = layer(num_kv_heads=kv_heads)
    x = torch.randn(2, 17, 21, dtype=torch.float64)

    def run() -> object:
        return built(x, mask=mh.Causal())

    report, before = measured(built, run)
    tau = float(before.median())
    above = {head for head in range(6) if before[0, head] > tau}
    assert 0 < len(above) < 6
    weight = built.qkv_proj.weight.clone()
    clipped = qk_clip(built, report, tau=tau)
    assert [it.head for it in clipped] == sorted(above)
    assert all(it.gamma == pytest.approx(tau / it.max_qk) for it in clipped)
    queries, keys = rows_of(built, weight)
    assert queries == above
    assert keys == (above if kv_heads == 6 else set())
    _, after = measured(built, run)
    for head in range(6):
        if head in above:
            assert after[0, head] == pytest.approx(tau, rel=1e-12)
        else:
            assert after[0, head] == before[0, head]


def test_keys_and_queries_share_the_factor_with_their_biases() -> None:
    built = layer()
    report, before = measured(built, lambda: built(torch.randn(1, 9, 21).double()))
    weight, bias = built.qkv_proj.weight.clone(), built.qkv_proj.bias.clone()
    (clipped, *_) = qk_clip(built, report, tau=float(before[0, 0]) / 4)
    assert clipped.head == 0
    for begin in (0, 60):
        half = slice(begin, begin + 10)
        assert torch.allclose(built.qkv_proj.weight[half], weight[half] / 2, rtol=1e-12)
        assert torch.allclose(built.qkv_proj.bias[half], bias[half] / 2, rtol=1e-12)
    assert torch.equal(built.qkv_proj.weight[120:], weight[120:])  # values


def test_cross_attention() -> None:
    torch.manual_seed(3)
    built = mh.MultiHeadAttention(20, 4, context_dim=11, qkv_bias=True).double()
    x, context = torch.randn(2, 5, 20).double(), torch.randn(2, 7, 11).double()
    report, before = measured(built, lambda: built(x, context))
    tau = float(before.min()) / 2
    assert len(qk_clip(built, report, tau=tau)) == 4
    _, after = measured(built, lambda: built(x, context))
    assert torch.allclose(after, torch.full_like(after, tau), rtol=1e-12)


@pytest.mark.parametrize("query_latent", [None, 13])
def test_latent_attention_leaves_the_shared_key_alone(query_latent: int | None) -> None:
    torch.manual_seed(5)
    built = mh.LatentAttention(
        21,
        3,
        latent_dim=11,
        nope_dim=7,
        rope_dim=6,
        value_dim=5,
        query_latent_dim=query_latent,
    ).double()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(3)
    x = torch.randn(2, 15, 21, dtype=torch.float64)
    plain = copy.deepcopy(built)
    report, before = measured(built, lambda: built(x, mask=mh.Causal()))
    tau = float(before.max()) / 2
    clipped = {it.head: it.gamma for it in qk_clip(built, report, tau=tau)}
    _, after = measured(built, lambda: built(x, mask=mh.Causal()))
    for head in range(3):
        want = tau if head in clipped else float(before[0, head])
        assert after[0, head] == pytest.approx(want, rel=1e-12)
    name = "q_proj" if query_latent is None else "q_up_proj"
    query = getattr(built, name).weight / getattr(plain, name).weight
    up = built.kv_up_proj.weight / plain.kv_up_proj.weight
    for head, gamma in clipped.items():
        ones = query.new_ones
        want_q = torch.cat((ones(7) * gamma**0.5, ones(6) * gamma))
        assert torch.allclose(query[head * 13 :][:13], want_q[:, None].expand(13, query.shape[1]))
        want_up = torch.cat((ones(7) * gamma**0.5, ones(5)))
        assert torch.allclose(up[head * 12 :][:12], want_up[:, None].expand(12, up.shape[1]))
    assert torch.equal(built.kv_down_proj.weight, plain.kv_down_proj.weight)


FAMILIES = ("llama", "gpt2", "qwen2", "mistral", "gemma2", "deepseek_v3", "bert", "bart", "t5")


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_models(family: str) -> None:
    require("models")
    model = families.build(family)
    if family not in families.WITHOUT_SDPA:
        model.set_attn_implementation("sdpa")
    ids, mask = families.padded([13, 7, 2], "right")
    extra = {"labels": ids} if family in ("bart", "t5") else {}

    def run() -> object:
        return model(ids, attention_mask=mask, **extra)

    report, before = measured(model, run)
    tau = float(before.median())
    clipped = qk_clip(model, report, tau=tau)
    _, after = measured(model, run)
    first = {it.head for it in clipped if it.layer == report.layers[0]}
    # Later layers read what earlier ones wrote, which has changed.
    want = torch.tensor([tau if h in first else before[0, h] for h in range(before.shape[1])])
    assert torch.allclose(after[0], want.double(), rtol=1e-5)
    assert len(clipped) == int((before > tau).sum())


def test_one_projection_for_queries_keys_and_values() -> None:
    require("models")
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(2)
    config = Phi3Config(
        vocab_size=41,
        hidden_size=48,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=3,
        pad_token_id=0,
    )
    model = Phi3ForCausalLM(config).double()
    with torch.no_grad():
        model.model.layers[0].self_attn.qkv_proj.weight.mul_(40)
    ids = torch.randint(1, 41, (2, 11))
    report, before = measured(model, lambda: model(ids))
    tau = float(before.median())
    qk_clip(model, report, tau=tau)
    _, after = measured(model, lambda: model(ids))
    # The angles of the heads are in float32 there.
    assert torch.allclose(after, before.clamp(max=tau), rtol=1e-6)


@pytest.mark.parametrize("family", ["codegen", "gpt_bigcode", "olmo"])
def test_projections_that_mix_or_clamp_are_refused(family: str) -> None:
    require("models")
    import transformers

    sizes = {"vocab_size": 41, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    gpt = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
    llama = {"hidden_size": 32, "intermediate_size": 8, "num_attention_heads": 4}
    model = {
        "codegen": lambda t: t.CodeGenForCausalLM(t.CodeGenConfig(**sizes, **gpt, rotary_dim=8)),
        "gpt_bigcode": lambda t: t.GPTBigCodeForCausalLM(
            t.GPTBigCodeConfig(**sizes, **gpt, multi_query=False)
        ),
        "olmo": lambda t: t.OlmoForCausalLM(
            t.OlmoConfig(**sizes, **llama, num_hidden_layers=1, clip_qkv=2.0)
        ),
    }[family](transformers)
    report, _ = measured(model, lambda: model(torch.randint(3, 41, (1, 11))))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(mh.ModelError, match="cannot be clipped"):
        qk_clip(model, report, tau=1e-9)
    assert all(torch.equal(before[name], it) for name, it in model.state_dict().items())


def test_heads_that_see_nothing_do_not_shift_the_others() -> None:
    built, x = layer(), torch.randn(1, 9, 21, dtype=torch.float64)
    visible = torch.ones(1, 6, 9, 9, dtype=torch.bool)
    visible[:, 0] = False
    report, before = measured(built, lambda: built(x, mask=visible))
    tau = float(before[0, 1:].median())
    weight = built.qkv_proj.weight.clone()
    clipped = qk_clip(built, report, tau=tau)
    above = {head for head in range(6) if before[0, head] > tau}
    assert {it.head for it in clipped} == above
    assert rows_of(built, weight) == (above, above)


def test_masters_of_another_shape_are_refused() -> None:
    built = layer()
    report, before = measured(built, lambda: built(torch.randn(1, 9, 21).double()))
    weight, bias = built.qkv_proj.weight.clone(), built.qkv_proj.bias.clone()
    masters = {built.qkv_proj.bias: built.qkv_proj.bias.detach()[:7]}
    with pytest.raises(mh.ArgumentError, match=r"masters must have the shapes .*; got \[7\]"):
        qk_clip(built, report, tau=float(before.min()) / 2, masters=masters)
    assert torch.equal(built.qkv_proj.weight, weight)
    assert torch.equal(built.qkv_proj.bias, bias)


def test_a_missing_master_of_a_rounded_parameter_is_refused() -> None:
    built = layer().bfloat16()
    report, before = measured(built, lambda: built(torch.randn(1, 9, 21).bfloat16()))
    weight = built.qkv_proj.weight.clone()
    masters = {built.qkv_proj.bias: built.qkv_proj.bias.detach().float()}
    with pytest.raises(mh.ArgumentError, match=r"no tensor for a parameter of shape \[\d+, 21\]"):
        qk_clip(built, report, tau=float(before.min()) / 2, masters=masters)
    assert torch.equal(built.qkv_proj.weight, weight)
    assert torch.equal(masters[built.qkv_proj.bias], built.qkv_proj.bias.float())


def test_every_layer_is_clipped_by_its_own_inputs() -> None:
    """Layers given what they had before: each of them then is at tau."""
    require("models")
    from multihead.integrations.transformers import use

    model = families.build("llama").double()
    use(model)
    ids, _ = families.padded([13, 13], "right")
    inputs: dict[str, tuple] = {}

    def keep(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            inputs[name] = (args, kwargs)

        return hook

    report, before = measured(model, lambda: model(ids))
    for name in report.layers:
        attention = model.get_submodule(name)
        attention.register_forward_pre_hook(keep(name), with_kwargs=True)
    model(ids)
    given = dict(inputs)
    tau = float(before.median())
    qk_clip(model, report, tau=tau)
    for place, name in enumerate(report.layers):
        attention = model.get_submodule(name)
        args, kwargs = given[name]
        _, after = measured(attention, lambda: attention(*args, **kwargs))  # noqa: B023
        assert torch.allclose(after[0], before[place].clamp(max=tau), rtol=1e-10)


def test_master_weights_are_scaled_and_copied() -> None:
    built = layer().bfloat16()
    x = torch.randn(1, 9, 21).bfloat16()
    masters = {p: p.detach().double() + 1e-4 for p in built.parameters()}
    exact = {p: m.clone() for p, m in masters.items()}
    report, before = measured(built, lambda: built(x))
    qk_clip(built, report, tau=float(before[0, 0]) / 1.002, masters=masters)
    weight = built.qkv_proj.weight
    master, was = masters[weight], exact[weight]
    assert torch.allclose(master[:10], was[:10] * 1.002**-0.5, rtol=1e-9)
    assert torch.equal(weight[:10], master[:10].bfloat16())
    assert torch.equal(master[120:], was[120:])


def test_packed_weights_notice() -> None:
    torch.manual_seed(0)
    built = mh.MultiHeadAttention(64, 4)
    x = torch.randn(1, 24, 64)
    shape = Shape.of(built.qkv_proj)
    report, before = measured(built, lambda: built(x))
    with mh.prepack(built, plan={shape: Rows(1)}), torch.no_grad():
        assert "Packed" in type(built.qkv_proj).__name__
        old = built(x)
        qk_clip(built, report, tau=float(before.min()) / 2)
        packed = built(x)
    with torch.no_grad():
        assert torch.allclose(packed, built(x), atol=1e-6)
        assert not torch.allclose(packed, old, atol=1e-4)


def test_what_cannot_be_clipped_is_refused_whole() -> None:
    torch.manual_seed(6)
    normed = mh.MultiHeadAttention(20, 2, qk_norm=nn.RMSNorm)
    model = nn.Sequential(mh.MultiHeadAttention(20, 2), normed).double()
    x = torch.randn(1, 23, 20).double()
    report, before = measured(model, lambda: model(x))
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(mh.ModelError, match=r"1 \(MultiHeadAttention\) cannot be clipped: its q_n"):
        qk_clip(model, report, tau=float(before.max(1).values.min()) / 2)
    assert all(torch.equal(weights[name], x) for name, x in model.state_dict().items())
    assert qk_clip(model, report, tau=1e9) == ()  # nothing above: nothing refused

    class Adapter(nn.Linear):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__(base.in_features, base.out_features)
            self.base = base

    adapted = mh.MultiHeadAttention(20, 2).double()
    report, _ = measured(adapted, lambda: adapted(x))
    adapted.qkv_proj = Adapter(adapted.qkv_proj)
    with pytest.raises(mh.ModelError, match="Adapter is no plain linear layer"):
        qk_clip(adapted, report, tau=1e-6)


def test_reports_that_say_too_little_are_refused() -> None:
    built = layer()
    x = torch.randn(1, 9, 21).double()
    with stability(built, rows=3) as monitor:
        built(x)
        report = monitor.step()
    with pytest.raises(mh.ArgumentError, match="looked at 3 of each call"):
        qk_clip(built, report, tau=1.0)
    with pytest.raises(mh.DtypeError, match="not looked at: build the monitor with every=1"):
        qk_clip(built, None, tau=1.0)
    report, _ = measured(built, lambda: built(x))
    for tau in (0, -1.0, float("inf"), float("nan"), True, "100"):
        with pytest.raises(mh.ArgumentError, match="tau must be a finite number above 0"):
            qk_clip(built, report, tau=tau)
    inside = nn.Sequential(built)
    with pytest.raises(mh.ModelError, match="Linear has no module '0', which the report names"):
        qk_clip(nn.Linear(2, 2), measured(inside, lambda: inside(x))[0], tau=1e-3)
    with torch.no_grad():
        built.qkv_proj.weight[0, 0] = torch.nan
    report, _ = measured(built, lambda: built(x))
    with pytest.raises(mh.ModelError, match="max_qk that is not finite"):
        qk_clip(built, report, tau=1.0)


def trained(*, clip: bool, steps: int = 110) -> tuple[float, float]:
    """Mean loss of the last ten steps of a rate that is too high, and the largest max_qk."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    block = mh.BlockConfig(32, 4, 64, rope=mh.RoPE())
    model = mh.LanguageModel(mh.LanguageModelConfig(16, (block,) * 2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.04)
    generator = torch.Generator().manual_seed(1)
    losses, largest = [], 0.0
    with stability(model) as monitor:
        for _ in range(steps):
            half = torch.randint(0, 16, (8, 12), generator=generator)
            ids = torch.cat((half, half), 1)  # the second half can be known, by attending
            logits = model(ids)[:, 11:-1].flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, ids[:, 12:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report = monitor.step()
            if clip:
                qk_clip(model, report, tau=30.0)
            losses.append(loss.item())
            largest = max(largest, float(report.max_qk.max()))
    torch.set_num_threads(threads)
    return sum(losses[-10:]) / 10, largest


@pytest.mark.slow
def test_logits_of_a_run_explode_and_with_clipping_do_not() -> None:
    """Bounds hold for any seed that was tried; losses of such runs differ by chance."""
    _, largest = trained(clip=False)
    assert largest > 300
    loss, largest = trained(clip=True)
    assert largest < 60  # tau, and what one step adds
    assert loss < 2.0  # chance is 2.77
