"""Stability: what a training step's heads did, seen without changing it."""

import copy
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import families
import multihead as mh
from close import assert_close
from layers import by_formula
from multihead.heads import (
    StabilityReport,
    StabilityThresholds,
    all_reduced,
    stability,
    trainer_callback,
)
from multihead.heads.training.diagnosis import table
from requires import require


def small_model(**options: object) -> mh.LanguageModel:
    torch.manual_seed(2)
    block = mh.BlockConfig(24, 4, 32, num_kv_heads=2, rope=mh.RoPE(), **options)
    return mh.LanguageModel(mh.LanguageModelConfig(31, (block,) * 2))


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 31, shape, generator=torch.Generator().manual_seed(9))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_are_the_dense_ones(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    layer = mh.MultiHeadAttention(18, 3, head_dim=7, softcap=2.0, qkv_bias=True)
    with torch.no_grad():
        layer.qkv_proj.weight.mul_(4)
    x = torch.randn(2, 13, 18)
    mask = mh.Causal()

    def dense(kind: torch.dtype) -> dict[str, torch.Tensor]:
        held, y = copy.deepcopy(layer).to(dtype).to(kind), x.to(dtype).to(kind)
        q, k, _ = held.qkv_proj(y).split((21, 21, 21), -1)
        q, k = (it.unflatten(-1, (3, 7)).transpose(1, 2) for it in (q, k))
        hidden = ~mask.to_dense(13, 13)
        qk = q @ k.mT / 7**0.5
        logits = (2 * torch.tanh(qk / 2)).masked_fill(hidden, -torch.inf)
        weights = logits.softmax(-1)
        entropy = torch.special.entr(weights).sum(-1)
        visible = torch.arange(1, 14).to(kind)
        return {
            "max_qk": qk.masked_fill(hidden, -torch.inf).amax((0, 2, 3))[None],
            "max_logit": logits.amax((0, 2, 3))[None],
            "entropy": entropy.mean((0, 2))[None],
            "entropy_share": (entropy[..., 1:] / visible[1:].log()).mean((0, 2))[None],
        }

    exact, plain = dense(torch.float64), dense(dtype)
    model = layer.to(dtype)
    with stability(model) as monitor:
        model(x.to(dtype), mask=mask)
        report = monitor.step()
    assert report.layers == ("",)
    assert report.queries.tolist() == [[26] * 3]
    for name, want in exact.items():
        got = torch.from_numpy(getattr(report, name))
        assert_close(got.to(dtype), want, plain[name], what=name)


def step_of(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """Loss and gradients of one step, and the random number that is drawn next."""
    torch.manual_seed(0)
    loss = loss_of(model, ids) if isinstance(model, mh.LanguageModel) else model(ids, labels=ids)[0]
    model.zero_grad()
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *grads, torch.rand(3)]


@pytest.mark.parametrize("rows", ["all", 5])
@pytest.mark.parametrize("kind", ["ours", "dropout", "sdpa", "eager", "multihead"])
def test_outputs_gradients_and_random_numbers_keep_their_bits(kind: str, rows) -> None:
    if kind in ("ours", "dropout"):
        model, ids = small_model(softcap=5.0, sinks=True), tokens(2, 17)
        if kind == "dropout":
            for block in model.blocks:
                block.attention.dropout = 0.3
    else:
        require("models")
        from multihead.integrations.transformers import use

        model, ids = families.build("llama", attention_dropout=0.2), tokens(2, 17)
        use(model) if kind == "multihead" else model.set_attn_implementation(kind)
    model.train()
    want = step_of(model, ids)
    with stability(model, rows=rows) as monitor:
        got = step_of(model, ids)
        report = monitor.step()
    assert report.queries.min() == (34 if rows == "all" else 10)
    assert all(map(torch.equal, got, want))
    assert all(map(torch.equal, step_of(model, ids), want))  # and afterwards


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "deepseek_v3", "bert", "t5"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_beside_other_kernels_the_same_is_seen(family: str, side: str) -> None:
    require("models")
    from multihead.integrations.transformers import use

    ids, mask = families.padded([13, 7, 2], side)
    extra = {"labels": ids} if family == "t5" else {}
    reports = {}
    for kind in ("multihead", "sdpa", "eager"):
        model = families.build(family)
        use(model) if kind == "multihead" else model.set_attn_implementation(kind)
        with stability(model) as monitor:
            model(ids, attention_mask=mask, **extra)
            reports[kind] = monitor.step()
    ours = reports["multihead"]
    for kind in ("sdpa", "eager"):
        theirs = reports[kind]
        assert theirs.layers == ours.layers
        decoder = "decoder" if family == "t5" else "-"  # padded queries of a cross-attention
        for place, name in enumerate(ours.layers):
            np.testing.assert_allclose(theirs.max_qk[place], ours.max_qk[place], rtol=1e-5)
            if decoder not in name:
                assert (
                    theirs.queries[place].tolist()
                    == ours.queries[place].tolist()
                    == [22] * len(ours.queries[place])
                )
                np.testing.assert_allclose(theirs.entropy[place], ours.entropy[place], rtol=1e-4)


def test_every_few_steps_and_over_accumulated_batches() -> None:
    model = small_model()
    batches = [tokens(1, 11), tokens(3, 11).flip(0), tokens(2, 11)]
    alone = []
    for batch in batches:
        with stability(model) as monitor:
            model(batch)
            alone.append(monitor.step())
    with stability(model, every=3) as monitor:
        for step in range(5):
            assert monitor.is_looking == (step % 3 == 0)
            hooks = len(model._forward_pre_hooks)
            assert hooks == int(monitor.is_looking)
            for batch in batches:
                loss_of(model, batch).backward()
            report = monitor.step()
            assert (report is not None) == (step % 3 == 0)
        assert [it.step for it in monitor.reports] == [0, 3]
    assert not model._forward_pre_hooks
    report = monitor.reports[-1]
    assert (report.max_qk == np.maximum.reduce([it.max_qk for it in alone])).all()
    assert (report.queries == sum(it.queries for it in alone)).all()
    weighted = sum(it.entropy * it.queries for it in alone) / report.queries
    np.testing.assert_allclose(report.entropy, weighted, rtol=1e-12)


def test_validation_does_not_count() -> None:
    model = small_model()
    with stability(model) as monitor:
        loss_of(model, tokens(1, 9)).backward()
        with torch.no_grad():
            model(tokens(4, 19))
        assert (monitor.step().queries == 9).all()
        with torch.no_grad():
            model(tokens(4, 19))
        assert monitor.step() is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_counted_once(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(mh.MultiHeadAttention(12, 2) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model = Checkpointed()
    with stability(model) as monitor:
        model(torch.randn(2, 5, 12, requires_grad=True)).sum().backward()
        report = monitor.step()
    assert report.layers == ("layers.0", "layers.1")
    assert (report.queries == 10).all()


@pytest.mark.parametrize("implementation", ["sdpa", "multihead"])
def test_checkpointing_of_transformers(implementation: str) -> None:
    require("models")
    from multihead.integrations.transformers import use

    model = families.build("llama")
    use(model) if implementation == "multihead" else model.set_attn_implementation("sdpa")
    model.train()
    model.gradient_checkpointing_enable()
    ids = tokens(2, 9)
    with stability(model) as monitor:
        model(ids, labels=ids).loss.backward()
        assert (monitor.step().queries == 18).all()


def test_the_graph_of_a_compiled_model_is_not_broken() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> object:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    layer = mh.MultiHeadAttention(12, 2)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(1, 6, 12)
    with stability(compiled, every=2) as monitor:
        seen = []
        for _ in range(4):
            compiled(x).sum().backward()
            seen.append(monitor.step())
    assert [report is not None for report in seen] == [True, False, True, False]
    assert len(graphs) == 1
    eager = stability(layer)
    layer(x)
    assert (eager.step().max_qk == seen[0].max_qk).all()
    eager.close()


def test_a_monitor_that_is_dropped_leaves_compiled_models_compiled() -> None:
    graphs = []
    torch._dynamo.reset()
    layer, other = (mh.MultiHeadAttention(12, 2) for _ in range(2))
    compiled = torch.compile(other, backend=lambda graph, inputs: graphs.append(graph) or graph)
    x = torch.randn(1, 6, 12)
    monitor = stability(layer)
    layer(x)
    compiled(x)
    assert not graphs
    del monitor
    compiled(x)
    assert len(graphs) == 1
    assert not any(it._forward_pre_hooks or it._forward_hooks for it in layer.modules())


def test_models_of_torch_are_seen_after_replacing_their_attention() -> None:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True)
    x = torch.randn(2, 7, 12)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 5:] = True
    with mh.replace_sdpa(layer), stability(layer) as monitor:
        layer(x, src_key_padding_mask=padding).sum().backward()
        report = monitor.step()
    assert report.layers == ("self_attn",)
    q, k, _ = nn.functional.linear(
        x, layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias
    ).split(12, -1)
    q, k = (it.unflatten(-1, (2, 6)).transpose(1, 2) for it in (q, k))
    hidden = padding[:, None, None] | padding[:, None, :, None]
    want = (q @ k.mT / 6**0.5).masked_fill(hidden, -torch.inf).amax((0, 2, 3))
    np.testing.assert_allclose(report.max_qk[0], want.detach().numpy(), rtol=1e-5)
    assert report.queries.tolist() == [[12, 12]]


def test_a_sample_of_rows_bounds_from_below() -> None:
    model, ids = small_model(), tokens(2, 29)
    reports = {}
    for rows in ("all", 6, 29, 1000):
        with stability(model, rows=rows) as monitor:
            model(ids)
            reports[rows] = monitor.step()
    whole = reports["all"]
    assert reports[6].queries.tolist() == [[12] * 4] * 2
    assert (reports[6].max_qk <= whole.max_qk + 1e-6).all()
    for rows in (29, 1000):
        np.testing.assert_allclose(reports[rows].max_qk, whole.max_qk, rtol=1e-5)
        np.testing.assert_allclose(reports[rows].entropy, whole.entropy, rtol=1e-5)


def test_an_error_inside_leaves_nothing_behind() -> None:
    model = small_model()
    monitor = stability(model)
    with pytest.raises(mh.ArgumentError):
        model(torch.tensor([[99]]))
    from multihead.ops import dispatch

    assert dispatch.observer.get() is None
    model(tokens(1, 5))
    assert (monitor.step().queries == 5).all()
    monitor.close()
    assert not any(module._forward_hooks for module in model.modules())


def test_mistakes_are_named() -> None:
    for options in ({"every": 0}, {"rows": 0}, {"rows": "some"}, {"every": True}):
        with pytest.raises(mh.ArgumentError, match=f"{next(iter(options))} must be a whole number"):
            stability(nn.Linear(2, 2), **options)
    with pytest.raises(mh.DtypeError, match="model must be"):
        stability("gpt2")
    with stability(nn.Linear(2, 2)) as monitor:
        monitor.model(torch.ones(1, 2))
        with pytest.raises(mh.ModelError, match="Linear ran, but no attention of multihead"):
            monitor.step()


# --- the diagnosis --------------------------------------------------------------------------------


def report_of(max_qk: list[list[float]], entropy: list[list[float]], **options) -> StabilityReport:
    tables = {"max_qk": max_qk, "max_logit": max_qk, "entropy": entropy, "entropy_share": entropy}
    arrays = {name: table(map(np.array, rows), np.nan) for name, rows in tables.items()}
    counts = table([np.full(len(row), 8) for row in max_qk], 0).astype(np.int64)
    names = tuple(f"blocks.{place}.attention" for place in range(len(max_qk)))
    return StabilityReport(12, names, **arrays, queries=counts, share_queries=counts, **options)


@pytest.mark.filterwarnings("error")
def test_a_run_that_broke_is_said_to_have() -> None:
    nothing = [[math.nan, math.nan]]
    thresholds = StabilityThresholds(max_qk=math.inf)
    report = report_of(nothing, nothing, thresholds=thresholds)
    assert str(report).startswith("step 12: no max_qk is finite; 2 of 2 heads:\nlayer 0 head 0:")
    read = json.loads(report.to_json(), parse_constant=lambda it: pytest.fail(it))
    assert read["thresholds"] == {"max_qk": None, "entropy": 0.1}


def test_plain_words() -> None:
    report = report_of([[3.0, 212.4], [math.inf, 150.0, 9.0]], [[0.05, 0.02], [0.5, 2.0, 1.0]])
    assert str(report).splitlines() == [
        "step 12: largest max_qk 212 (layer 0 head 1), mean entropy 0.71 nats; 3 of 5 heads:",
        "layer 1 head 0: max_qk inf, entropy 0.50 nats: not finite",
        "layer 0 head 1: max_qk 212, entropy 0.02 nats: collapsed",
        "layer 1 head 1: max_qk 150, entropy 2.00 nats: large logits",
        "1 head reads a single key (entropy below 0.1 nats) with logits in bounds, as heads that "
        "rest on the first key do in healthy models",
    ]
    assert [it.name for it in report.findings] == [
        "blocks.1.attention",
        "blocks.0.attention",
        "blocks.1.attention",
    ]
    parsed = json.loads(report.to_json())
    assert parsed["max_qk"] == [[3.0, 212.4, None], [None, 150.0, 9.0]]
    assert parsed["findings"][0]["max_qk"] is None


def test_thresholds_are_the_users() -> None:
    quiet = report_of([[90.0]], [[0.02]])
    assert quiet.findings == ()
    assert "no head is reported" in str(quiet)
    strict = report_of([[90.0]], [[0.02]], thresholds=StabilityThresholds(max_qk=50, entropy=0.01))
    assert [it.kind for it in strict.findings] == ["large logits"]


def test_not_a_number_is_found_in_a_running_model() -> None:
    layer = mh.MultiHeadAttention(12, 2)
    with torch.no_grad():
        layer.qkv_proj.weight[0, 0] = torch.nan
    with stability(layer) as monitor:
        layer(torch.randn(1, 5, 12))
        report = monitor.step()
    assert [(it.head, it.kind) for it in report.findings] == [(0, "not finite")]


# --- training -------------------------------------------------------------------------------------


def test_the_callback_of_a_trainer(tmp_path) -> None:
    require("models")
    from transformers import Trainer, TrainingArguments

    model = families.build("llama")
    model.set_attn_implementation("sdpa")
    monitor = stability(model)
    reports = []
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        learning_rate=1e-3,
    )
    data = [{"input_ids": row, "labels": row} for row in tokens(12, 8)]
    before = model.model.layers[0].self_attn.q_proj.weight.clone()
    callback = trainer_callback(monitor, on_report=reports.append, clip=1.0)
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    assert [report.step for report in reports] == [0, 1, 2]
    assert all((report.queries == 4 * 8).all() for report in reports)
    assert reports[0].max_qk.max() > 2
    # Weights of a head shrank by far more than the optimizer moves them.
    after = model.model.layers[0].self_attn.q_proj.weight
    assert after.norm() < 0.7 * before.norm()
    assert not model._forward_pre_hooks


