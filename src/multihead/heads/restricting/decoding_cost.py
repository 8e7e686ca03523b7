"""What restricted heads save when a model decodes: measured seconds and bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, InputError, ModelError
from ...models import LanguageModel
from ...nn import Cache
from ..loss import evaluating
from .windows import HeadWindows, restricted

_PREFILL = 2048  # tokens at once


@dataclass(frozen=True)
class DecodingCost:
    """A step of decoding behind a text, whole and restricted; print it.

    Attributes:
        context: tokens before the step.
        whole_bytes, restricted_bytes: what the tokens fill in the caches of all layers.
        whole_seconds, restricted_seconds: the medians of the steps.
        steps: how many of each were timed, in turns.
        threads: torch's number of threads.
    """

    context: int
    whole_bytes: int
    restricted_bytes: int
    whole_seconds: float
    restricted_seconds: float
    steps: int
    threads: int

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return (
            f"decoding behind {self.context:,} tokens: caches {self.whole_bytes / 2**20:.1f} MiB, "
            f"restricted {self.restricted_bytes / 2**20:.1f} MiB "
            f"({100 * self.restricted_bytes / self.whole_bytes:.0f} %); a step "
            f"{1e3 * self.whole_seconds:.1f} ms, restricted {1e3 * self.restricted_seconds:.1f} ms "
            f"({self.whole_seconds / self.restricted_seconds:.2f}x as fast; median of "
            f"{self.steps}, {threads})"
        )


@torch.no_grad()
def decoding_cost(
    model: nn.Module, windows: HeadWindows, tokens: Sequence[int] | Tensor, *, steps: int = 16
) -> DecodingCost:
    """Fill caches with a text, whole and restricted, and time steps of decoding in turns.

    The whole model has caches of kind "growing", the restricted one those of kind "window".

    Args:
        model: a `LanguageModel`: transformers' caches hold all tokens of all heads.
        windows: which heads are restricted.
        tokens: the ids of the text; the last `steps` of them are decoded.
        steps: how many are timed.

    Raises:
        ArgumentError: `steps` below 1.
        InputError: a text without tokens before these steps.
        ModelError: another model.
    """
    if not isinstance(model, LanguageModel):
        raise ModelError(
            f"{type(model).__name__} is no multihead.LanguageModel. Caches that drop what "
            "restricted heads do not see are ours alone: load the model by load_language_model."
        )
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ArgumentError(f"steps must be a whole number above 0; got {steps!r}.")
    ids = torch.as_tensor(tokens)
    if ids.ndim != 1 or len(ids) <= steps:
        raise InputError(
            f"tokens must be the ids of one text, more than steps={steps}; got {list(ids.shape)}."
        )
    context = len(ids) - steps
    ids = ids[None].to(model.embedding.weight.device)
    with evaluating(model):
        whole = model.make_caches("growing")
        _read(model, ids[:, :context], whole)
        with restricted(model, windows):
            near = model.make_caches("window")
            _read(model, ids[:, :context], near)
        nbytes = [sum(cache.filled_nbytes for cache in caches) for caches in (whole, near)]
        seconds: tuple[list[float], list[float]] = ([], [])
        for place in range(context, context + steps):
            token = ids[:, place : place + 1]
            seconds[0].append(_timed(model, token, whole))
            with restricted(model, windows):
                seconds[1].append(_timed(model, token, near))
    return DecodingCost(
        context=context,
        whole_bytes=nbytes[0],
        restricted_bytes=nbytes[1],
        whole_seconds=median(seconds[0]),
        restricted_seconds=median(seconds[1]),
        steps=steps,
        threads=torch.get_num_threads(),
    )


def _read(model: LanguageModel, ids: Tensor, caches: Sequence[Cache]) -> None:
    """Give the caches a text, piece by piece."""
    for part in ids.split(_PREFILL, dim=1):
        model.hidden(part, caches=caches)


def _timed(model: LanguageModel, token: Tensor, caches: Sequence[Cache]) -> float:
    begin = time.perf_counter()
    model(token, caches=caches, rows="last")
    if token.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin
