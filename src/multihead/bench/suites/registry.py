"""Which suites there are, what each shows, and whom each asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from multihead.bench.peers import FLEX, PEERS
from multihead.bench.suites import (
    agreement,
    corpus,
    cost,
    decode,
    generation,
    grouped,
    inspection,
    layer,
    masked,
    memory,
    models,
    overhead,
    prefill,
    removal,
    restriction,
    small,
)
from multihead.bench.suites.row import Row


class Rows(Protocol):
    """Makes a suite's rows; quick ones are small and mean nothing."""

    def __call__(self, *, quick: bool) -> list[Row]: ...


@dataclass(frozen=True)
class Suite:
    """Rows that are run, shown and recorded together."""

    name: str
    what: str
    rows: Rows
    peers: tuple[str, ...] = ()
    reads_memory: bool = False


_EVERY_PEER = tuple(peer.NAME for peer in PEERS)

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("prefill", "as many queries as keys", prefill.rows, _EVERY_PEER),
        Suite("window", "a window of 256 keys in 8192", masked.window_rows, (FLEX,)),
        Suite("packed", "16 documents of 512 tokens", masked.packed_rows, (FLEX,)),
        Suite("decode", "one query on keys in no cache", decode.rows, reads_memory=True),
        Suite("small", "few queries on 128 keys, in inference mode", small.rows),
        Suite("grouped", "16 query heads on 2 KV heads", grouped.rows),
        Suite("layer", "one layer at inference, projections included", layer.rows),
        Suite("models", "whole models, and nothing changed but who attends", models.rows),
        Suite("generation", "texts that go on: decoding, requests together", generation.rows),
        Suite("agreement", "what a token's logits owe to the batch and to the cut", agreement.rows),
        Suite("removal", "what SmolLM2 loses as its heads are taken away", removal.rows),
        Suite("restriction", "what it loses as heads see a window alone", restriction.rows),
        Suite("overhead", "what a feature adds to the plain call", overhead.rows),
        Suite("memory", "resident size beyond inputs and outputs, fresh processes", memory.rows),
        Suite(
            "cost",
            "peak memory and time, as predicted / as fresh processes measure them",
            cost.rows,
            reads_memory=True,
        ),
        Suite("inspect", "the whole inspection, each program in a fresh process", inspection.rows),
        Suite("corpus", "every head over a corpus of a million tokens", corpus.rows),
    )
}
