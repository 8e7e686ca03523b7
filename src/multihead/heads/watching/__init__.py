"""Watching a model's heads while it runs, and the record that stays."""
