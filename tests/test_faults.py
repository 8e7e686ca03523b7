"""Planted faults: the table of cases catches each, so that it can be trusted where it passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import CASES
from checks import check_forward, check_gradients
from close import assert_close
from multihead.ops import dispatch
from multihead.ops.backends import chunked, native
from multihead.ops.problem import Problem
from requires import require

Result = tuple[Tensor, dict[str, Tensor]]


class Faulty:
    """The chunked backend with one fault."""

    NAME = "faulty"

    def __init__(self, forward: Callable[[Problem], Result]) -> None:
        self.forward = forward

    def reasons(self, problem: Problem) -> list[str]:
        return []


def shift_right(problem: Problem) -> Result:
    right = problem.parts.right
    if right is not None:
        problem = replace(problem, parts=replace(problem.parts, right=right + 1))
    return chunked.forward(problem)


def anchor_top_left(problem: Problem) -> Result:
    return chunked.forward(replace(problem, parts=replace(problem.parts, start=0)))


def tile_kv_heads(problem: Problem) -> Result:
    order = torch.arange(problem.heads).view(-1, problem.kv_heads).T.flatten()
    back = order.argsort()
    bias = problem.bias
    if isinstance(bias, Tensor) and bias.shape[1] > 1:
        bias = bias[:, order]
    sinks = None if problem.sinks is None else problem.sinks[order]
    out, stats = chunked.forward(
        replace(problem, query=problem.query[:, order], bias=bias, sinks=sinks)
    )
    return out[:, back], {name: statistic[:, back] for name, statistic in stats.items()}


def leave_sink_out_of_the_maximum(problem: Problem) -> Result:
    if problem.sinks is None:
        return chunked.forward(problem)
    wanted = replace(problem, sinks=None, stats=tuple({*problem.stats, "lse", "max_logit"}))
    out, stats = chunked.forward(wanted)
    peak = stats["max_logit"].nan_to_num(neginf=0)
    mass = (stats["lse"] - peak).exp()
    total = mass + (problem.sinks.to(mass.dtype)[:, None] - peak).exp()
    out = (out * (mass / total)[..., None]).to(out.dtype)
    stats["lse"] = peak + total.log()
    return out, {name: stats[name] for name in problem.stats}


def forget_the_sink_in_the_entropy(problem: Problem) -> Result:
    out, stats = chunked.forward(problem)
    if problem.sinks is not None and "entropy" in stats:
        stats |= {"entropy": chunked.forward(replace(problem, sinks=None))[1]["entropy"]}
    return out, stats


def start_the_maximum_at_infinity(problem: Problem) -> Result:
    """Rows whose first 128 keys are all hidden meet -inf minus -inf."""
    out, stats = chunked.forward(problem)
    if problem.key_length > 128 and problem.parts.left is not None:
        first_tile = problem.parts.visible(slice(0, problem.query_length), slice(0, 128))
        out = out.masked_fill(~first_tile.any(-1, keepdim=True), math.nan)
    return out, stats


def scale_from_the_value_width(problem: Problem) -> Result:
    if problem.scale == problem.head_dim**-0.5:
        problem = replace(problem, scale=problem.value_dim**-0.5)
    return chunked.forward(problem)


def forget_the_padding(problem: Problem) -> Result:
    return chunked.forward(replace(problem, parts=replace(problem.parts, key_visible=None)))


def keep_first_from_column_zero(problem: Problem) -> Result:
    out, stats = chunked.forward(replace(problem, parts=replace(problem.parts, first=0)))
    return out, stats


def cap_after_the_bias(problem: Problem) -> Result:
    if problem.softcap is None or not isinstance(problem.bias, Tensor):
        return chunked.forward(problem)
    cap, key = problem.softcap, problem.key.repeat_interleave(problem.group, dim=1)
    scores = problem.scale * problem.query.float() @ key.float().mT + problem.bias
    capped = replace(problem, bias=cap * torch.tanh(scores / cap), scale=0.0, softcap=None)
    return chunked.forward(capped)


def count_hidden_keys_in_the_entropy(problem: Problem) -> Result:
    out, stats = chunked.forward(problem)
    if "entropy" in stats:
        free = replace(problem.parts, right=None)
        stats |= {"entropy": chunked.forward(replace(problem, parts=free))[1]["entropy"]}
    return out, stats


def measure_distance_in_columns_of_the_row(problem: Problem) -> Result:
    out, stats = chunked.forward(problem)
    if "mean_distance" in stats:
        moved = replace(problem.parts, start=0) if problem.parts.right is None else problem.parts
        wrong = chunked.forward(replace(problem, parts=moved))[1]["mean_distance"]
        stats |= {"mean_distance": wrong}
    return out, stats


FAULTS = [
    shift_right,
    anchor_top_left,
    tile_kv_heads,
    leave_sink_out_of_the_maximum,
    forget_the_sink_in_the_entropy,
    start_the_maximum_at_infinity,
    scale_from_the_value_width,
    forget_the_padding,
    keep_first_from_column_zero,
    cap_after_the_bias,
    count_hidden_keys_in_the_entropy,
    measure_distance_in_columns_of_the_row,
]


def failing_cases(monkeypatch: pytest.MonkeyPatch, forward: Callable[[Problem], Result]) -> int:
    """How many cases of the table fail on a backend that computes by `forward`."""
    monkeypatch.setattr(dispatch, "BACKENDS", (*dispatch.BACKENDS, Faulty(forward)))
    failed = 0
    for case in CASES:
        try:
            check_forward(case, torch.float32, "faulty")
        except AssertionError:
            failed += 1
    return failed


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_table_catches(
    fault: Callable[[Problem], Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failing_cases(monkeypatch, fault) > 0


def test_the_table_passes_without_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failing_cases(monkeypatch, chunked.forward) == 0


def test_the_table_catches_a_bias_gradient_that_is_not_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def keep_the_last(self: chunked.Gradients, problem: Problem, grad: Tensor, *_: slice) -> None:
        if self.bias is not None:
            self.bias.copy_(grad[-1:, -1:, -1:, -1:].expand_as(self.bias))

    monkeypatch.setattr(chunked.Gradients, "add_bias", keep_the_last)
    broadcast = next(case for case in CASES if case.name == "bias over keys")
    with pytest.raises(AssertionError, match="gradient of bias"):
        check_gradients(broadcast, torch.float32, "chunked")


def average_the_group(grad: Tensor, problem: Problem) -> Tensor:
    batch, _, keys, width = grad.shape
    return grad.view(batch, problem.kv_heads, problem.group, keys, width).mean(2)


GRADIENT_FAULTS = {
    "the heads of a group averaged": ("_group_sum", average_the_group, "grouped"),
    "no gradient of the sinks": (
        "_sink_gradient",
        lambda problem, *_: torch.zeros_like(problem.sinks),
        "sinks",
    ),
    "the maximum's gradient on the first key": (
        "_argmax",
        lambda block: torch.full_like(block.keys_peak, 0, dtype=torch.int64),
        "plain",
    ),
}


@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
def test_the_table_catches_in_gradients(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, wrong, name = GRADIENT_FAULTS[fault]
    case = next(case for case in CASES if case.name == name)
    stats = ("lse", "entropy", "max_logit")
    check_gradients(case, torch.float32, "chunked", stats)
    monkeypatch.setattr(chunked, function, wrong)
    with pytest.raises(AssertionError, match="gradient of"):
        check_gradients(case, torch.float32, "chunked", stats)


def test_the_table_catches_a_wrong_number_handed_to_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require("native")
    right = native._closed_mask

    def shifted(start: int, first: int, left: Any, right_bound: Any, *others: int) -> object:
        return right(start, first, left, right_bound and right_bound + 1, *others)

    window = next(case for case in CASES if case.name == "window")
    check_forward(window, torch.float32, "native")
    monkeypatch.setattr(native, "_closed_mask", shifted)
    with pytest.raises(AssertionError):
        check_forward(window, torch.float32, "native")


def test_close_can_fail() -> None:
    """The one tolerance refuses errors, shapes, and NaN or infinities in other places."""
    want = torch.tensor([1.0, 2.0, -torch.inf], dtype=torch.float64)
    plain = torch.tensor([1.0, 2.0 + 1e-6, -torch.inf])
    assert_close(torch.tensor([1.0, 2.0 + 1e-6, -torch.inf]), want, plain)
    wrong = ([1.0, 2.0 + 1e-5, -torch.inf], [1.0, math.nan, -torch.inf], [1.0, 2.0, torch.inf])
    for values in (*wrong, [1.0, torch.inf, -torch.inf], [1.0, 2.0, 0.0], [1.0, 2.0]):
        with pytest.raises(AssertionError):
            assert_close(torch.tensor(values), want, plain)
