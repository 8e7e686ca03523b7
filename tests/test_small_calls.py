"""A call of a known form runs at once; whatever the form does not say is described anew."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import multihead as mh
from cases import CASES, Case
from multihead.ops import dispatch, forms
from multihead.ops.backends import native
from multihead.ops.problem import Problem
from requires import require
from test_native import assert_same_bits

# The package holds the function of this name in the module's place.
module = sys.modules["multihead.ops.attention"]


@pytest.fixture(autouse=True)
def _no_known_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    require("native")
    monkeypatch.setattr(forms, "_known", {})


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with every call that is described."""
    calls: list[object] = []
    describe = module.describe

    def counted(*args: Any, **options: Any) -> Problem:
        calls.append(options)
        return describe(*args, **options)

    monkeypatch.setattr(module, "describe", counted)
    return calls


def tensors(queries: int = 3, keys: int = 7, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = ((2, 4, queries, 5), (2, 2, keys, 5), (2, 2, keys, 11))
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def anew(*inputs: Any, **options: Any) -> mh.AttentionResult:
    """The call with every statistic, described as if it were the first of its form."""
    forms._known.clear()
    return mh.attention_with_stats(*inputs, stats=mh.STATISTICS, **options)


CLOSED: Mapping[str, Callable[[], mh.Mask | None]] = {
    "nothing": lambda: None,
    "causal": mh.Causal,
    "window": lambda: mh.Window(3, 1, keep_first=2),
    "sliding window": lambda: mh.SlidingWindow(2),
    "prefix": lambda: mh.PrefixCausal(2),
    "start": lambda: mh.Causal() & mh.QueryStart(0),
}


@pytest.mark.parametrize("mask", CLOSED.values(), ids=CLOSED)
def test_a_closed_form_is_described_once(
    mask: Callable[[], mh.Mask | None], described: list[object]
) -> None:
    query, key, value = tensors()
    expected = anew(query, key, value, mask=mask())
    calls = len(described)
    for again in (query, query.clone(), query + 1):
        got = mh.attention_with_stats(again, key, value, stats=mh.STATISTICS, mask=mask())
        assert len(described) == calls
        assert_same_bits(got, anew(again, key, value, mask=mask()))
        calls = len(described)
    first = mh.attention(query, key, value, mask=mask())
    assert torch.equal(first, mh.attention(query, key, value, mask=mask()))
    assert torch.equal(first, expected.out)
    assert len(described) == calls + 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_gives_the_same_bits_again(case: Case) -> None:
    """Among the known forms of all other cases, in two dtypes."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs, options = case.tensors(dtype), case.options(dtype)
        expected = anew(*inputs, **options)
        for other in CASES:
            others = other.tensors(torch.float32)
            mh.attention_with_stats(*others, stats=mh.STATISTICS, mask=other.mask)
        for _ in range(2):
            got = mh.attention_with_stats(*inputs, stats=mh.STATISTICS, **options)
            assert_same_bits(got, expected)


def test_calls_that_differ_in_one_thing_share_nothing() -> None:
    """All pairs, equal ones too: the second call is what it would have been without the first."""
    query, key, value = tensors()
    scores = torch.zeros(4)
    plain: dict[str, Any] = {"inputs": (query, key, value)}
    calls = [
        plain,
        *(plain | {"mask": mask()} for mask in CLOSED.values()),
        plain | {"mask": mh.Window(1, 3, keep_first=2)},
        plain | {"mask": mh.Window(2, 1, keep_first=3)},
        plain | {"mask": mh.Window(3, 1)},
        plain | {"mask": mh.Window(None, 2)},
        plain | {"mask": mh.Window(2, None)},
        plain | {"mask": mh.QueryStart(2)},
        plain | {"mask": mh.Causal() & mh.QueryStart(2)},
        plain | {"mask": mh.Window(torch.tensor([1, 2, 3, 0]), 0)},
        plain | {"mask": mh.PrefixCausal(torch.tensor([2, 0]))},
        plain | {"mask": mh.KeyPadding(torch.arange(7) > torch.tensor([[2], [0]]))},
        plain | {"mask": torch.arange(7)[None] > torch.arange(3)[:, None]},
        *(plain | {"scale": scale} for scale in (1, 0.0, -0.5, True)),
        *(plain | {"softcap": cap} for cap in (1, 2.0)),
        plain | {"sinks": scores},
        plain | {"bias": mh.ALiBi(scores + 1)},
        plain | {"bias": torch.arange(7.0)[None]},
        plain | {"backend": "chunked"},
        plain | {"backend": "native"},
        {"inputs": [x.bfloat16() for x in (query, key, value)]},
        {"inputs": [x.double() for x in (query, key, value)]},
        {"inputs": (query[:, :2], key, value)},
        *(
            {"inputs": (query[:, :, rows], key, value), "mask": mask}
            for rows in (slice(2), slice(2, 3))
            for mask in (mh.Causal(), mh.PrefixCausal(2))
        ),
        {"inputs": (query, key[:, :1], value[:, :1])},
        {"inputs": (query, key, value[..., :5])},
        {"inputs": (query.mT.contiguous().mT, key, value)},
        {"inputs": (query, key.transpose(1, 2).contiguous().transpose(1, 2), value)},
        {"inputs": (query, key, torch._neg_view(value))},
        {"inputs": (query, key[:, :1].expand_as(key), value)},
    ]

    def run(call: dict[str, Any]) -> mh.AttentionResult:
        options = {name: value for name, value in call.items() if name != "inputs"}
        return mh.attention_with_stats(*call["inputs"], stats=mh.STATISTICS, **options)

    alone = []
    for call in calls:
        forms._known.clear()
        alone.append(run(call))
    for first, second in itertools.product(range(len(calls)), repeat=2):
        forms._known.clear()
        run(calls[first])
        assert_same_bits(run(calls[second]), alone[second])


def test_statistics_belong_to_the_form() -> None:
    query, key, value = tensors()
    expected = anew(query, key, value)
    for names in (("lse",), ("argmax", "entropy"), (), mh.STATISTICS, ("entropy", "argmax")):
        for _ in range(2):
            result = mh.attention_with_stats(query, key, value, stats=names)
            assert list(result.stats) == [name for name in mh.STATISTICS if name in names]
            for name in names:
                assert torch.equal(result.stats[name], expected.stats[name])


def test_a_mask_of_the_users_own_is_asked_each_time(described: list[object]) -> None:
    class Reach(mh.Window):
        reach = 0

        def add_to(self, lowering: Any) -> None:
            lowering.limit_right(self.reach)

    query, key, value = tensors()
    mask = Reach(0, 0)
    for Reach.reach in (0, 1, 2):
        got = mh.attention(query, key, value, mask=mask)
        assert torch.equal(got, mh.attention(query, key, value, mask=mh.Window(None, Reach.reach)))
    assert mask.numbers() is None
    assert (mask & mh.Causal()).numbers() is None
    assert mh.Window(torch.tensor([1, 2, 3, 4])).numbers() is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"scale": float("nan")}, mh.ArgumentError),
        ({"scale": torch.inf}, mh.ArgumentError),
        ({"softcap": -1.0}, mh.ArgumentError),
        ({"softcap": float("nan")}, mh.ArgumentError),
        ({"dropout_p": 0.5, "backend": "native"}, mh.BackendError),
        ({"dropout_p": float("nan")}, mh.ArgumentError),
        ({"dropout_p": 2.0}, mh.ArgumentError),
        ({"backend": "flash"}, mh.ArgumentError),
        ({"backend": ["auto"]}, mh.ArgumentError),
        ({"mask": "causal"}, mh.DtypeError),
        ({"mask": torch.zeros(3, 7)}, mh.DtypeError),
    ],
    ids=str,
)
def test_what_is_refused_is_refused_of_a_known_form(
    options: dict[str, Any], error: type[Exception]
) -> None:
    inputs = tensors()
    messages = []
    for _ in range(2):
        with pytest.raises(error) as caught:
            mh.attention(*inputs, **options)
        messages.append(str(caught.value))
        mh.attention(*inputs)
    assert messages[0] == messages[1]


def test_shapes_and_kinds_that_are_refused_stay_refused() -> None:
    query, key, value = tensors()
    for _ in range(2):
        mh.attention(query, key, value)
        with pytest.raises(mh.ArgumentError, match="length"):
            mh.attention(query, key, value[:, :, 1:])
        with pytest.raises(mh.ArgumentError, match="3 query heads"):
            mh.attention(query[:, :3], key, value)
        with pytest.raises(mh.ArgumentError, match="head width"):
            mh.attention(query[..., :3], key, value)
        with pytest.raises(mh.ArgumentError, match="differ in batch"):
            mh.attention(query[:1], key, value)
        with pytest.raises(mh.DtypeError, match="key is bfloat16"):
            mh.attention(query, key.bfloat16(), value)
        with pytest.raises(mh.ArgumentError, match="to_dense"):
            mh.attention(query, key.to_sparse(), value)
        with pytest.raises(mh.DeviceError, match="meta"):
            mh.attention(query, key, value.to("meta"))
        with pytest.raises(mh.DtypeError, match="got NoneType"):
            mh.attention(query, None, value)  # type: ignore[type-var]


def test_gradients_are_recorded_of_a_known_form() -> None:
    query, key, value = tensors()
    expected = mh.attention(query, key, value, mask=mh.Causal())
    for index in range(3):
        inputs = [x.clone().requires_grad_(index == i) for i, x in enumerate((query, key, value))]
        out = mh.attention(*inputs, mask=mh.Causal())
        assert torch.equal(out, expected)
        out.sum().backward()
        assert inputs[index].grad is not None
    with torch.no_grad():
        assert not mh.attention(*inputs, mask=mh.Causal()).requires_grad
    parameter = torch.nn.Parameter(query)
    assert mh.attention(parameter, key, value).requires_grad
    with torch.inference_mode():
        assert torch.equal(mh.attention(parameter, key, value, mask=mh.Causal()), expected)


def test_transforms_reach_into_a_call_of_a_known_form() -> None:
    query, key, value = tensors()
    plain = mh.attention(query, key, value)
    mh.attention(query[0][None], key[0][None], value[0][None])

    def call(x: Tensor) -> Tensor:
        return mh.attention(x, key, value)

    mapped = torch.func.vmap(lambda x: mh.attention(x[None], key[:1], value[:1]))(query)
    torch.testing.assert_close(mapped[0], plain[:1])
    out, tangent = torch.func.jvp(call, (query,), (query,))
    expected = torch.func.jvp(
        lambda x: mh.attention(x, key, value, backend="reference"), (query,), (query,)
    )
    torch.testing.assert_close((out, tangent), expected)
    with forward_ad.dual_level():
        dual = call(forward_ad.make_dual(query, query))
        torch.testing.assert_close(forward_ad.unpack_dual(dual).tangent, tangent)
    # A transform around the call is one even where it does not touch the call's tensors.
    summed = torch.func.vmap(lambda x: x + call(query).sum())(torch.zeros(2))
    torch.testing.assert_close(summed, plain.sum().expand(2))


def test_what_intercepts_operators_sees_a_call_of_a_known_form() -> None:
    query, key, value = tensors()
    expected = mh.attention(query, key, value)
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        assert torch.equal(mh.attention(query, key, value), expected)
    assert torch.ops.multihead.attend.default in seen
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in (query, key, value)]
        assert isinstance(mh.attention(query, key, value), torch._subclasses.FakeTensor)
    assert isinstance(mh.attention(*fakes), torch._subclasses.FakeTensor)
    meta = mh.attention(*(x.to("meta") for x in (query, key, value)))
    assert meta.is_meta
    with pytest.raises(mh.BackendError, match=r"torch\.export"):
        torch.jit.trace(lambda x: mh.attention(x, key, value), query)


def test_a_subclass_answers_for_itself_in_a_known_form() -> None:
    class Logged(Tensor):
        calls: ClassVar[list[object]] = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            cls.calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    query, key, value = tensors()
    expected = mh.attention(query, key, value)
    out = mh.attention(query.as_subclass(Logged), key, value)
    assert torch.equal(out.as_subclass(Tensor), expected)
    assert torch.ops.multihead.attend in Logged.calls


def test_compiled_calls_hold_no_known_form() -> None:
    torch._dynamo.reset()
    query, key, value = tensors()
    expected = mh.attention(query, key, value, mask=mh.Causal())
    compiled = torch.compile(
        lambda *x: mh.attention(*x, mask=mh.Causal()), fullgraph=True, backend="aot_eager"
    )
    known = dict(forms._known)
    assert torch.equal(compiled(query, key, value), expected)
    assert forms._known == known


def test_autocast_casts_a_known_form() -> None:
    query, key, value = tensors()
    mh.attention(query, key, value)
    halves = [x.bfloat16() for x in (query, key, value)]
    mh.attention(*halves)
    half = mh.attention_with_stats(*halves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mh.attention(query, key, value), half.out)
        result = mh.attention_with_stats(query, key, value)
        weights = result.weights(slice(None), slice(None))
    assert torch.equal(result.out, half.out)
    assert torch.equal(weights, half.weights(slice(None), slice(None)))
    with torch.autocast("cpu", dtype=torch.float16):
        assert mh.attention(*halves).dtype == torch.float16


def test_an_observer_sees_a_call_of_a_known_form() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[Problem] = []

        def wants(self, problem: Problem) -> tuple[str, ...]:
            return ("entropy",)

        def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
            assert set(stats) == {"entropy"}
            self.seen.append(problem)

    inputs = tensors()
    mh.attention(*inputs)
    recorder = Recorder()
    token = dispatch.observer.set(recorder)
    try:
        mh.attention(*inputs)
    finally:
        dispatch.observer.reset(token)
    mh.attention(*inputs)
    assert len(recorder.seen) == 1


def test_arrays_and_lazily_negated_views_of_a_known_form() -> None:
    query, key, value = tensors()
    expected = mh.attention(-query, key, value)
    assert torch.equal(mh.attention(torch._neg_view(query), key, value), expected)
    out = mh.attention(*(x.numpy() for x in (-query, key, value)))
    assert isinstance(out, np.ndarray)
    assert np.array_equal(out, expected.numpy())
    with torch.device("meta"):
        assert torch.equal(mh.attention(-query, key, value), expected)


def test_the_thread_count_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    class Extension:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def forward(self, *arguments: Any) -> None:
            counts.append(arguments[-1])
            real.forward(*arguments)

    real = native._native
    monkeypatch.setattr(native, "_native", Extension())
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 2):
            torch.set_num_threads(threads)
            mh.attention(*tensors())
    finally:
        torch.set_num_threads(before)
    assert counts == [1, 3, 2]


def test_a_known_form_does_not_outlive_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors()
    expected = mh.attention(*inputs)
    monkeypatch.setattr(native, "_native", None)
    monkeypatch.setattr(native, "_MISSING", "gone")
    torch.testing.assert_close(mh.attention(*inputs), expected)
    with pytest.raises(mh.BackendError, match="gone"):
        mh.attention(*inputs, backend="native")


def test_forms_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_MOST", 5)
    for keys in range(3, 30):
        inputs = tensors(keys=keys)
        assert_same_bits(
            mh.attention_with_stats(*inputs, stats=mh.STATISTICS, mask=mh.Causal()),
            mh.attention_with_stats(*inputs, stats=mh.STATISTICS, mask=mh.Causal()),
        )
        assert 1 <= len(forms._known) <= 5


def test_threads_share_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few enough are kept that they are dropped all the time."""
    monkeypatch.setattr(forms, "_MOST", 4)
    calls = [
        (tensors(keys=keys), mask) for keys in range(4, 12) for mask in (None, mh.SlidingWindow(3))
    ]
    expected = [mh.attention(*inputs, mask=mask) for inputs, mask in calls]
    wrong: list[object] = []

    def work(seed: int) -> None:
        order = torch.randperm(len(calls), generator=torch.Generator().manual_seed(seed)).tolist()
        for index in order * 20:
            inputs, mask = calls[index]
            try:
                same = torch.equal(mh.attention(*inputs, mask=mask), expected[index])
            except Exception as error:  # a thread's exception would be lost
                wrong.append(error)
            else:
                if not same:
                    wrong.append(index)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
    assert len(forms._known) <= 4 + len(workers)


def test_masks_that_lower_to_tensors_are_not_kept() -> None:
    require("native")
    query, key, value = torch.randn(3, 1, 1, 64, 8)
    mask = mh.Window(9, None, 3) & mh.Window(5, None, 6)
    mh.attention(query, key, value, mask=mask)
    assert all(parts.closed_form is not None for parts in forms._known.values())
