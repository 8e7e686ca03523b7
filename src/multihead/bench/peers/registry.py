"""Which peers there are, which of them run here, and who takes part in a row."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol, cast

from torch import Tensor

from multihead.bench.case import Case
from multihead.bench.contest import Contestant, Declined, Field, Setting
from multihead.bench.peers import flex, jax_attention, onnx_runtime, openvino_sdpa, zen

_PROBE_SECONDS = 180

FLEX = flex.NAME


class Peer(Protocol):
    """A module of this package."""

    NAME: str
    PACKAGE: str

    def contestant(
        self, case: Case, query: Tensor, key: Tensor, value: Tensor, threads: int
    ) -> Contestant:
        """Everything up to the call; raises Declined where the peer can't make it."""


PEERS: tuple[Peer, ...] = tuple(
    cast(Peer, module) for module in (zen, onnx_runtime, openvino_sdpa, jax_attention, flex)
)


def find(names: Iterable[str], *, threads: int) -> dict[str, dict[str, str]]:
    """For each of these peers its version, and why it does not run here where it does not.

    One tiny call of each is made in a process of its own: a peer built for another processor may
    end the process that loads it.
    """
    return {peer.NAME: _find(peer, threads) for peer in PEERS if peer.NAME in set(names)}


def enter(
    setting: Setting,
    case: Case,
    inputs: tuple[Tensor, Tensor, Tensor],
    contestants: Mapping[str, Contestant],
    *,
    leave_out: Iterable[str] = (),
) -> Field:
    """These contestants and every peer of the setting, and the reasons of those that decline."""
    entrants, declined = dict(contestants), {}
    for peer in PEERS:
        if peer.NAME not in setting.peers or peer.NAME in leave_out:
            continue
        try:
            entrants[peer.NAME] = peer.contestant(case, *inputs, setting.threads)
        except Declined as reason:
            declined[peer.NAME] = str(reason)
    return Field(entrants, declined)


def _find(peer: Peer, threads: int) -> dict[str, str]:
    try:
        found = {"version": version(peer.PACKAGE)}
    except PackageNotFoundError:
        return {"absent": "not installed"}
    if peer.PACKAGE == "torch":  # loaded already, and its compiler takes longer than a probe
        return found
    command = [sys.executable, "-m", "multihead.bench.peers.probe", peer.NAME, str(threads)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {**found, "absent": f"does not run here: no result after {_PROBE_SECONDS} s"}
    if done.returncode == 0:
        return found
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    reason = f"ended by signal {-done.returncode}" if done.returncode < 0 else last[:200]
    return {**found, "absent": f"does not run here: {reason}"}
