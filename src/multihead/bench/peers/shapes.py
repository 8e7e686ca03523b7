"""What several peers have in common: calls that they have no word for."""

from __future__ import annotations

from multihead.bench.case import Case
from multihead.bench.contest import Declined
from multihead.masks import Causal

# Above this, forming the scores of all heads says nothing about attention but much about swapping.
_MOST_TABLE_BYTES = 2**30


def only_full_or_causal(case: Case) -> bool:
    """Whether the call is causal, with as many queries as keys; other masks are declined."""
    if case.mask is None:
        return False
    if not isinstance(case.mask, Causal) or case.queries != case.keys:
        raise Declined(f"has no {case.kind} mask but a dense one")
    return True


def no_large_table(case: Case) -> None:
    """Decline where a peer that forms the scores of all heads would need too much memory."""
    if case.table_bytes > _MOST_TABLE_BYTES:
        raise Declined(f"forms the table of scores, {case.table_bytes / 2**30:.1f} GiB here")
