"""Properties of any call: hypothesis chooses it, and shrinks what fails.

Calls are drawn as in test_fuzz.py; beyond them, each operand has a layout of its own, a bias has
any broadcast shape with -inf in it, sinks may be absent for some heads, and what is hidden may hold
NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

import multihead as mh
from cases import LAYOUTS, Case
from checks import compare
from fuzzing import ALL, DTYPES, F64, literal, random_case, served
from requires import require
from serving import Options, baseline, exact
from test_native import assert_same_bits

BOUNDED = settings(
    max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
THOROUGH = settings(BOUNDED, max_examples=4000)
SCALES = st.sampled_from([None, 0.0, -1.0, 1.0]) | st.floats(0.01, 3) | st.floats(-3, -0.01)
APART = [name for name in LAYOUTS if "expanded" not in name]


@dataclass(frozen=True, repr=False)
class Call:
    """Tensors, options, and which pairs are visible, a bias' -inf included: [B, H, Lq, Lk]."""

    case: Case
    rules: list[mh.Mask]
    tensors: tuple[Tensor, Tensor, Tensor]
    poisoned: tuple[Tensor, Tensor, Tensor]
    options: Options
    visible: Tensor
    stats: tuple[str, ...]

    def __repr__(self) -> str:
        dtype = self.tensors[0].dtype
        strides = [x.stride() for x in self.tensors]
        return f"{self.case} {dtype} strides {strides} {self.options} {self.stats}"


@st.composite
def calls(draw: st.DrawFn, longest: int) -> Call:
    """Any call whose lengths are at most `longest`."""
    pick, seed = draw(st.randoms(use_true_random=False)), draw(st.integers(0, 2**16))
    case, rules = random_case(pick, seed, longest)
    case = replace(case, layout="contiguous", name=f"seed {seed}")
    dtype = draw(st.sampled_from(DTYPES))
    options = case.options(dtype)
    options["scale"] = draw(SCALES)
    randoms = torch.Generator().manual_seed(seed)
    if isinstance(options["bias"], Tensor):
        shape = options["bias"].shape
        bias = torch.randn(shape, generator=randoms)
        hidden = torch.rand(shape, generator=randoms) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
        kind = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, F64]))
        options["bias"] = bias.masked_fill(hidden, -torch.inf).to(kind)
    if isinstance(options["sinks"], Tensor):
        absent = torch.rand(case.heads, generator=randoms) < draw(st.sampled_from([0.0, 0.5]))
        options["sinks"] = options["sinks"].masked_fill(absent, -torch.inf)
    visible = literal(rules, case)
    if isinstance(options["bias"], Tensor):
        visible = visible & (options["bias"] != -torch.inf)
    layouts = [draw(st.sampled_from(list(LAYOUTS))) for _ in range(3)]
    tensors = [LAYOUTS[name](x) for name, x in zip(layouts, case.tensors(dtype), strict=True)]
    poisoned = list(tensors)
    unseen = ~visible.unflatten(1, (case.kv_heads, -1)).any(2).any(2)[..., None]
    for i in (1, 2):
        if layouts[i] in APART:
            poison = draw(st.sampled_from([0.0, torch.nan, torch.inf, -torch.inf]))
            poisoned[i] = LAYOUTS[layouts[i]](tensors[i].masked_fill(unseen, poison))
    stats = draw(st.sets(st.sampled_from(mh.STATISTICS)))
    event(f"rules: {len(rules)}")
    return Call(case, rules, tuple(tensors), tuple(poisoned), options, visible, tuple(stats))