def test_a_callback_checks_its_tau() -> None:
    require("models")
    with (
        stability(nn.Linear(2, 2)) as monitor,
        pytest.raises(mh.ArgumentError, match="tau must be"),
    ):
        trainer_callback(monitor, clip=-1.0)


def test_the_trainers_callback_refuses_to_clip_by_one_of_several_processes() -> None:
    require("models")
    alone, two = SimpleNamespace(world_size=1), SimpleNamespace(world_size=2)
    with stability(nn.Linear(2, 2)) as monitor:
        clipping = trainer_callback(monitor, clip=100.0)
        clipping.on_train_begin(alone, None, None)
        with pytest.raises(mh.ArgumentError, match=r"2 processes train.*all_reduced"):
            clipping.on_train_begin(two, None, None)
        trainer_callback(monitor).on_train_begin(two, None, None)


def test_the_formula_agrees() -> None:
    """The layer that is watched computes the textbook's attention."""
    layer = mh.MultiHeadAttention(12, 2)
    x = torch.randn(1, 5, 12)
    with stability(layer):
        got = layer(x)
    assert_close(got, by_formula(layer, x.double()), by_formula(layer, x))


_RANK = """
import sys
from types import SimpleNamespace
import torch, torch.distributed as dist
torch.set_num_threads(1)
import multihead as mh
from multihead import heads

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
torch.manual_seed(0)
layer = mh.MultiHeadAttention(12, 2).double()
x = torch.randn(5, 7, 12).double()
monitor = heads.stability(layer)
layer(x)
whole = monitor.step()
layer(x[:2] if rank == 0 else x[2:])
joined = heads.all_reduced(monitor.step())
assert (joined.max_qk == whole.max_qk).all()
assert (joined.queries == whole.queries).all()
for name in ("entropy", "entropy_share"):
    assert abs(getattr(joined, name) - getattr(whole, name)).max() < 1e-12, name
if rank:
    with torch.no_grad():
        layer.qkv_proj.weight[0] = torch.nan
layer(x)
broken = heads.all_reduced(monitor.step())
assert [(it.head, it.kind) for it in broken.findings] == [(0, "not finite")]
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_reports_of_two_processes_are_one(tmp_path) -> None:
    path = str(tmp_path / "store")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), path], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, error = process.communicate(timeout=120)
        assert process.returncode == 0, error


def test_one_process_has_nothing_to_join() -> None:
    with pytest.raises(mh.ArgumentError, match=r"torch.distributed has no\s+process group"):
        all_reduced(report_of([[1.0]], [[1.0]]))
