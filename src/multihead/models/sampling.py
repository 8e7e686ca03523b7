"""Choosing the next token from logits.

Shape suffixes: b batch, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ArgumentError, DtypeError, ModelError
from ..nn.checks import check_number, check_sizes


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen: the likeliest one, or drawn.

    Attributes:
        temperature: 0 takes the token of the largest logit; otherwise logits are divided by it.
        top_k: draw among the k likeliest tokens; None for all. Ties beyond k are left out.
        top_p: then draw among the fewest likeliest tokens whose probabilities sum to `top_p` or
            more; None for all. The likeliest token is always among them.

    Raises:
        ArgumentError: a temperature below 0 or not finite, top_k below 1, or top_p not in (0, 1].
        DtypeError: one that is no number.

    Source: Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature is None:
            raise DtypeError("temperature must be a number; got None. 0 takes the likeliest token.")
        check_number("temperature", self.temperature, "0 takes the likeliest token.")
        if self.temperature < 0:
            raise ArgumentError(
                f"temperature must be 0 (the likeliest token) or above; got {self.temperature}."
            )
        if self.top_k is not None:
            check_sizes(top_k=self.top_k)
        check_number("top_p", self.top_p, "None means all.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ArgumentError(
                f"top_p must be above 0 and at most 1; got {self.top_p}. None means all."
            )

    def probabilities(self, logits_bv: Tensor) -> Tensor:
        """The distribution that tokens are drawn from, [B, V] in float64; 0 for what is left out.

        At temperature 0 it is 1 for the chosen token.
        """
        whole_bv = torch.zeros_like(logits_bv, dtype=torch.float64)
        if self.temperature == 0:
            return whole_bv.scatter_(1, logits_bv.argmax(-1, keepdim=True), 1.0)
        candidates_bk, tokens_bk = self._candidates(logits_bv)
        return (
            candidates_bk if tokens_bk is None else whole_bv.scatter_(1, tokens_bk, candidates_bk)
        )

    def choose(self, logits_bv: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A token for each row of `logits_bv` [B, V]; int64 [B].

        `generator` is torch's own if None; at temperature 0 nothing is drawn from it.

        Raises:
            ModelError: a row's largest logit is NaN or infinite.
        """
        largest_b, tokens_b = logits_bv.max(-1)
        if not bool(largest_b.isfinite().all()):
            raise ModelError(
                "The model's logits are not finite, so there is no next token to choose: its "
                "weights hold NaN or infinity, or overflow its dtype."
            )
        if self.temperature == 0:
            return tokens_b
        candidates_bk, tokens_bk = self._candidates(logits_bv)
        drawn_b1 = torch.multinomial(candidates_bk, 1, generator=generator)
        return (drawn_b1 if tokens_bk is None else tokens_bk.gather(1, drawn_b1))[:, 0]

    def _candidates(self, logits_bv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Probabilities [B, K], 0 for what top_p leaves out, and the tokens that they are of.

        None for the tokens is the vocabulary in its order: without top_k and top_p nothing is
        sorted. In float64, so that no temperature above 0 divides by zero.
        """
        if self.top_k is None and self.top_p is None:
            return _softmax(logits_bv.double(), self.temperature), None
        kept = logits_bv.shape[-1] if self.top_k is None else min(self.top_k, logits_bv.shape[-1])
        logits_bk, tokens_bk = logits_bv.topk(kept, dim=-1)
        probabilities_bk = _softmax(logits_bk.double(), self.temperature)
        if self.top_p is not None:
            before_bk = probabilities_bk.cumsum(-1) - probabilities_bk
            before_bk[:, 0] = 0.0  # which rounding may make a little more
            probabilities_bk = probabilities_bk.masked_fill(before_bk >= self.top_p, 0.0)
            probabilities_bk = probabilities_bk / probabilities_bk.sum(-1, keepdim=True)
        return probabilities_bk, tokens_bk


def _softmax(logits_bk: Tensor, temperature: float) -> Tensor:
    """The largest logit becomes 0 before the division, which else may overflow."""
    return ((logits_bk - logits_bk.amax(-1, keepdim=True)) / temperature).softmax(-1)
