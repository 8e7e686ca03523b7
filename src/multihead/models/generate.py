"""Continuing texts: prompts of any lengths together, token by token.

Shape suffixes: b batch, l column, v vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..errors import ArgumentError, DtypeError
from ..masks import KeyPadding
from ..nn import Cache
from ..nn.checks import check_sizes
from .caches import CacheKind, check_caches, length_of
from .embeddings import check_token_ids
from .encoder_decoder import Reading
from .language_model import LanguageModel
from .prompts import Batch, Prompts, batch_of
from .sampling import Sampling


@dataclass(frozen=True, eq=False)
class Step:
    """One more token of each row.

    Attributes:
        tokens: a token a row; None for a row that has ended.
        logits: [B, V], what they were chosen from.
    """

    tokens: tuple[int | None, ...]
    logits: Tensor


def generate(
    model: LanguageModel | Reading,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Collection[int] = (),
    padding: KeyPadding | None = None,
    generator: torch.Generator | None = None,
    cache: CacheKind | Sequence[Cache] = "growing",
    prefix: Sequence[Cache] | None = None,
    chunk: int | None = None,
) -> list[list[int]]:
    """Continue each prompt by up to `max_new_tokens` tokens.

    A row's logits are those of its prompt alone: positions count its own tokens, and padding is
    never seen, whatever its id and on whichever side.

    Args:
        model: a language model, or an encoder-decoder that reads a source (`reading`).
        prompts: integer tensor [L] or [B, L], a sequence of tokens, or a sequence of rows of any
            lengths.
        max_new_tokens: where a row ends at the latest.
        temperature: 0 takes the likeliest token each time; above 0 tokens are drawn, from a flatter
            distribution the higher it is.
        top_k: draw among the k likeliest tokens.
        top_p: draw among the fewest likeliest tokens whose probabilities sum to `top_p` or more.
        stop: the tokens after which a row ends; they are part of what is returned.
        padding: which entries of a tensor [B, L] are tokens; without it all are.
        generator: what drawing takes its randomness from; torch's own if None. The same seed gives
            the same tokens for the same batch.
        cache: what keeps earlier tokens, a kind of `LanguageModel.make_caches`; or its caches. What
            these hold comes before the prompts, and afterwards they hold every token but the last:
            a conversation goes on from them. Prompts are then of one length, and a row that ends
            before the others holds what came after its end.
        prefix: caches as well, which stay as they are: forks of them are filled. A common beginning
            is computed once.
        chunk: read prompts in pieces of so many columns, which bounds the memory of long ones.

    Returns:
        The new tokens of each row.

    Raises:
        ArgumentError: an empty prompt, a number out of range, more tokens than a learned table has
            positions, or a prefix that does not fit.
        DtypeError: tokens or numbers of another type, or a model of another kind.
        ModelError: logits that are not finite.
    """
    texts: list[list[int]] = [[] for _ in batch_of(prompts, padding).token_ids]
    for step in generate_steps(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop,
        padding=padding,
        generator=generator,
        cache=cache,
        prefix=prefix,
        chunk=chunk,
    ):
        for text, token in zip(texts, step.tokens, strict=True):
            if token is not None:
                text.append(token)
    return texts


def generate_steps(
    model: LanguageModel | Reading,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Collection[int] = (),
    padding: KeyPadding | None = None,
    generator: torch.Generator | None = None,
    cache: CacheKind | Sequence[Cache] = "growing",
    prefix: Sequence[Cache] | None = None,
    chunk: int | None = None,
) -> Iterator[Step]:
    """What `generate` does, a step at a time; it ends when every row has ended.

    Takes the arguments of `generate` and raises what it does: all but `ModelError` at once, not at
    the first step.
    """
    sampling = Sampling(temperature, top_k, top_p)
    if not hasattr(model, "hidden"):
        raise DtypeError(
            f"generate continues texts by a multihead.LanguageModel; got {type(model).__name__}."
        )
    if max_new_tokens != 0:
        check_sizes(max_new_tokens=max_new_tokens)
    if chunk is not None:
        check_sizes(chunk=chunk)
    batch = batch_of(prompts, padding, device=model.embedding.weight.device)
    check_token_ids(batch.token_ids, model.config.vocab_size)
    columns = batch.token_ids.shape[1] + max_new_tokens
    caches = _caches(model, cache, prefix, len(batch.token_ids), columns)
    if batch.visible is not None and not isinstance(cache, str):
        raise ArgumentError(
            "prompts of different lengths would leave their padding in your caches, where the next "
            "call takes it for tokens. Give cache a kind, or generate them one at a time."
        )
    held = length_of(caches)
    _check_room(model, held + columns)
    if held:
        _check_columns(model, batch)
    stops = _stops(stop, model.config.vocab_size)
    run = _Run(model, caches, batch, max_new_tokens)

    def choose(logits_bv: Tensor) -> Tensor:
        return sampling.choose(logits_bv, generator)

    return _steps(run, choose, stops, max_new_tokens, chunk)


def _steps(
    run: _Run,
    choose: Callable[[Tensor], Tensor],
    stops: frozenset[int],
    max_new_tokens: int,
    chunk: int | None,
) -> Iterator[Step]:
    if max_new_tokens == 0:
        return
    logits_bv = run.prefill(chunk)
    running = [True] * len(logits_bv)
    for remaining in reversed(range(max_new_tokens)):
        chosen_b = choose(logits_bv)
        tokens = [
            token if runs else None for token, runs in zip(chosen_b.tolist(), running, strict=True)
        ]
        yield Step(tuple(tokens), logits_bv)
        running = [token is not None and token not in stops for token in tokens]
        if remaining == 0 or not any(running):
            return
        # A row that has ended goes on to the end of the others: nothing of theirs depends on it.
        logits_bv = run.decode(chosen_b)


class _Run:
    """A batch on its way through a model: its caches, and which of their columns are tokens."""

    def __init__(
        self,
        model: LanguageModel | Reading,
        caches: Sequence[Cache],
        batch: Batch,
        max_new_tokens: int,
    ) -> None:
        self.model = model
        self.caches = caches
        self.token_ids = batch.token_ids
        self.visible: Tensor | None = None
        if batch.visible is not None:
            # A row's columns begin behind its own part of the prefix; all but padding are tokens.
            columns_bl = caches[0].positions(batch.visible.shape[1]).to(batch.visible.device)
            width = length_of(caches) + batch.visible.shape[1] + max_new_tokens
            self.visible = batch.visible.new_ones(len(batch.visible), width).scatter_(
                1, columns_bl.expand_as(batch.visible), batch.visible
            )

    @torch.no_grad()
    def prefill(self, chunk: int | None) -> Tensor:
        """The logits [B, V] of each prompt's last token."""
        length = self.token_ids.shape[1]
        chunk = length if chunk is None else chunk
        last = (length - 1) // chunk * chunk
        for start in range(0, last, chunk):
            self._hidden(self.token_ids[:, start : start + chunk])
        return self._last_logits(self.token_ids[:, last:])

    @torch.no_grad()
    def decode(self, tokens_b: Tensor) -> Tensor:
        """The logits [B, V] that follow one more token of each row."""
        return self._last_logits(tokens_b[:, None])

    def _last_logits(self, token_ids: Tensor) -> Tensor:
        return self.model.logits(self._hidden(token_ids)[:, -1:])[:, 0]

    def _hidden(self, token_ids: Tensor) -> Tensor:
        mask = None
        if self.visible is not None:
            columns = length_of(self.caches) + token_ids.shape[1]
            mask = KeyPadding(self.visible[:, :columns])
        return self.model.hidden(token_ids, mask=mask, caches=self.caches)


