"""Peak memory where the score table would be 1 GiB: four heads of 8192 x 8192 in float32.

Each test is one fresh process, in which a peak is nobody else's; within it, every call must leave
the peak where the inputs alone had put it, but for `MOST`. One thread, so that a busy machine is as
fast as its work. The kernel is held to 32 MiB beyond inputs and outputs by `memory_pairs.py`.
"""

import sys
import textwrap
from pathlib import Path

import pytest
import torch

import memory_pairs
from multihead.bench.fresh import Usage, run_fresh
from requires import require

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="the system does not tell a process's peak"
)

MIB = 2**20
MOST = 150 * MIB

SET_UP = f"""
import torch
import multihead as mh
from multihead.heads.inspecting.inspection import _peak_rss_bytes as peak

N, H, D = 8192, 4, 16
query = torch.randn(1, H, N, D)
key, value = torch.randn(2, 1, H, N, D).unbind()
ids = torch.arange(N) // 500
masks = {{
    "nothing": None,
    "causal": mh.Causal(),
    "window": mh.SlidingWindow(257),
    "kept start": mh.Window(257, 0, keep_first=4),
    "prefix": mh.PrefixCausal(1031),
    "padding": mh.Causal() & mh.KeyPadding(torch.arange(N)[None] >= 97),
    "lengths": mh.KeyLengths(torch.tensor([N - 5]), query_lengths=torch.tensor([N - 5])),
    "start": mh.Causal() & mh.QueryStart(-3),
    "documents": mh.Documents(ids),
    "positions": mh.Causal() & mh.Positions(ids, ids),
    "a row of keys": (torch.arange(N) >= 97)[None, None, None],
}}
start = peak()

def check(name):
    grown = peak() - start
    assert grown < {MOST}, f"{{name}}: {{grown / {MIB}:.0f}} MiB more than the inputs"
"""

FORWARD = """
for name, mask in masks.items():
    mh.attention(query, key, value, mask=mask)
    check(name)
    mh.attention(query, key[:, :2], value[:, :2], mask=mask)
    check(f"{name}, grouped queries")
mh.attention(query, key, value, bias=torch.randn(1, N))
check("bias over keys")
mh.attention_with_stats(query, key, value, mask=mh.Causal(), stats=mh.STATISTICS)
check("statistics")
"""

CHUNKED = """
for name in ("window", "padding"):
    mh.attention(query, key, value, mask=masks[name], backend="chunked")
    check(name)
"""

BACKWARD = """
for tensor in (query, key, value):
    tensor.requires_grad_()
bias = torch.randn(1, 1, 1, N, requires_grad=True)
mh.attention(query, key, value, mask=masks["window"]).sum().backward()
check("window")
few = key[:, :2], value[:, :2]
mh.attention(query, *few, mask=masks["a row of keys"], bias=bias).sum().backward()
check("grouped queries, bias over keys")
assert query.grad.isfinite().all() and bias.grad.isfinite().all()
"""

EVERY_BACKWARD = """
for tensor in (query, key, value):
    tensor.requires_grad_()
bias = torch.randn(1, 1, 1, N, requires_grad=True)
slopes = torch.rand(H, requires_grad=True)
variants = {
    **{name: {"mask": mask} for name, mask in masks.items()},
    "bias over keys": {"bias": bias},
    "alibi": {"bias": mh.ALiBi(slopes), "mask": mh.Causal()},
    "softcap and sinks": {"softcap": 5.0, "sinks": slopes, "mask": mh.Causal()},
}
for name, options in variants.items():
    mh.attention(query, key[:, :2], value[:, :2], **options).sum().backward()
    check(name)
result = mh.attention_with_stats(query, key, value, mask=mh.Causal())
(result.out.sum() + result.entropy.sum() + result.lse.sum()).backward()
check("statistics")
assert all(x.grad.isfinite().all() for x in (query, key, value, bias, slopes))
"""

