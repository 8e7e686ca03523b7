"""The rows as lines of a terminal."""

from __future__ import annotations

from typing import Any

from multihead.bench.limits import Limits

Entry = dict[str, Any]


def limits_line(limits: Limits) -> str:
    """The machine's limits."""
    parts = [
        f"{name} {'not measurable here' if peak is None else f'{peak:.0f} GF/s'}"
        for name, peak in limits.to_json().items()
    ]
    return f"limits of this machine: {', '.join(parts)}"


def attention_line(entry: Entry) -> str:
    """One comparison: both times with quartiles, their ratio, the rate and the errors."""
    times = "  ".join(f"{name} {_milliseconds(t)}" for name, t in entry["times"].items())
    if "ratio" not in entry:
        return (
            f"{entry['name']:<26} {times}  statistics add {100 * entry['usual_overhead']:.1f} % "
            f"(three), {100 * entry['all_overhead']:.1f} % (all)"
        )
    check = entry["check"]
    return (
        f"{entry['name']:<26} {times}  {entry['ratio']:.2f}x  {entry['gflops']:.0f} GF/s, "
        f"{100 * entry['limit_share']:.0f} % of {entry['limit']}  error {check['error']:.1e}, "
        f"torch's {check['peer_error']:.1e}"
    )


def inspect_line(entry: Entry) -> str:
    """One program: its time and its peak."""
    return (
        f"{entry['name']:<10} {entry['seconds']:7.1f} s ({entry['low']:.1f}-{entry['high']:.1f}, "
        f"n {entry['n']})  peak {entry['peak_rss_bytes'] / 1e9:.2f} GB"
    )


def _milliseconds(timing: dict[str, Any]) -> str:
    low, median, high = (1e3 * timing[key] for key in ("low", "median", "high"))
    return f"{median:.2f} ms ({low:.2f}-{high:.2f}, n {timing['n']})"
