"""Bins over query rows and key columns, and the map of a head without preferences.

Bin i of n over N places holds those from `i N // n` up to, without, `(i + 1) N // n`.

Shape suffixes: b batch, h head, q query row, k key column, c column bin, w place in a bin.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .problem import Logits
from .sweep import mask_shape, row_blocks, visible_blocks, visible_keys

# Beyond 6 bits, 64 times or a 64th of an even share, a cell only says "far more" or "far less".
LIFT_BITS = 6.0


def bin_edges(length: int, bins: int) -> list[int]:
    """Edges of at most `bins` bins over `length` places, as even as whole numbers allow."""
    bins = min(bins, length)
    return [i * length // bins for i in range(bins + 1)] if bins else [0]


class Bins:
    """Sums, means and maxima of a last axis of `length` places over at most `bins` bins."""

    def __init__(self, length: int, bins: int, device: torch.device | str = "cpu") -> None:
        edges = torch.tensor(bin_edges(length, bins), device=device)
        self.count = len(edges) - 1
        self.sizes = edges.diff()
        # A bin that is one place short names its last place twice, which no maximum minds.
        place_w = torch.arange(int(self.sizes.max()) if self.count else 0, device=device)
        self._places_cw = torch.minimum(edges[:-1, None] + place_w, edges[1:, None] - 1)
        self._once_cw = place_w < self.sizes[:, None]

    def sum(self, values_k: Tensor) -> Tensor:
        """[..., length] to [..., bins]."""
        if not self.count:
            return values_k
        # Not a product with a matrix of ones: that sums in one chain, which loses digits.
        return values_k[..., self._places_cw].masked_fill(~self._once_cw, 0).sum(-1)

    def mean(self, values_k: Tensor) -> Tensor:
        """[..., length] to [..., bins]."""
        return self.sum(values_k) / self.sizes

    def max(self, values_k: Tensor) -> Tensor:
        """[..., length] to [..., bins]."""
        if not self.count:
            return values_k
        return values_k[..., self._places_cw].amax(-1)


def uniform_mass(call: Logits, bins: int) -> Tensor:
    """The "mass" map of a head that gives every visible key the same weight.

    [B|1, H|1, bins, bins], NaN where every pair is hidden: `attention_map` of such a head.
    """
    device = call.query.device
    row_edges = bin_edges(call.query_length, bins)
    column_bins = Bins(call.key_length, bins, device)
    mask_bh = mask_shape(call)
    shape = (*mask_bh, len(row_edges) - 1, column_bins.count)
    cells_bhrc = torch.empty(shape, dtype=call.compute_dtype, device=device)
    keys_bhq = visible_keys(call)
    share_bhq = (1.0 / keys_bhq.double()).masked_fill(keys_bhq == 0, 0.0)
    for row, (begin, stop) in enumerate(itertools.pairwise(row_edges)):
        sums_bhk = share_bhq.new_zeros((*mask_bh, call.key_length))
        for rows in row_blocks(begin, stop):
            share_bhqk = share_bhq[..., rows, None]
            for columns, visible in visible_blocks(call, rows):
                given = share_bhqk if visible is None else share_bhqk * visible
                sums_bhk[..., columns] += given.sum(-2)
        live_bh = (keys_bhq[..., begin:stop] > 0).sum(-1)
        total_bhc = column_bins.sum(sums_bhk)
        cells_bhrc[:, :, row] = (total_bhc / live_bh[..., None]).masked_fill(
            total_bhc == 0, torch.nan
        )
    return cells_bhrc


def lift(mass: Tensor, uniform: Tensor) -> Tensor:
    """log2(mass / uniform), clipped to 6 bits either way; NaN stays NaN."""
    return torch.log2(mass / uniform).clamp(-LIFT_BITS, LIFT_BITS)
