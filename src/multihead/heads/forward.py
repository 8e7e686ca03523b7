"""One forward pass of any model over token ids, its calls of attention shown to an observer."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ModelError
from ..models import Encoder, EncoderDecoder, LanguageModel
from ..ops.problem import Problem
from .running import Running, observing, running_modules, set_to_multihead


class LayerObserver(ABC):
    """Base of observers that take one text or batch at a time and tell layers by their order.

    `layers` are the names of the modules that called attention, in the order of their calls.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.layers: list[str] = []
        self.running: Running | None = None

    @abstractmethod
    def wants(self, problem: Problem) -> tuple[str, ...]:
        """Statistics that the call shall compute."""

    @abstractmethod
    def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
        """The call as it was computed."""

    def next_layer(self, problem: Problem) -> int:
        """The number of the call that `problem` is; raises ModelError for no self-attention."""
        found = (problem.batch, problem.query_length, problem.key_length)
        expected = (self.shape[0], self.shape[1], self.shape[1])
        if found != expected:
            raise ModelError(
                f"A layer attended from {found[1]} queries to {found[2]} keys in a batch of "
                f"{found[0]}, where {expected[0]} x {expected[1]} tokens were given: models that "
                "shorten, split or repeat a text, and cross-attention, are not supported."
            )
        self.layers.append((self.running and self.running.innermost) or "?")
        return len(self.layers) - 1


def run(model: nn.Module, token_ids: Tensor, observer: LayerObserver, *, head: bool = False) -> Any:
    """Run `model` once in eval mode, without gradients, under `observer`.

    `token_ids` [B, L]. Returns what the model returns; of a language model its hidden states, or
    with `head` its logits of the last token alone. Its mode and its attention are as before
    afterwards, also after an error.

    Raises:
        ModelError: a model that cannot be run or observed so.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        set_to_multihead(model, stack)
        observer.running = stack.enter_context(running_modules(model))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(observing(observer))
        stack.callback(_restore_modes, [(it, it.training) for it in model.modules()])
        model.eval()
        result = _call(model, token_ids, head)
    if not observer.layers:
        raise ModelError(f"{type(model).__name__} ran without a call of attention.")
    return result


def vocabulary_size(model: nn.Module) -> int:
    """How many tokens a model knows; raises ModelError where nothing tells."""
    size = getattr(_text_config(model), "vocab_size", None)
    if size is None:
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        size = tables[0].num_embeddings if tables else None
    if size is None:
        raise ModelError(
            f"{type(model).__name__} tells no size of a vocabulary: it has neither a config with "
            "vocab_size nor an nn.Embedding. Only models of tokens can be probed."
        )
    return int(size)


def check_positions(model: nn.Module, length: int, remedy: str) -> None:
    """Raise ArgumentError where a model has fewer positions than `length`."""
    positions = position_count(model)
    if positions is not None and positions < length:
        raise ArgumentError(
            f"{length} tokens are needed, but the model has {positions} positions. {remedy}"
        )


def position_count(model: nn.Module) -> int | None:
    """How many positions a model was made for; None where nothing tells."""
    for name in ("max_position_embeddings", "max_positions"):
        positions = getattr(_text_config(model), name, None)
        if isinstance(positions, int):
            return positions - _padded_positions(model)
    return None


def _padded_positions(model: nn.Module) -> int:
    """RoBERTa and its like count positions from behind the padding token's number."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return 0 if module.padding_idx is None else module.padding_idx + 1
    return 0


def one_text(model: nn.Module, input_ids: Tensor | Sequence[int]) -> Tensor:
    """The tokens of one text, [L] or [1, L], as int64 [1, L] on the model's device.

    Raises:
        ArgumentError: no tokens of one text of this model, or more than it has positions.
        ModelError: a model that tells no size of a vocabulary.
    """
    device = next(model.parameters()).device
    token_ids = torch.as_tensor(input_ids, device=device)
    if token_ids.ndim == 1:
        token_ids = token_ids[None]
    if token_ids.ndim != 2 or len(token_ids) != 1 or not token_ids.numel():
        raise ArgumentError(
            f"input_ids must be the tokens of one text, [L] or [1, L]; got "
            f"{list(token_ids.shape)}. Give the texts of a batch one by one."
        )
    size = vocabulary_size(model)
    whole = not (token_ids.is_floating_point() or token_ids.dtype == torch.bool)
    if not whole or int(token_ids.min()) < 0 or int(token_ids.max()) >= size:
        raise ArgumentError(f"input_ids must be integers from 0 to {size - 1}.")
    check_positions(model, token_ids.shape[1], "Give a shorter text.")
    return token_ids.long()


def is_transformers(model: nn.Module) -> bool:
    """Whether `model` is a transformers model."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _text_config(model: nn.Module) -> Any:
    """The config of the part that reads text, None for a model without one."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _call(model: Any, token_ids: Tensor, head: bool) -> Any:
    if isinstance(model, EncoderDecoder) or _has_two_stacks(model):
        raise ModelError(
            f"{type(model).__name__} is an encoder with a decoder; this reads one text with one "
            "stack of layers. Pass its encoder."
        )
    if isinstance(model, LanguageModel):
        return model(token_ids, rows="last") if head else model.hidden(token_ids)
    if isinstance(model, Encoder) or not is_transformers(model):
        return model(token_ids)
    if not head:
        return model.base_model(input_ids=token_ids, **_without_cache(model.base_model))
    keywords = {**_without_cache(model)}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        keywords["logits_to_keep"] = 1
    return model(input_ids=token_ids, **keywords)


def _without_cache(model: Any) -> dict[str, Any]:
    """Encoders have no cache to do without."""
    return {"use_cache": False} if hasattr(model.config, "use_cache") else {}


def _has_two_stacks(model: Any) -> bool:
    return is_transformers(model) and bool(getattr(model.config, "is_encoder_decoder", False))


def _restore_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training
