"""The suites `window` and `packed`: masks that hide most of the table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from multihead.bench import peers
from multihead.bench.case import Case, Entry
from multihead.bench.contest import OURS, TORCH, Contestant, Setting, measure, ours
from multihead.bench.suites.row import Row, of_case
from multihead.bench.torch_calls import batched_documents, sdpa, window_blocks
from multihead.bench.verify import expect
from multihead.masks import Documents, SlidingWindow

BLOCKS, BATCH = "torch blocks", "torch batch"

# The inputs to a call, and to the call with its result in our layout.
Rewrite = Callable[[Tensor, Tensor, Tensor], tuple[Callable[[], Tensor], Callable[[], Tensor]]]


def window_rows(*, quick: bool) -> list[Row]:
    """A causal window of 256 keys in 8192."""
    size, length = (32, 256) if quick else (256, 8192)
    mask = SlidingWindow(size)
    return [
        of_case(
            Case(f"window-{size}", dtype, length, length, mask=mask),
            partial(_measure, BLOCKS, partial(window_blocks, size)),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]


def packed_rows(*, quick: bool) -> list[Row]:
    """Sixteen documents of 512 tokens in one row, which see themselves alone."""
    count, length = (16, 32) if quick else (16, 512)
    tokens = count * length
    mask = Documents(torch.arange(tokens)[None] // length)
    return [
        of_case(
            Case(f"packed-{count}x{length}", dtype, tokens, tokens, mask=mask),
            partial(_measure, BATCH, partial(batched_documents, count)),
        )
        for dtype in (torch.float32, torch.bfloat16)
    ]


def _measure(name: str, rewrite: Rewrite, case: Case, setting: Setting) -> Entry:
    """`torch` has a dense mask; `rewrite` gives torch's best way, and the result it stands for."""
    query, key, value = case.inputs()
    contestants = {
        OURS: Contestant.of(ours(query, key, value, mask=case.mask)),
        TORCH: Contestant.of(sdpa(case, query, key, value)),
        name: Contestant(*rewrite(query, key, value)),
    }
    field = peers.enter(setting, case, (query, key, value), contestants)
    return measure(case, field, expect(query, key, value, mask=case.mask), setting)
