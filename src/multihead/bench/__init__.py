"""Measurements of this machine: what `multihead bench` runs and records."""
