"""A real text in characters, and small language models of it, for the claims that need one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional as F

from multihead import LanguageModel
from training import train

CONTEXT = 128
VOCABULARY = 96

_TEST_WINDOWS = 96


@dataclass(frozen=True)
class Text:
    """Characters as numbers, those that are rare as one, and the windows that are held out.

    `train` int64 [characters]; `test` [windows, CONTEXT + 1], from the last tenth of the text.
    """

    train: Tensor
    test: Tensor


@cache
def text() -> Text:
    """The prose of Python's own documentation, which every Python brings."""
    from pydoc_data.topics import topics

    prose = "\n\n".join(topics[name] for name in sorted(topics))
    common = [character for character, _ in Counter(prose).most_common(VOCABULARY - 1)]
    numbers = {character: number for number, character in enumerate(common)}
    ids = torch.tensor([numbers.get(character, VOCABULARY - 1) for character in prose])
    border = len(ids) * 9 // 10
    starts = torch.linspace(border, len(ids) - CONTEXT - 1, _TEST_WINDOWS).long()
    test = torch.stack([ids[start : start + CONTEXT + 1] for start in starts])
    return Text(train=ids[:border], test=test)


def learn(
    model: LanguageModel, *, seed: int, steps: int, every: int, batch: int = 8
) -> list[float]:
    """Train a model, and return its loss on the held-out windows every so many steps, in nats.

    The windows that it learns from, and their order, depend on the seed alone.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, offsets = text().train, torch.arange(CONTEXT + 1)
    losses, done = [], count()

    def loss() -> Tensor:
        step = next(done)
        if step and step % every == 0:
            losses.append(held_out(model))
        starts = torch.randint(len(ids) - CONTEXT - 1, (batch, 1), generator=generator)
        return _loss(model, ids[starts + offsets])

    train(model.parameters(), loss, steps, rate=3e-3)
    return [*losses, held_out(model)]


def held_out(model: LanguageModel) -> float:
    """The mean loss on the held-out windows, in nats a character."""
    with torch.no_grad():
        return float(_loss(model, text().test))


def _loss(model: LanguageModel, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