LAYER = """
layer = mh.MultiHeadAttention(64, 4, num_kv_heads=2)
x = torch.randn(1, 4096, 64)  # a table of scores would be 256 MiB
shown = torch.arange(4096)[None] >= 97
start = peak()
for training in (True, False):
    layer.train(training)
    for name, options in {
        "nothing": {},
        "causal": {"mask": mh.Causal()},
        "padding": {"mask": mh.KeyPadding(shown)},
        "a row of keys": {"mask": shown[None, None]},
        "bias over keys": {"bias": torch.zeros(1, 4096)},
    }.items():
        with torch.no_grad():
            layer(x, **options)
            layer.forward_with_stats(x, stats=mh.STATISTICS, **options)
        check(f"{name}, train={training}")
layer(x, mask=mh.KeyPadding(shown)).sum().backward()
check("backward")
"""

PIECES = """
for name in ("documents", "a row of keys"):
    options = {"mask": masks[name]}
    result = mh.attention_with_stats(query, key, value, stats=("lse",), **options)
    result.weights(slice(None), [0, -1])
    check(f"weights, {name}")
    mh.attention_map(query, key, result.lse, **options)
    check(f"map, {name}")
    mh.received_attention(query, key, result.lse, **options)
    check(f"received, {name}")
"""

LENGTHS = f"""
def resident():
    import os
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def call(length):
    parts = (x[:, :, :length] for x in (query, key, value))
    mh.attention_with_stats(*parts, mask=mh.Causal(), stats=("lse", "entropy"))
call(1000)
before = resident()
for length in range(1000, 3000, 50):
    call(length)
grown = resident() - before
assert grown < {20 * MIB}, f"{{grown / {MIB}:.0f}} MiB more after 40 lengths"
"""


def run(code: str) -> Usage:
    return run_fresh(["-c", SET_UP + textwrap.dedent(code)], threads=1)


@pytest.mark.slow
def test_attention() -> None:
    require("native")
    run(FORWARD)


@pytest.mark.slow
def test_attention_by_tensor_operations() -> None:
    run(CHUNKED)


@pytest.mark.slow
def test_gradients() -> None:
    run(BACKWARD)


@pytest.mark.proof
def test_gradients_of_every_mask() -> None:
    run(EVERY_BACKWARD)


@pytest.mark.slow
def test_a_layer() -> None:
    """Users of torch's met the whole table in eval mode, and twice that with padding."""
    run(LAYER)


@pytest.mark.slow
def test_pieces_of_the_matrix() -> None:
    run(PIECES)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_lengths_leave_nothing_behind() -> None:
    run(LENGTHS)


PAIRS = str(Path(memory_pairs.__file__))
linux = pytest.mark.skipif(sys.platform != "linux", reason="resets the peak by /proc")


@linux
@pytest.mark.slow
def test_pairs_of_features() -> None:
    require("native")
    run_fresh([PAIRS, "8192"], threads=2)


@linux
@pytest.mark.proof
def test_pairs_of_features_of_a_long_call() -> None:
    require("native")
    run_fresh([PAIRS, "32768"], threads=2)


@linux
@pytest.mark.proof
def test_each_feature_of_a_long_call_without_a_window() -> None:
    require("native")
    run_fresh([PAIRS, "32768", "--alone"], threads=2)


@linux
def test_what_a_call_takes_is_told_from_what_it_returns() -> None:
    def take_32_and_return_16_mib() -> list[torch.Tensor]:
        return [torch.ones(8 * MIB)[: 4 * MIB] * 2]

    take_32_and_return_16_mib()  # loads the code, which is memory too
    taken = memory_pairs.bytes_beyond(take_32_and_return_16_mib)
    assert 30 * MIB < taken < 34 * MIB


def test_the_whole_table_would_not_pass() -> None:
    from multihead.errors import MultiheadError

    with pytest.raises(MultiheadError, match=r"the whole table: \d+ MiB more than the inputs"):
        run("(query @ key.mT)\ncheck('the whole table')")


@pytest.mark.slow
def test_an_inspection() -> None:
    require("models")
    inspect = ["-m", "multihead", "inspect", "--max-tokens", "1024", "--json"]
    assert run_fresh(inspect, threads=2).peak_rss_bytes < 3e9


@pytest.mark.proof
def test_a_long_inspection() -> None:
    require("models")
    inspect = ["-m", "multihead", "inspect", "--max-tokens", "8192", "--json"]
    assert run_fresh(inspect, threads=2).peak_rss_bytes < 3e9
