"""The whole job of making a model smaller: score, remove, and measure what it cost and gained."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...errors import ArgumentError
from ...integrations.attention_layers import AttentionLayer, attention_layers
from ...integrations.hf_pruning import check_prunable
from ..loss import evaluating, mean_loss
from .importance import (
    Importance,
    gate_gradient,
    leave_one_out,
    random_importance,
    rank_correlation,
    removal_curve,
)
from .pruning import prune

By = Literal["gate-gradient", "leave-one-out", "random"]

Report = Callable[[str, float], None]
"""Called with what is being done and the share of all work that is done, 0 to 1."""

CONTROL_SEEDS = (1, 2, 3)

ROUNDS = 3
_NEW_TOKENS = 16


@dataclass(frozen=True)
class Size:
    """What a model takes, and how fast it is.

    Attributes:
        parameters: all of them, a matrix that is used twice counted once.
        attention_parameters: those of the layers of attention.
        bytes: of all parameters.
        cache_bytes_per_token: keys and values of all layers, in the model's dtype.
        prefill_tokens_per_s: of one row, the median of `ROUNDS` rounds.
        decode_tokens_per_s: of one row, one token after another, the same.
    """

    parameters: int
    attention_parameters: int
    bytes: int
    cache_bytes_per_token: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True)
class Removal:
    """What was removed of a model, and what that did.

    Attributes:
        by: how the units were chosen.
        kind: "kv_group", or "head" where every head has a KV head of its own.
        units, removed_units: how many there were, and how many are gone.
        heads, removed_heads: the same of query heads.
        removed: by layer (a string), the heads that are gone now, by their first numbers.
        scored_tokens, tested_tokens, row: how much text was read for each, and the length of a row.
        loss_before, loss_after: nats a token on the text that was held out.
        control_losses: the same for as many units drawn at random, one a seed.
        halves_correlation: Spearman's, of the gate gradients of the first half of the rows with
            those of the second: how far the order is the text's own. None for other scores.
        before, after: size and speed.
    """

    by: By
    kind: str
    units: int
    removed_units: int
    heads: int
    removed_heads: int
    removed: dict[str, list[int]]
    scored_tokens: int
    tested_tokens: int
    row: int
    loss_before: float
    loss_after: float
    control_losses: tuple[float, ...]
    halves_correlation: float | None
    before: Size
    after: Size

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return asdict(self)


def remove(
    model: Any,
    scored: Tensor,
    tested: Tensor,
    *,
    keep: float,
    by: By = "gate-gradient",
    seed: int = 0,
    report: Report | None = None,
) -> Removal:
    """Prune the least important KV groups of a language model for good, and measure all of it.

    Args:
        model: a causal language model of transformers; pruned in place.
        scored: token ids [rows, length] that importance is taken over.
        tested: others, [rows, length], that the loss is taken over.
        keep: the share of KV groups that stays, above 0 and below 1.
        by: what ranks the groups. Gate gradients are compared as they are, across layers, by which
            SmolLM2 loses less than with each layer's scores normalized.
        seed: of `by="random"`.
        report: told of the progress.

    Raises:
        ArgumentError: a share that leaves all or nothing.
        ModelError: a model that cannot be pruned, or that does not predict the next token.
    """
    layers = attention_layers(model)
    for layer in layers:
        check_prunable(layer)
    units = sum(len(layer.pruned.kept_kv) for layer in layers)
    count = units - round(keep * units)
    if not 0 < count < units:
        raise ArgumentError(
            f"keep={keep:g} of {units} groups leaves {units - count}: nothing to remove, or "
            "nothing to keep."
        )
    steps = _Steps(report, by, units, len(scored), len(tested))
    steps.tell("reading the held-out text")
    before = mean_loss(model, tested.split(1))
    steps.done("test")
    importance, halves = _importance(model, scored, by, seed, steps)
    controls: list[float] = []
    for control_seed in CONTROL_SEEDS:
        steps.tell(f"removing groups at random, draw {len(controls) + 1} of {len(CONTROL_SEEDS)}")
        control = random_importance(model, control_seed, kind="kv_group")
        controls += removal_curve(model, tested.split(1), control, [count])
        steps.done("test")
    heads = sum(len(layer.heads) for layer in layers)
    gone = importance.least(count)
    # Pruning replaces parameters, so a copy that shares all of them stays whole and costs nothing.
    tensors = (*model.parameters(), *model.buffers())
    whole = copy.deepcopy(model, {id(it): it for it in tensors})
    prune(model, gone)
    steps.tell("timing the whole model and the pruned one in turns")
    size_before, size_after = measure((whole, model), tested[0], lambda: steps.done("speed"))
    del whole
    steps.tell("reading the held-out text again")
    after = mean_loss(model, tested.split(1))
    left = attention_layers(model)
    return Removal(
        by=by,
        kind="head" if all(layer.pruned.group == 1 for layer in layers) else "kv_group",
        units=units,
        removed_units=count,
        heads=heads,
        removed_heads=len(gone),
        removed={str(it.index): list(it.pruned.heads) for it in left if it.pruned.heads},
        scored_tokens=0 if by == "random" else scored.numel(),
        tested_tokens=tested.numel(),
        row=tested.shape[1],
        loss_before=before,
        loss_after=after,
        control_losses=tuple(controls),
        halves_correlation=halves,
        before=size_before,
        after=size_after,
    )


def measure(
    models: Sequence[Any], row: Tensor, progress: Callable[[], None] | None = None
) -> list[Size]:
    """The size of each model, and its speed on one row of tokens [L]; timed in turns.

    `progress` is called after each of `ROUNDS` rounds.
    """
    prefills: list[list[float]] = [[] for _ in models]
    decodes: list[list[float]] = [[] for _ in models]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for model in models:
            stack.enter_context(evaluating(model))
            model(input_ids=row[None])  # the first call of each takes longer
        for _ in range(ROUNDS):
            for place, model in enumerate(models):
                prefill, decode = _times(model, row[None])
                prefills[place].append(prefill)
                decodes[place].append(decode)
            if progress is not None:
                progress()
    return [
        _size(model, len(row) / statistics.median(prefill), 1 / statistics.median(decode))
        for model, prefill, decode in zip(models, prefills, decodes, strict=True)
    ]


def _size(model: Any, prefill: float, decode: float) -> Size:
    layers = attention_layers(model)
    parameters = {id(it): it for it in model.parameters()}.values()
    return Size(
        parameters=sum(it.numel() for it in parameters),
        attention_parameters=sum(map(_attention_parameters, layers)),
        bytes=sum(it.nbytes for it in parameters),
        cache_bytes_per_token=sum(map(_cache_numbers, layers)) * model.dtype.itemsize,
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
    )


class _Steps:
    """How far the work is, in forward passes of one row."""

    def __init__(self, report: Report | None, by: By, units: int, scored: int, tested: int) -> None:
        self.units = units
        self._report = report
        self._costs = {"test": tested, "gradient": 3, "unit": scored, "speed": 10}
        scoring = {"random": 0, "gate-gradient": 3 * scored, "leave-one-out": units * scored}[by]
        tests = (2 + len(CONTROL_SEEDS)) * tested
        self._all = scoring + tests + ROUNDS * self._costs["speed"]
        self._done = 0
        self._what = ""

    def tell(self, what: str) -> None:
        """Say what comes now."""
        self._what = what
        self._show()

    def done(self, kind: str) -> None:
        """One piece of work of this kind is done."""
        self._done += self._costs[kind]
        self._show()

    def _show(self) -> None:
        if self._report is not None:
            self._report(self._what, min(self._done / self._all, 1.0))


def _importance(
    model: Any, scored: Tensor, by: By, seed: int, steps: _Steps
) -> tuple[Importance, float | None]:
    """The scores, and how well those of the two halves of the rows agree."""
    steps.tell(f"scoring {steps.units} groups by {by}")
    if by == "random":
        return random_importance(model, seed, kind="kv_group"), None
    if by == "leave-one-out":
        rows = scored.split(1)
        return leave_one_out(
            model, rows, kind="kv_group", progress=lambda *_: steps.done("unit")
        ), None
    halves = [
        gate_gradient(
            model, rows.split(1), kind="kv_group", progress=lambda *_: steps.done("gradient")
        )
        for rows in scored.tensor_split(2)
        if len(rows)
    ]
    examples = sum(half.examples for half in halves)
    scores = np.sum([half.scores * half.examples for half in halves], axis=0) / examples
    whole = replace(halves[0], scores=scores, examples=examples)
    if len(halves) == 1:
        return whole, None
    return whole, rank_correlation(*halves)


def _attention_parameters(layer: AttentionLayer) -> int:
    parts = {id(it): it for it in (*layer.module.parameters(), *layer.out_proj.parameters())}
    return sum(it.numel() for it in parts.values())


def _cache_numbers(layer: AttentionLayer) -> int:
    """Numbers that a token's keys and values take; keys are as wide as values here."""
    # transformers counts tokens by what is stored: one number each in a layer without heads.
    return 2 * (len(layer.pruned.kept_kv) * layer.value_dim or 1)


def _times(model: Any, ids: Tensor) -> tuple[float, float]:
    """Seconds of reading a row, and of one token at its end."""

    # A row may be as long as the model has positions.
    prompt = ids[:, : max(ids.shape[1] - _NEW_TOKENS - 1, 1)]

    def generate(count: int) -> object:
        return model.generate(
            prompt, min_new_tokens=count, max_new_tokens=count, do_sample=False, pad_token_id=0
        )

    prefill = _seconds(lambda: model(input_ids=ids))
    short, long = (_seconds(partial(generate, count)) for count in (1, 1 + _NEW_TOKENS))
    return prefill, max(long - short, 1e-9) / _NEW_TOKENS


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
