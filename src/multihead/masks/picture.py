"""Masks drawn as text: people check masks by looking."""

from __future__ import annotations

from torch import Tensor


def picture(visible_bhqk: Tensor) -> str:
    """One grid a batch row and head, side captions being row and column numbers."""
    batch, heads, queries, keys = visible_bhqk.shape
    width = len(str(max(keys - 1, 0)))
    margin = len(str(max(queries - 1, 0)))
    header = " " * (margin + 1) + " ".join(f"{j:>{width}}" for j in range(keys))
    grids = []
    for b in range(batch):
        for h in range(heads):
            title = [f"sample {b}, head {h}"] if batch * heads > 1 else []
            rows = [
                f"{i:>{margin}} " + " ".join(("■" if cell else "·").rjust(width) for cell in row)
                for i, row in enumerate(visible_bhqk[b, h].tolist())
            ]
            grids.append("\n".join([*title, header, *rows]))
    return "\n\n".join(grids)
