"""The suites of `multihead bench`, by name."""

from multihead.bench.suites.registry import SUITES, Suite

__all__ = ["SUITES", "Suite"]