def check_definition(call: Call) -> None:
    """Every backend: output and statistics, whatever hidden keys hold and is asked for beside."""
    expected = exact(call.tensors, call.options)
    near = baseline(call.tensors, call.options, expected)
    assert torch.equal(expected.argmax >= 0, call.visible.any(-1))
    for backend in served(call.tensors[0].dtype):

        def attend(stats: tuple[str, ...], backend: str = backend) -> mh.AttentionResult:
            return mh.attention_with_stats(
                *call.poisoned, stats=stats, backend=backend, **call.options
            )

        result = attend(mh.STATISTICS)
        compare(result, expected, near)
        some = attend(call.stats)
        assert torch.equal(some.out, result.out)
        assert set(some.stats) == set(call.stats)
        for name in call.stats:
            assert torch.equal(some.stats[name], result.stats[name]), name
        out = mh.attention(*call.poisoned, backend=backend, **call.options)
        assert torch.equal(out, result.out)


def permuted(rule: mh.Mask, samples: Tensor, heads: Tensor) -> mh.Mask:
    """The rule of a call whose samples and heads stand in another order."""

    def axis(x: Tensor, dim: int, order: Tensor) -> Tensor:
        return x.index_select(dim, order) if x.shape[dim] > 1 else x

    fields = {name: x for name, x in vars(rule).items() if isinstance(x, Tensor)}
    if isinstance(rule, mh.Window):
        return replace(rule, **{name: axis(x, 0, heads) for name, x in fields.items()})
    if isinstance(rule, mh.Dense):
        return mh.Dense(axis(axis(rule.visible, 0, samples), 1, heads))
    return replace(rule, **{name: axis(x, 0, samples) for name, x in fields.items()})


def check_permutation(call: Call, order: Callable[[int], Tensor]) -> None:
    """Samples, KV heads and the heads of a group in another order: the same bits, reordered."""
    group = call.case.heads // call.case.kv_heads
    samples, kv_heads, within = order(call.case.batch), order(call.case.kv_heads), order(group)
    heads = (kv_heads[:, None] * group + within).flatten()

    def attend(tensors: tuple[Tensor, ...], options: Options) -> mh.AttentionResult:
        return mh.attention_with_stats(*tensors, stats=mh.STATISTICS, backend="native", **options)

    options = dict(call.options)
    options["mask"] = reduce(and_, (permuted(it, samples, heads) for it in call.rules), ALL)
    bias, sinks = options["bias"], options["sinks"]
    if isinstance(bias, mh.ALiBi):
        options["bias"] = mh.ALiBi(bias.slopes[heads])
    elif isinstance(bias, Tensor):
        bias = bias[samples] if bias.shape[0] > 1 else bias
        options["bias"] = bias[:, heads] if bias.shape[1] > 1 else bias
    options["sinks"] = None if sinks is None else sinks[heads]
    query, key, value = (x[samples] for x in call.tensors)
    result = attend((query[:, heads], key[:, kv_heads], value[:, kv_heads]), options)
    whole = attend(call.tensors, call.options)
    stats = {name: whole.stats[name][samples][:, heads] for name in mh.STATISTICS}
    assert_same_bits(result, replace(whole, out=whole.out[samples][:, heads], stats=stats))


def orders(data: st.DataObject) -> Callable[[int], Tensor]:
    return lambda n: torch.tensor(data.draw(st.permutations(range(n))), dtype=torch.long)


@BOUNDED
@given(calls(longest=65))
def test_every_backend_equals_the_definition(call: Call) -> None:
    check_definition(call)


@BOUNDED
@given(calls(longest=65), st.data())
def test_samples_and_heads_may_stand_in_any_order(call: Call, data: st.DataObject) -> None:
    require("native")
    if "native" in served(call.tensors[0].dtype):
        check_permutation(call, orders(data))


@pytest.mark.proof
@THOROUGH
@given(calls(longest=257))
def test_thousands_of_calls_equal_the_definition(call: Call) -> None:
    check_definition(call)


@pytest.mark.proof
@THOROUGH
@given(calls(longest=257), st.data())
def test_thousands_of_calls_in_any_order(call: Call, data: st.DataObject) -> None:
    require("native")
    if "native" in served(call.tensors[0].dtype):
        check_permutation(call, orders(data))
