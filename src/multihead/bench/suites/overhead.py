"""The suite `overhead`: what a feature adds to the plain call."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from multihead.bench import whole
from multihead.bench.case import Case, Entry
from multihead.bench.contest import OURS, TORCH, Contestant, Field, Setting, judge, measure, ours
from multihead.bench.suites.row import Row, of_case
from multihead.bench.timing import alternate
from multihead.bench.torch_calls import sdpa
from multihead.bench.verify import expect
from multihead.errors import BackendError, MissingExtraError, ModelError
from multihead.heads import watch
from multihead.ops import STATISTICS, ALiBi, attention_with_stats
from multihead.ops.backends import native

PLAIN = "plain"

_GATHERED: dict[str, dict[str, Any]] = {
    "lse": {"stats": ("lse",)},
    "three-statistics": {"stats": ("lse", "entropy", "max_logit")},
    "row-statistics": {"stats": STATISTICS},
    "pooled-map": {"stats": (), "bins": 64},
}
_OPTIONS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "keys-bias": lambda case: {"bias": torch.linspace(-2, 2, case.keys).expand(1, 1, 1, -1)},
    "alibi": lambda case: {"bias": ALiBi(torch.exp2(-torch.arange(1.0, case.heads + 1)))},
    "sinks": lambda case: {"sinks": torch.linspace(-2, 2, case.heads)},
    "softcap": lambda case: {"softcap": 30.0},
}
_AVX2 = "avx2"

# Some of these differ by less than a hundredth: they need more rounds than a ratio of two.
_MORE_TIME = 1.6


def rows(*, quick: bool) -> list[Row]:
    """Each feature and dtype on 8 heads of 64, all keys visible; then the kernels for AVX2."""
    length = 256 if quick else 4096
    dtypes = (torch.float32, torch.bfloat16)
    found = [
        of_case(Case(name, dtype, length, length), measure_one)
        for dtype in dtypes
        for name, measure_one in (
            *((name, partial(_gathered, asked)) for name, asked in _GATHERED.items()),
            *((name, partial(_option, name)) for name in _OPTIONS),
        )
    ]
    case = Case(f"{_AVX2}-build", torch.float32, length, length)
    watched = [
        Row(f"watch-smollm2-{_name(dtype)}", partial(_watched, dtype, quick)) for dtype in dtypes
    ]
    return [*found, of_case(case, _avx2), *watched]


def _gathered(asked: dict[str, Any], case: Case, setting: Setting) -> Entry:
    query, key, value = case.inputs()

    def with_stats() -> Tensor:
        result = attention_with_stats(query, key, value, backend="native", **asked)
        return cast(Tensor, result.out)

    plain = ours(query, key, value)
    entry = _overhead(case, setting, with_stats, plain)
    with torch.inference_mode():
        if not torch.equal(plain(), with_stats()):
            raise BackendError(f"{case.name}: asking for statistics changed the output.")
    return entry


def _option(name: str, case: Case, setting: Setting) -> Entry:
    query, key, value = case.inputs()
    options = _OPTIONS[name](case)
    feature = ours(query, key, value, **options)
    entry = _overhead(case, setting, feature, ours(query, key, value))
    expected = expect(query, key, value, **options)
    with torch.inference_mode():
        errors = {OURS: expected.error(feature())}
    judge(case, errors, expected, expected.plain_error)
    return entry | {"errors": errors | {"plain torch": expected.plain_error}}


def _overhead(
    case: Case, setting: Setting, feature: Callable[[], Tensor], plain: Callable[[], Tensor]
) -> Entry:
    return {**case.to_json(), **_timed(setting, feature, plain)}


def _timed(setting: Setting, feature: Callable[[], Tensor], plain: Callable[[], Tensor]) -> Entry:
    with torch.inference_mode():
        times = alternate(
            {OURS: feature, PLAIN: plain}, seconds=_MORE_TIME * setting.seconds, least=7
        )
    return {
        "times": {name: timing.to_json() for name, timing in times.items()},
        "overhead": times[OURS].median / times[PLAIN].median - 1,
    }


def _watched(dtype: torch.dtype, quick: bool, setting: Setting) -> Entry:
    """A whole model under `watch`, entered and left each time, against the same without."""
    tokens = 48 if quick else 2048
    entry: Entry = {
        "name": f"watch-smollm2-{_name(dtype)}",
        "kind": f"watched-SmolLM2-prefill-of-{tokens}-tokens",
        "what": f"SmolLM2-135M under watch, prefill of {tokens} tokens, every statistic",
        "dtype": _name(dtype),
    }
    reason = None if quick else whole.too_slow(dtype, setting.limits)
    if reason is not None:
        return {**entry, "not_measurable": reason}
    try:
        model: Any = whole.smollm2(dtype, quick=quick)
        whole.register()
    except (MissingExtraError, ModelError) as error:
        return {**entry, "not_measurable": str(error)}
    model.set_attn_implementation(OURS)
    ids = whole.text(tokens, quick=quick)

    def plain() -> Tensor:
        return cast(Tensor, model(ids, logits_to_keep=1, use_cache=True)[0])

    def watched() -> Tensor:
        with watch(model):
            return plain()

    entry |= _timed(setting, watched, plain)
    with torch.inference_mode():
        if not torch.equal(plain(), watched()):
            raise BackendError(f"{entry['name']}: watching changed the output.")
    return entry


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _avx2(case: Case, setting: Setting) -> Entry:
    """The kernels compiled for AVX2, on whatever processor this is, against torch."""
    if _AVX2 not in native.instruction_sets():
        return {**case.to_json(), "not_measurable": "The processor lacks AVX2."}
    query, key, value = case.inputs()
    call = ours(query, key, value)

    def with_avx2() -> Tensor:
        native.use_instruction_set(_AVX2)
        try:
            return call()
        finally:
            native.use_instruction_set(os.environ.get("MULTIHEAD_ISA"))

    contestants = {
        OURS: Contestant.of(with_avx2),
        TORCH: Contestant.of(sdpa(case, query, key, value)),
    }
    return measure(case, Field(contestants), expect(query, key, value), setting)
