"""What of this process lies in memory, as Linux counts it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path


def lowered_peak() -> int | None:
    """The resident size, from which the peak counts anew; None where the system does not tell.

    What the allocator keeps is given back first: a call that took it would seem to grow by less.
    """
    with contextlib.suppress(OSError, AttributeError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return peak()


def peak() -> int | None:
    """The largest resident size since the process began, or since `lowered_peak`."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)
