"""Logits and entropy of every head while a model trains, and clipping what explodes."""
