"""Memory beyond inputs and outputs of every pair of features: `python memory_pairs.py LENGTH`.

Eight heads of 64, forward. For `multihead.bench.fresh`, a process in which nothing else happens;
ends with an error that names the calls above the bound. Linux and the GNU C library.

The kernel's memory belongs to a thread and knows no length, so pairs without a window of their own
see one as well: all of them then take seconds. `--alone` runs each feature by itself, without it.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from multihead.ops.backends import native

MIB = 2**20
MOST = 32 * MIB
HEADS, WIDTH = 8, 64
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h

Change = Callable[["Call"], "Call"]


@dataclass(frozen=True)
class Call:
    """One call, before its tensors are drawn."""

    length: int
    queries: int
    dtype: torch.dtype = torch.float32
    kv_heads: int = HEADS
    layout: str = "contiguous"
    masks: tuple[mh.Mask, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    stats: tuple[str, ...] = ()

    def tensor(self, heads: int, length: int) -> Tensor:
        if self.layout == "length before heads":
            return torch.randn(1, length, heads, WIDTH).to(self.dtype).transpose(1, 2)
        if self.layout == "every second element":
            return torch.randn(1, heads, length, 2 * WIDTH).to(self.dtype)[..., ::2]
        return torch.randn(1, heads, length, WIDTH).to(self.dtype)


def masked(rule: Callable[[Call], mh.Mask]) -> Change:
    return lambda call: replace(call, masks=(*call.masks, rule(call)))


def with_option(name: str, value: Callable[[Call], object]) -> Change:
    return lambda call: replace(call, options={**call.options, name: value(call)})


def documents(call: Call) -> mh.Mask:
    ids = torch.arange(call.length) // 509
    return mh.Documents(ids) if call.queries == call.length else mh.Documents(ids[-3:], ids)


def key_lengths(call: Call) -> mh.Mask:
    lengths = torch.tensor([call.length - 5])
    return mh.KeyLengths(lengths, query_lengths=lengths.clamp(max=call.queries))


def positions(call: Call) -> mh.Mask:
    places = torch.arange(call.length) * 3
    return mh.Positions(places[-call.queries :], places)


PER_HEAD = torch.tensor([3, 70, 255, 10, 0, 128, 33, 200])

# Few queries come first: what others draw depends on how many there are.
FEATURES: dict[str, Change] = {
    "few queries": lambda call: replace(call, queries=3),
    "grouped": lambda call: replace(call, kv_heads=2),
    "length before heads": lambda call: replace(call, layout="length before heads"),
    "every second element": lambda call: replace(call, layout="every second element"),
    "causal": masked(lambda call: mh.Causal()),
    "prefix": masked(lambda call: mh.PrefixCausal(131)),
    "window": masked(lambda call: mh.Window(255, 5, keep_first=4)),
    "window per head": masked(lambda call: mh.Window(PER_HEAD, PER_HEAD.flip(0))),
    "padding": masked(lambda call: mh.KeyPadding(torch.arange(call.length)[None] >= 97)),
    "documents": masked(documents),
    "lengths": masked(key_lengths),
    "positions": masked(positions),
    "bias over keys": with_option("bias", lambda call: torch.randn(1, HEADS, 1, call.length)),
    "alibi": with_option("bias", lambda call: mh.ALiBi(torch.rand(HEADS))),
    "softcap": with_option("softcap", lambda call: 20.0),
    "sinks": with_option("sinks", lambda call: torch.randn(HEADS)),
    "statistics": lambda call: replace(call, stats=mh.STATISTICS),
    **{
        str(dtype).removeprefix("torch."): lambda call, dtype=dtype: replace(call, dtype=dtype)
        for dtype in native._DTYPES
        if dtype != torch.float32
    },
}

# Two frames, two biases, two layouts or two dtypes: one call has one.
EXCLUSIVE = [
    {"lengths", "positions"},
    {"bias over keys", "alibi"},
    {"length before heads", "every second element"},
    {"bfloat16", "float16", "float64"},
]
SHORT = ("window", "window per head", "documents", "few queries")


def pairs() -> list[tuple[str, str]]:
    return [
        pair
        for pair in itertools.combinations(FEATURES, 2)
        if not any(set(pair) <= rivals for rivals in EXCLUSIVE)
    ]


def status(name: str) -> int:
    """VmHWM or VmRSS of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def bytes_beyond(work: Callable[[], list[Tensor]]) -> int:
    """How much higher than before the peak of `work` was, without the tensors that it returns."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = status("VmRSS")
    results = work()
    outputs = sum(tensor.untyped_storage().nbytes() for tensor in results)
    return status("VmHWM") - before - outputs


def measure(length: int, names: tuple[str, ...], *, short: bool) -> int:
    call = Call(length, queries=length)
    for name in names:
        call = FEATURES[name](call)
    if short and not set(names) & set(SHORT):
        # A prefix bounds the right itself; two bounds of explicit positions would become booleans.
        right = None if "prefix" in names else 255
        call = masked(lambda call: mh.Window(255, right))(call)
    mask = call.masks[0] if call.masks else None
    for other in call.masks[1:]:
        mask = mask & other
    query = call.tensor(HEADS, call.queries)
    key, value = call.tensor(call.kv_heads, length), call.tensor(call.kv_heads, length)

    def work() -> list[Tensor]:
        result = mh.attention_with_stats(
            query, key, value, mask=mask, stats=call.stats, backend="native", **call.options
        )
        return [result.out, *result.stats.values()]

    return bytes_beyond(work)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("length", type=int)
    parser.add_argument("--alone", action="store_true")
    arguments = parser.parse_args()
    # Freed memory goes back to the system, so that no call finds another's.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536) == 1
    table = [(name,) for name in FEATURES] if arguments.alone else pairs()
    measure(701, ("causal",), short=False)  # code is loaded, threads are started
    found = {
        " and ".join(names): measure(arguments.length, names, short=not arguments.alone)
        for names in table
    }
    for names, beyond in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{beyond / MIB:6.1f} MiB  {names}")
    above = [f"{names}: {beyond / MIB:.0f} MiB" for names, beyond in found.items() if beyond > MOST]
    if above:
        raise SystemExit(f"more than {MOST // MIB} MiB beyond inputs and outputs: {above}")


if __name__ == "__main__":
    main()
