"""The suite `grouped`: few KV heads against as many as query heads, bfloat16 against float32."""

from __future__ import annotations

import torch

from multihead.bench.case import Case, Entry
from multihead.bench.contest import OURS, TORCH, Contestant, Field, Setting, measure, ours
from multihead.bench.suites.row import Row, of_case
from multihead.bench.torch_calls import sdpa
from multihead.bench.verify import expect

EXPANDED, TORCH_EXPANDED, FLOAT32 = "multihead expanded", "torch expanded", "multihead float32"


def rows(*, quick: bool) -> list[Row]:
    """16 query heads on 2 KV heads."""
    length = 64 if quick else 1024
    return [
        of_case(Case("grouped-16-2", dtype, length, length, heads=16, kv_heads=2), _measure)
        for dtype in (torch.float32, torch.bfloat16)
    ]


def _measure(case: Case, setting: Setting) -> Entry:
    """Against keys and values expanded before the call, and ours in float32 on the same numbers."""
    query, key, value = case.inputs()
    wide = [x.repeat_interleave(case.heads // case.kv_heads, dim=1) for x in (key, value)]
    same = Case(case.kind, case.dtype, case.queries, case.keys, case.heads, case.heads)
    contestants = {
        OURS: Contestant.of(ours(query, key, value)),
        EXPANDED: Contestant.of(ours(query, *wide)),
        TORCH: Contestant.of(sdpa(case, query, key, value)),
        TORCH_EXPANDED: Contestant.of(sdpa(same, query, *wide)),
    }
    if case.dtype != torch.float32:
        contestants[FLOAT32] = Contestant.of(ours(query.float(), key.float(), value.float()))
    return measure(case, Field(contestants), expect(query, key, value), setting)
