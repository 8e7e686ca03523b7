"""How well a model does on a text, and a text as rows of one length.

Shape suffixes: n rows, l length, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ArgumentError, InputError, ModelError
from ..models import LanguageModel

Loss = Callable[[Any, Any], Tensor]
"""Called with the model and a batch; returns the loss of each example, [B]."""


def next_token_loss(model: nn.Module, token_ids: Tensor) -> Tensor:
    """The mean negative log likelihood of each row's tokens after the first, nats [B].

    Computed in float32, or float64 for a model in float64.

    Args:
        model: a `LanguageModel`, or a causal language model of transformers.
        token_ids: int64 [B, L], L at least 2, without padding.

    Raises:
        ModelError: a model that does not predict the next token; write a loss for it.
        ArgumentError: other shapes.
    """
    if not isinstance(token_ids, Tensor) or token_ids.ndim != 2 or token_ids.shape[1] < 2:
        shape = list(token_ids.shape) if isinstance(token_ids, Tensor) else type(token_ids).__name__
        raise ArgumentError(
            f"token_ids must be [rows, length] with at least two tokens a row; got {shape}. Give "
            "loss= for batches of another kind."
        )
    _check_predicts(model)
    if isinstance(model, LanguageModel):
        logits_nlv = model(token_ids)
    else:
        logits_nlv = model(input_ids=token_ids, use_cache=False).logits
    wide = logits_nlv if logits_nlv.dtype == torch.float64 else logits_nlv.float()
    losses = F.cross_entropy(
        wide[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(token_ids), -1).mean(1)


@torch.no_grad()
def mean_loss(model: nn.Module, batches: Iterable[Any], loss: Loss = next_token_loss) -> float:
    """The mean of `loss` over all examples of all batches, the model in eval mode."""
    total, count = 0.0, 0
    with evaluating(model):
        for batch in as_batches(batches):
            losses = example_losses(loss, model, batch)
            total += float(losses.double().sum())
            count += len(losses)
    if not count:
        raise ArgumentError("batches must hold at least one batch; got none.")
    return total / count


def example_losses(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    """What `loss` returns, checked to be one number an example.

    Raises:
        ArgumentError: something else; a mean over the batch hides what each example lost.
    """
    losses = loss(model, batch)
    if not isinstance(losses, Tensor) or losses.ndim != 1:
        got = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ArgumentError(
            f"loss(model, batch) must return the loss of each example, a tensor [B]; got {got}. "
            "Use reduction='none' and take the mean over each example's own tokens."
        )
    return losses


def as_batches(batches: Iterable[Any]) -> list[Any]:
    """Batches as a list; one tensor or one mapping is a single batch."""
    if isinstance(batches, Tensor | Mapping):
        return [batches]
    return list(batches)


def token_rows(
    ids: Sequence[int], length: int, rows: int, *, skip: int = 0, start: int | None = None
) -> Tensor:
    """Consecutive pieces of a text as rows of one length, int64 [rows, length].

    Args:
        ids: the text's tokens.
        length: tokens of a row.
        rows: number of rows.
        skip: tokens to pass over at first.
        start: a token that every row begins with, as a model's texts do; it counts in `length`.

    Raises:
        InputError: a text that is too short.
    """
    own = length - (start is not None)
    needed = skip + rows * own
    if len(ids) < needed:
        raise InputError(
            f"{needed:,} tokens are needed ({rows} rows of {own}, after {skip:,}), but the text "
            f"has {len(ids):,}. Give a longer text, or ask for fewer or shorter rows."
        )
    pieces = torch.tensor(ids[skip:needed], dtype=torch.long).view(rows, own)
    if start is None:
        return pieces
    return torch.cat((torch.full((rows, 1), start, dtype=torch.long), pieces), dim=1)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode inside the block; every module's own mode comes back after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _check_predicts(model: Any) -> None:
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, LanguageModel):
        return
    generates = getattr(model, "can_generate", None)
    config = getattr(model, "config", None)
    causal = [
        m.is_causal for m in model.modules() if isinstance(getattr(m, "is_causal", None), bool)
    ]
    if (
        generates is None
        or not generates()
        or getattr(config, "is_encoder_decoder", False)
        or not all(causal)
    ):
        raise ModelError(
            f"{type(model).__name__} does not predict the next token of a text, so its loss must "
            "be given: loss=f, where f(model, batch) returns the loss of each example, [B]."
        )
