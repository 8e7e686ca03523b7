"""Heads beside one another: which are alike, and what their layers pass on together."""
