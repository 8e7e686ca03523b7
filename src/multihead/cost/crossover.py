"""Where attention overtakes the projections: the context from which scores and values cost more."""

from __future__ import annotations

from typing import Literal

from multihead.cost.checks import check_choice
from multihead.cost.model import Model
from multihead.cost.operations import Counting, Pass, forward

Against = Literal["projections", "rest"]

_LONGEST = 2**40


def crossover(
    model: Model, against: Against = "projections", *, counting: Counting = "visible"
) -> int | None:
    """The shortest prefill whose Q K^T and P V have more products than another part.

    Args:
        against: the attention projections, or all the rest of the layers, feed-forward included
            (a head's logits, which a prefill needs once, are left out).
        counting: of pairs; a causal mask halves attention, and so doubles the context.

    Returns:
        Tokens; None where attention never overtakes, as with windows in all layers.
    """
    check_choice("against", against, ("projections", "rest"))

    def overtakes(tokens: int) -> bool:
        counted = forward(model, Pass(tokens, logit_rows=0), counting=counting)
        rest = counted.projections
        if against == "rest":
            rest += counted.feed_forward + counted.router
        return counted.attention > rest

    if not overtakes(_LONGEST):
        return None
    low, high = 0, _LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overtakes(middle) else (middle, high)
    return high
