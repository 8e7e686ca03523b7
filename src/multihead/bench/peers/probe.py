"""One tiny call of a peer, checked: `python -m multihead.bench.peers.probe NAME THREADS`."""

from __future__ import annotations

import sys

import torch

from multihead.bench.case import Case
from multihead.bench.peers.registry import PEERS
from multihead.bench.verify import expect


def main(name: str, threads: int) -> None:
    """End without a word if the peer's result is right; raise otherwise."""
    torch.set_num_threads(threads)
    (peer,) = (peer for peer in PEERS if name == peer.NAME)
    case = Case("full", torch.float32, queries=37, keys=37, heads=4, kv_heads=4)
    query, key, value = case.inputs()
    expected = expect(query, key, value)
    with torch.inference_mode():
        out = peer.contestant(case, query, key, value, threads).result()
    error = expected.error(out)
    if not error <= expected.peers_bound:
        raise SystemExit(f"its result differs from float64 by {error:.1e}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
