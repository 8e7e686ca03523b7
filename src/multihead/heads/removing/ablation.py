"""What a model does without some of its heads, while they stay in it.

Shape suffixes: b batch, l length, c all heads' widths together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, DtypeError
from ...integrations.attention_layers import AttentionLayer, Head, attention_layers, by_layer
from ..loss import evaluating

How = Literal["zero", "mean", "resample"]

Inputs = Tensor | Mapping[str, Any]
"""What a model is called with: its one tensor, or its arguments by name."""

Change = Callable[[Tensor], Tensor]
"""From what an output projection would read, [..., heads * value_dim], to what it reads instead."""


@contextmanager
def ablate(
    model: nn.Module,
    heads: Iterable[Head],
    how: How = "zero",
    *,
    calibration: Inputs | None = None,
    seed: int = 0,
) -> Iterator[None]:
    """Replace the outputs of some heads while the block runs; the weights stay as they are.

        from multihead import heads

        with heads.ablate(model, {(3, 1), (3, 8)}):
            loss = model(input_ids, labels=input_ids).loss

    A head's output is what it hands to its layer's output projection, so that "zero" gives what
    the model gives with the head's columns of that matrix at zero, whatever computes attention.
    Gradients flow through the rest. Blocks may be nested; of two that name one head the outer acts
    first.

    Args:
        model: with layers of ours, or a Llama-, GPT-2-, BERT- or BART-like model of transformers.
        heads: pairs (layer, head). Layers of attention are counted from 0 in the order in which
            the model has them, cross-attention among them; heads have the numbers that they had
            before any were pruned.
        how: "zero" writes zeros; "mean" the head's mean output over the calibration batch, one
            vector for all tokens, taken in eval mode; "resample" the head's output for another row
            of the batch, at the same column, as texts of one length have them.
        calibration: for "mean": token ids [B, L], or arguments of the model by name. Where an
            `attention_mask` [B, L] is among them, padding is left out of the mean.
        seed: for "resample": which row stands in for which. It is the same for all heads and calls.

    Raises:
        ArgumentError: a head that there is not, another `how`, or a calibration that is missing or
            that nothing reads. Inside the block, "resample" of a single row.
        DtypeError: heads that are no pairs of integers.
        ModelError: a model whose heads cannot be told apart.

    Source: Michel et al. 2019 (zero); Wang et al. 2022 (mean); Chan et al. 2022 (resample).
    """
    if how not in get_args(How):
        raise ArgumentError(f"how must be 'zero', 'mean' or 'resample'; got {how!r}.")
    if how == "mean" and calibration is None:
        raise ArgumentError("how='mean' needs calibration=, a batch that the means are taken over.")
    if how != "mean" and calibration is not None:
        raise ArgumentError(f"calibration is read for how='mean' alone; got it with how={how!r}.")
    layers = attention_layers(model)
    chosen = by_layer(layers, heads)
    changes: dict[int, Change] = {}
    if how == "mean" and chosen:
        assert calibration is not None
        means = head_means(model, [layers[index] for index in chosen], calibration)
        changes = {i: _to_mean(layers[i], chosen[i], means[i]) for i in chosen}
    elif how == "resample":
        changes = {i: _to_other_row(layers[i], chosen[i], seed) for i in chosen}
    else:
        changes = {i: _to_zero(layers[i], chosen[i]) for i in chosen}
    with changing(layers, changes):
        yield


@contextmanager
def changing(layers: Iterable[AttentionLayer], changes: Mapping[int, Change]) -> Iterator[None]:
    """Let the output projections of some layers read something else inside the block."""
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            # A compiled graph knows nothing of later hooks, so compiled models run eagerly here.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in layers:
            if layer.index in changes:
                hook = _hook(changes[layer.index])
                handle = layer.out_proj.register_forward_pre_hook(hook)
                stack.callback(handle.remove)
        yield


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output; raises DtypeError for inputs of another kind."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    raise DtypeError(
        "inputs must be a tensor of token ids or the model's arguments by name; got "
        f"{type(inputs).__name__}."
    )


@torch.no_grad()
def head_means(
    model: nn.Module, layers: Iterable[AttentionLayer], inputs: Inputs
) -> dict[int, Tensor]:
    """By layer, the mean of what its output projection reads over the tokens of a batch.

    Float64 [heads * value_dim]; padding is left out where `inputs` has an `attention_mask` [B, L].
    """
    layers = tuple(layers)
    real_bl = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    sums: dict[int, Tensor] = {}
    counts: dict[int, float] = {}

    def keep(index: int) -> Change:
        def add(x_blc: Tensor) -> Tensor:
            weights = torch.ones(x_blc.shape[:-1], dtype=torch.float64, device=x_blc.device)
            if isinstance(real_bl, Tensor) and real_bl.shape == weights.shape:
                weights = real_bl.to(weights)
            # Selected, not multiplied: what stands in padding may be NaN.
            seen = x_blc.double().masked_fill(weights[..., None] == 0, 0)
            total = seen.flatten(0, -2).sum(0)
            sums[index] = sums[index] + total if index in sums else total
            counts[index] = counts.get(index, 0.0) + float(weights.count_nonzero())
            return x_blc

        return add

    changes = {layer.index: keep(layer.index) for layer in layers}
    with evaluating(model), changing(layers, changes):
        call(model, inputs)
    absent = [layer.index for layer in layers if not counts.get(layer.index)]
    if absent:
        raise ArgumentError(f"the calibration has no token for which layer {absent[0]} runs.")
    return {index: sums[index] / counts[index] for index in sums}


def _to_zero(layer: AttentionLayer, heads: list[int]) -> Change:
    chosen_c = _columns(layer, heads)
    # Not a product with 0: an infinity must go too.
    return lambda x_blc: x_blc.masked_fill(chosen_c.to(x_blc.device), 0)


def _to_mean(layer: AttentionLayer, heads: list[int], mean_c: Tensor) -> Change:
    chosen_c = _columns(layer, heads)
    return lambda x_blc: torch.where(chosen_c.to(x_blc.device), mean_c.to(x_blc), x_blc)


def _to_other_row(layer: AttentionLayer, heads: list[int], seed: int) -> Change:
    chosen_c = _columns(layer, heads)

    def change(x_blc: Tensor) -> Tensor:
        rows = len(x_blc)
        if x_blc.ndim < 3 or rows < 2:
            raise ArgumentError(
                "how='resample' takes a head's output from another row of the batch; got a batch "
                "of one. Give several texts of one length."
            )
        other_b = _derangement(rows, seed).to(x_blc.device)
        return torch.where(chosen_c.to(x_blc.device), x_blc[other_b], x_blc)

    return change


def _columns(layer: AttentionLayer, heads: list[int]) -> Tensor:
    """Which columns of the output projection's input are those of the heads: bool [C]."""
    chosen_c = torch.zeros(len(layer.heads) * layer.value_dim, dtype=torch.bool)
    for head in heads:
        chosen_c[layer.columns(head)] = True
    return chosen_c


def _derangement(count: int, seed: int) -> Tensor:
    """A permutation that leaves nothing in its place: one cycle through all."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator)
    places = torch.empty(count, dtype=torch.long)
    places[order] = order.roll(1)
    return places


def _hook(change: Change) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    def replace_input(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (change(arguments[0]), *arguments[1:])

    return replace_input
