"""The calls of others in `multihead bench` are the same calls."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import multihead as mh
from bench_cases import CAUSAL, FULL, GROUPED, WINDOW, exact
from close import assert_close
from multihead.bench import (
    contest,
    peers,
    show,
    torch_calls,
    verify,
)
from multihead.bench.case import Case


@pytest.mark.parametrize("case", [FULL, CAUSAL, WINDOW], ids=lambda case: case.name)
def test_torch_makes_the_same_call(case: Case) -> None:
    query, key, value = case.inputs()
    expected = exact(case)
    plain = torch_calls.matmul(case, query, key, value)()
    assert_close(torch_calls.sdpa(case, query, key, value)(), expected, plain, factor=4.0)
    assert verify.expect(query, key, value, mask=case.mask).error(plain) < 0.05


def test_torch_groups_queries() -> None:
    query, key, value = GROUPED.inputs()
    plain = torch_calls.sdpa(GROUPED, query, key, value)()
    last = torch_calls.grouped_matmul(query[:, :, -1:], key, value)
    assert_close(last, exact(GROUPED)[:, :, -1:], plain[:, :, -1:], factor=4.0)


@pytest.mark.parametrize("size", [1, 4])
def test_a_window_by_blocks_is_the_window(size: int) -> None:
    case = Case("window", torch.float32, queries=12, keys=12, mask=mh.SlidingWindow(size))
    inputs = case.inputs()
    call, result = torch_calls.window_blocks(size, *inputs)
    assert_close(result(), exact(case), torch_calls.matmul(case, *inputs)(), factor=4.0)
    assert call().numel() == result().numel()


def test_documents_by_batch_are_the_documents() -> None:
    mask = mh.Documents(torch.arange(15)[None] // 5)
    case = Case("packed", torch.float32, queries=15, keys=15, mask=mask)
    inputs = case.inputs()
    _, result = torch_calls.batched_documents(3, *inputs)
    assert_close(result(), exact(case), torch_calls.matmul(case, *inputs)(), factor=4.0)


def installed(peer: peers.Peer) -> bool:
    return importlib.util.find_spec(peer.PACKAGE) is not None


# flex_attention compiles for half a minute: it has a test of its own.
HERE = [peer for peer in peers.PEERS if installed(peer) and peer.NAME != peers.FLEX]


@pytest.mark.slow
def test_the_peers_that_are_installed_make_the_same_call_or_say_why_not() -> None:
    """The extra `bench` installs all of them; those of `test` leave them out."""
    for peer in HERE:
        for case in (
            FULL,
            replace(FULL, dtype=torch.bfloat16),
            replace(CAUSAL, dtype=torch.float32),
        ):
            query, key, value = case.inputs()
            expected = verify.expect(query, key, value, mask=case.mask)
            try:
                found = peer.contestant(case, query, key, value, threads=1)
            except contest.Declined:
                continue
            with torch.inference_mode():
                found.call()
                assert found.result().dtype == case.dtype
                assert expected.error(found.result()) <= expected.peers_bound
        with pytest.raises(contest.Declined, match="window-5 mask"):
            peer.contestant(WINDOW, *WINDOW.inputs(), threads=1)


@pytest.mark.slow
def test_flex_attention_makes_the_same_call() -> None:
    (flex,) = (peer for peer in peers.PEERS if peer.NAME == peers.FLEX)
    mask = mh.Documents(torch.arange(256)[None] // 64)
    case = Case("packed", torch.float32, 256, 256, heads=2, kv_heads=2, mask=mask)
    inputs = case.inputs()
    try:
        found = flex.contestant(case, *inputs, threads=1)
    except contest.Declined as reason:
        pytest.skip(str(reason))
    with torch.inference_mode():
        out = found.result()
    assert_close(out, exact(case), torch_calls.matmul(case, *inputs)(), factor=4.0)
    assert found.first_call_seconds is not None


def test_flex_attention_that_does_not_compile_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead.bench.peers import flex

    def fails(call: object) -> None:
        raise RuntimeError("no <omp.h>\nand a long log")

    monkeypatch.setattr(flex, "_compile", fails)
    monkeypatch.setattr(flex.shutil, "which", lambda name: f"/bin/{name}")
    with pytest.raises(contest.Declined, match=r"does not compile here: RuntimeError: no <omp.h>$"):
        flex.contestant(FULL, *FULL.inputs(), threads=1)
    monkeypatch.setattr(flex.shutil, "which", lambda name: None)
    with pytest.raises(contest.Declined, match=r"needs a C\+\+ compiler"):
        flex.contestant(FULL, *FULL.inputs(), threads=1)


def test_a_peer_that_is_not_installed_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    from multihead.bench.peers import registry

    class Absent:
        NAME, PACKAGE = "absent", "no-such-package"

    monkeypatch.setattr(registry, "PEERS", (Absent,))
    found = peers.find(["absent", "another"], threads=1)
    assert found == {"absent": {"absent": "not installed"}}
    assert list(show.peers_lines(found)) == ["  peers: absent not installed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "ended by signal 4"),
        ('raise SystemExit("its result differs")', "its result differs"),
        ("", None),
    ],
)
def test_a_peer_that_does_not_run_here_is_listed(
    code: str, reason: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from multihead.bench.peers import registry

    class Here:
        NAME, PACKAGE = "here", "numpy"

    monkeypatch.setattr(registry, "PEERS", (Here,))
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {registry.sys.executable} -c '{code}'\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(registry.sys, "executable", str(tmp_path / "python"))
    found = peers.find(["here"], threads=1)["here"]
    assert found["version"]
    assert found.get("absent") == (reason and f"does not run here: {reason}")