def _caches(
    model: LanguageModel | Reading,
    cache: CacheKind | Sequence[Cache],
    prefix: Sequence[Cache] | None,
    rows: int,
    columns: int,
) -> Sequence[Cache]:
    """The caches that a run fills."""
    if prefix is None and isinstance(cache, str):
        return model.make_caches(cache, batch=rows, capacity=columns)
    if prefix is not None and not isinstance(cache, str):
        raise ArgumentError(
            "cache and prefix both hold earlier tokens: give those to be written to as cache, or "
            "those to be left as they are as prefix."
        )
    if prefix is not None and cache != "growing":
        raise ArgumentError(
            f"cache={cache!r} was given, but tokens behind a prefix are kept as the prefix is. "
            f"Leave cache out, and fill caches of make_caches({cache!r}) for a prefix."
        )
    name, given = ("cache", cache) if prefix is None else ("prefix", prefix)
    check_caches(name, cast(Sequence[Cache], given), len(model.config.layers))
    return cast(Sequence[Cache], given) if prefix is None else [held.fork() for held in prefix]


def _stops(stop: int | Collection[int], vocab_size: int) -> frozenset[int]:
    """Python's integers: a tensor's elements would equal no token."""
    given = stop.flatten() if isinstance(stop, Tensor) else stop
    try:
        each = given if isinstance(given, Iterable) else (given,)
        stops = frozenset(map(operator.index, each))
    except TypeError:
        raise DtypeError(
            f"stop must be a token's integer, or several; got {stop!r}. Leave it out for none."
        ) from None
    outside = sorted(token for token in stops if not 0 <= token < vocab_size)
    if outside:
        raise ArgumentError(f"stop tokens must be from 0 to {vocab_size - 1}; got {outside[0]}.")
    return stops


def _check_room(model: LanguageModel | Reading, length: int) -> None:
    """Only a table runs out of positions; others go on, well or badly."""
    most = model.config.max_positions
    if model.config.positions == "learned" and most is not None and length > most + 1:
        raise ArgumentError(
            f"the prompt and max_new_tokens need {length - 1} positions, and the model's table has "
            f"{most}. Shorten the prompt, or ask for fewer tokens."
        )


def _check_columns(model: LanguageModel | Reading, batch: Batch) -> None:
    config = model.config
    counted = config.positions == "alibi" or any(
        getattr(block.attention, "window", None) is not None for block in model.blocks
    )
    if batch.visible is not None and counted:
        raise ArgumentError(
            "behind earlier tokens, prompts of different lengths have padding between their "
            "tokens, which windows and ALiBi would count. Generate them one at a time."
        )
