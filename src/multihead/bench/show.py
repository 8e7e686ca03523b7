"""The rows as lines of a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from multihead.bench.case import Entry
from multihead.bench.contest import OURS
from multihead.bench.suites import Suite
from multihead.bench.suites.overhead import PLAIN

_NOT_HERE = "not measurable here"


def title(suite: Suite) -> str:
    """The suite's name and what it shows."""
    return f"{suite.name}: {suite.what}"


def limits_lines(limits: Mapping[str, Any]) -> Iterator[str]:
    """The machine's limits."""
    parts = [
        f"{name} {_NOT_HERE if limits[name] is None else f'{limits[name]:.0f} GF/s'}"
        for name in ("FMA", "dpbf16", "AMX")
    ]
    if "memory read" in limits:
        parts.append(f"memory read {limits['memory read']:.1f} GB/s")
    yield f"  limits of this machine: {', '.join(parts)}"


def peers_lines(peers: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The peers that were looked for."""
    if peers:
        parts = [f"{name} {peer.get('absent') or peer['version']}" for name, peer in peers.items()]
        yield f"  peers: {', '.join(parts)}"


def lines(entry: Entry) -> Iterator[str]:
    """One row: ours in the first line, then a line for each of the others."""
    name = f"  {entry['name']:<32}"
    if "not_measurable" in entry:
        yield f"{name} {_NOT_HERE}: {entry['not_measurable']}"
    elif "memory" in entry:
        yield from _prediction(entry)
    elif "peak_rss_bytes" in entry:
        yield f"{name} {_program(entry)}"
    elif "grown_bytes" in entry:
        yield f"  {entry['grown_bytes'] / 2**20:6.1f} MiB  {entry['name']}"
    elif "largest_difference" in entry:
        yield f"{name} {_agreement(entry)}"
    elif "removal_losses" in entry:
        yield f"{name} {_removal(entry)}"
    elif "restriction_losses" in entry:
        yield f"{name} {_restriction(entry)}"
    elif "overhead" in entry:
        yield (
            f"{name} {duration(entry['times'][OURS])}, plain {duration(entry['times'][PLAIN])}  "
            f"{100 * entry['overhead']:+.1f} %"
        )
    elif "tokens_per_second" in entry:
        yield from _whole(name, entry)
    else:
        yield from _contest(name, entry)


def _prediction(entry: Entry) -> Iterator[str]:
    """Predicted over measured, of memory and of time; then what the predictions are made of."""
    memory, seconds = entry["memory"], entry["seconds"]
    found = seconds["measured"]
    yield (
        f"  {entry['name']:<23} memory {_mib(memory['predicted'])} / {_mib(memory['measured'])} "
        f"= {memory['ratio']:.2f}, time {brief(seconds['predicted'])} / {brief(found['median'])} "
        f"= {seconds['ratio']:.2f}"
    )
    sizes = ", ".join(f"{part} {_mib(size)}" for part, size in memory["parts"].items())
    times = ", ".join(f"{part} {brief(time)}" for part, time in seconds["parts"].items())
    yield f"    {sizes}"
    yield f"    {times}"
    yield (
        f"    as measured: {_mib(memory['usual_allocator'])} where the allocator keeps what is "
        f"freed; {brief(found['low'])} to {brief(found['high'])}, n {found['n']}, "
        f"{100 * entry['limit_share']:.0f} % of {entry['limit']}"
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def brief(seconds: float) -> str:
    """Seconds as text, in s or ms."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _contest(name: str, entry: Entry) -> Iterator[str]:
    times, errors = entry["times"], entry["errors"]
    yield f"{name} {duration(times[OURS])}  {_share(entry)}  error {errors[OURS]:.1e}"
    for other, ratio in entry["ratios"].items():
        first = entry["first_call_seconds"].get(other)
        compiled = "" if first is None else f", first call {first:.1f} s"
        yield (
            f"    {other:<30} {duration(times[other])}  {ratio:.2f}x  "
            f"error {errors[other]:.1e}{compiled}"
        )
    if "seconds_over_torch" in entry:
        yield f"    {_small(entry)}"
    if "shares" in entry:
        parts = [f"{name} {100 * share:.0f} %" for name, share in entry["shares"].items()]
        packed = entry["packed_bytes"]
        weights = f"packed, {packed / 2**20:.1f} MiB" if packed else "not packed: nothing gains"
        yield f"    of its time: {', '.join(parts)}; weights {weights}"
    for other, reason in entry["declined"].items():
        yield f"    {other:<30} {reason}"


def _whole(name: str, entry: Entry) -> Iterator[str]:
    """A whole model: errors are shares of the answer's size."""
    times, errors, rates = entry["times"], entry["errors"], entry["tokens_per_second"]
    packed = entry.get("packed_bytes")
    same = entry.get("same_tokens")
    notes = "" if same is None else f"  {100 * same:.1f} % of the tokens the same"
    notes += f"  packed weights {packed / 2**20:.0f} MiB" if packed else ""
    yield (
        f"{name} {duration(times[OURS])}  {rates[OURS]:.1f} tokens/s  "
        f"error {errors[OURS]:.1e}{notes}"
    )
    for other, ratio in entry["ratios"].items():
        yield (
            f"    {other:<30} {duration(times[other])}  {ratio:.2f}x  "
            f"{rates[other]:.1f} tokens/s  error {errors[other]:.1e}"
        )
    for other, reason in entry["declined"].items():
        yield f"    {other:<30} {reason}"


def _small(entry: Entry) -> str:
    python = entry["python_seconds"]
    share = (
        _NOT_HERE
        if python is None
        else f"{1e6 * python:.1f} us, {100 * python / entry['times'][OURS]['median']:.0f} %"
    )
    return f"{1e6 * entry['seconds_over_torch']:+.1f} us against torch; Python's share: {share}"


def _share(entry: Entry) -> str:
    rate = f"{entry['gflops']:.0f} GF/s" if "gflops" in entry else f"{entry['gb_per_s']:.1f} GB/s"
    return f"{rate}, {100 * entry['limit_share']:.0f} % of {entry['limit']}"


def _agreement(entry: Entry) -> str:
    return (
        f"differs by {entry['largest_difference']:.1e}, the model's own error is "
        f"{entry['own_error']:.1e}; {entry['other_choices']} of {entry['tokens']} likeliest tokens "
        "are others"
    )


def _removal(entry: Entry) -> str:
    """The loss behind each number of groups that is gone; the median and the range of draws."""
    parts = []
    for removed, losses in zip(
        entry["removed"], zip(*entry["removal_losses"], strict=True), strict=True
    ):
        spread = f" ({min(losses):.2f}-{max(losses):.2f})" if len(set(losses)) > 1 else ""
        parts.append(f"{removed}: {statistics.median(losses):.2f}{spread}")
    return f"loss without so many of {entry['units']} KV groups  {', '.join(parts)}"


def _restriction(entry: Entry) -> str:
    """The loss behind each number of groups with a window; the median and the range of draws."""
    parts = []
    for count, losses in zip(
        entry["restricted"], zip(*entry["restriction_losses"], strict=True), strict=True
    ):
        spread = f" ({min(losses):.3f}-{max(losses):.3f})" if len(set(losses)) > 1 else ""
        parts.append(f"{count}: {statistics.median(losses):.3f}{spread}")
    return f"loss with a window for so many of {entry['units']} KV groups  {', '.join(parts)}"


def _program(entry: Entry) -> str:
    return (
        f"{entry['seconds']:7.1f} s ({entry['low']:.1f}-{entry['high']:.1f}, n {entry['n']})  "
        f"peak {entry['peak_rss_bytes'] / 1e9:.2f} GB"
    )


def duration(timing: Mapping[str, Any]) -> str:
    """Median with quartiles, in ms or us."""
    unit, factor = ("ms", 1e3) if timing["median"] >= 1e-3 else ("us", 1e6)
    low, median, high = (factor * timing[key] for key in ("low", "median", "high"))
    digits = 2 if median < 10 else 1 if median < 100 else 0
    return f"{median:.{digits}f} {unit} ({low:.{digits}f}-{high:.{digits}f}, n {timing['n']})"
