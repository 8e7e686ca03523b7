"""How many query-key pairs a layer's own mask lets one head see, in closed form."""

from __future__ import annotations

from multihead.cost.checks import check_counts, check_sizes
from multihead.errors import ArgumentError


def visible_pairs(
    queries: int,
    keys: int,
    *,
    causal: bool = True,
    window: int | None = None,
    window_ahead: int = 0,
    keep_first: int = 0,
) -> int:
    """Pairs of a query and a key that it sees, for one head of one row.

    The queries are the newest of the keys: query i stands at position keys - queries + i, so a
    step of decoding continues what came before.

    Args:
        queries, keys: how many there are.
        causal: no query sees a later key.
        window: how many of the newest keys a query sees, its own included; None is all.
        window_ahead: with a window, how many later keys it sees; only without `causal`.
        keep_first: with a window, how many of the first keys every query sees that is not before
            them.

    Raises:
        ArgumentError: a negative count, a window below 1, or keys ahead in a causal layer.
    """
    check_counts(queries=queries, keys=keys, window_ahead=window_ahead)
    check_counts(keep_first=keep_first)
    if window is not None:
        check_sizes(window=window)
    if causal and window_ahead:
        raise ArgumentError(
            f"window_ahead is {window_ahead}, but a causal layer sees nothing ahead; "
            "give causal=False."
        )
    first = keys - queries
    if causal or window is not None:
        until = _clamped_sum(first + 1 + window_ahead, queries, keys)
    else:
        until = queries * keys
    if window is None:
        return until
    before = first - window + 1
    kept = _clamped_sum(before, queries, min(keep_first, keys))
    return until - _clamped_sum(before, queries, keys) + kept


def _clamped_sum(first: int, count: int, top: int) -> int:
    """The sum of x clamped to [0, top], for `count` integers x from `first` on."""

    def below(end: int) -> int:
        """The same sum over all integers 0 <= x < end."""
        end = max(end, 0)
        low = min(end, top)
        return low * (low - 1) // 2 + (end - low) * top

    return below(first + count) - below(first)
