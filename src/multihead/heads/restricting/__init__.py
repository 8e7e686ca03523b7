"""Heads that a window costs little."""
