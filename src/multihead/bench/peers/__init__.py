"""Other implementations of the same call, each in a module of its own and each optional.

A peer has a NAME, the PACKAGE that brings it, and `contestant(case, query, key, value, threads)`,
which prepares everything that is not the call itself and raises `Declined` with the reason where
the peer cannot make the call. A peer imports its package there, not when its module is imported.
"""

from multihead.bench.peers.registry import FLEX, PEERS, Peer, enter, find

__all__ = ["FLEX", "PEERS", "Peer", "enter", "find"]
