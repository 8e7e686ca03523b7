"""The links of a corpus that are kept: the strongest of each head, and those of a fixed sample.

A link leads from a query token to a key token of its window. Two kinds are kept:

* strongest: of every query the key that it gives most to, the window's first token aside; of each
  head the `STRONGEST` of these with the largest weights. First tokens are left out, since most
  heads of most models rest on them with weights near 1: they would be all there is to see.
* sampled: `SAMPLED` queries, drawn evenly from the whole corpus and the same for all heads, each
  with the key that it gives most to, whichever it is. No query is a window's first token.

Around the tokens of a link stand `BEFORE` tokens of context before and `AFTER` after, as far as the
window has them. Nothing here grows with the corpus.

Shape suffixes: l layer, h head, q query row, n kept link, s sampled query, c token of context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...ops.problem import Problem
from ...ops.row_statistics import statistics_of
from ..watching.record import joined
from .text import Window

STRONGEST = 32
SAMPLED = 400
BEFORE, AFTER = 12, 4
CONTEXT = BEFORE + 1 + AFTER

Array = np.ndarray[Any, Any]


class _Arrays:
    """Base of dataclasses of arrays."""

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the arrays."""
        return tuple(item.name for item in fields(cls))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class StrongestLinks(_Arrays):
    """The strongest links of every head, strongest first; -1 and weight 0 where there are fewer.

    `weight` float32 [l, h, n]; int64 [l, h, n]: `query` and `key` are columns of the window,
    `document` its number, `start` how many of the document's tokens come before the window;
    `query_ids` and `key_ids` int32 [l, h, n, CONTEXT] are the tokens around both, -1 for none.
    """

    weight: Array
    query: Array
    key: Array
    document: Array
    start: Array
    query_ids: Array
    key_ids: Array

    @classmethod
    def empty(cls, layers: int, heads: int) -> StrongestLinks:
        """Of no links."""
        shape = (layers, heads, STRONGEST)
        places = {name: np.full(shape, -1) for name in ("query", "key", "document", "start")}
        ids = {name: _no_ids(shape) for name in ("query_ids", "key_ids")}
        return cls(weight=np.zeros(shape, np.float32), **places, **ids)

    def with_window(self, found: Array, keys: Array, window: Window) -> StrongestLinks:
        """Also those of one window: every query's weight and key elsewhere, [l, h, q]."""
        ids = np.array(window.ids)
        query_lhn = np.argsort(-found, axis=-1, kind="stable")[..., :STRONGEST]
        weight_lhn = np.take_along_axis(found, query_lhn, -1)
        if not (weight_lhn[..., :1] > self.weight[..., -1:]).any():
            return self
        key_lhn = np.take_along_axis(keys, query_lhn, -1)
        none = weight_lhn <= 0
        new = {
            "weight": weight_lhn,
            "query": np.where(none, -1, query_lhn),
            "key": np.where(none, -1, key_lhn),
            "document": np.where(none, -1, window.document),
            "start": np.where(none, -1, window.start),
            "query_ids": np.where(none[..., None], -1, around(ids, query_lhn)),
            "key_ids": np.where(none[..., None], -1, around(ids, key_lhn)),
        }
        both = {name: np.concatenate((getattr(self, name), new[name]), 2) for name in new}
        # Of equal weights the earlier link stays.
        kept_lhn = np.argsort(-both["weight"], axis=-1, kind="stable")[..., :STRONGEST]
        return StrongestLinks(**{name: _taken(it, kept_lhn) for name, it in both.items()})


@dataclass(frozen=True, eq=False)
class SampledLinks(_Arrays):
    """The strongest key of sampled queries in every head.

    Of the queries [s]: `priority` float64, by which they were drawn (inf where none was), int64
    `query` (a column of its window), `document` and `start`, and `query_ids` int32 [s, CONTEXT].
    Of the heads: `weight` float32 and `key` int64 [l, h, s], `key_ids` int32 [l, h, s, CONTEXT].
    """

    priority: Array
    query: Array
    document: Array
    start: Array
    query_ids: Array
    weight: Array
    key: Array
    key_ids: Array

    @classmethod
    def empty(cls, layers: int, heads: int) -> SampledLinks:
        """Of no queries."""
        places = {name: np.full(SAMPLED, -1) for name in ("query", "document", "start")}
        shape = (layers, heads, SAMPLED)
        return cls(
            priority=np.full(SAMPLED, np.inf),
            **places,
            query_ids=_no_ids((SAMPLED,)),
            weight=np.zeros(shape, np.float32),
            key=np.full(shape, -1),
            key_ids=_no_ids(shape),
        )

    def with_window(self, drawn: Draw, weight: Array, keys: Array, window: Window) -> SampledLinks:
        """Also those drawn of one window: their weights and keys, [l, h, drawn]."""
        slots, columns = drawn.slots, drawn.columns
        if not len(slots):
            return self
        ids = np.array(window.ids)
        new = {name: getattr(self, name).copy() for name in self.names()}
        new["priority"][slots] = drawn.priority
        new["query"][slots] = columns
        new["document"][slots] = window.document
        new["start"][slots] = window.start
        new["query_ids"][slots] = around(ids, columns)
        new["weight"][..., slots] = weight
        new["key"][..., slots] = keys
        new["key_ids"][..., slots, :] = around(ids, keys)
        return SampledLinks(**new)


@dataclass(frozen=True, eq=False)
class Draw:
    """Queries of a window that join the sample: their columns, priorities and slots in it."""

    columns: Array
    priority: Array
    slots: Array


def draw(priority: Array, window: int, length: int, seed: int) -> Draw:
    """The queries of the window of that number, of `length` tokens, that join the sample.

    Every query of the corpus has a random priority of its own, and the lowest stay: an even sample
    without knowing how long the corpus is, and the same one after an interruption.
    """
    new = np.random.default_rng((seed, window)).random(length - 1)
    kept = np.argsort(np.concatenate((priority, new)), kind="stable")[: len(priority)]
    columns = np.sort(kept[kept >= len(priority)]) - len(priority)
    slots = np.setdiff1d(np.arange(len(priority)), kept)
    return Draw(columns + 1, new[columns], slots)


@dataclass(frozen=True, eq=False)
class LayerLinks:
    """Of one layer's call: `elsewhere` float32 and `elsewhere_key` [h, q] are every query's
    largest weight and its key, the first column aside; `weight` and `key` [h, drawn] those of all
    columns, of the queries that were drawn; `firsts` [h] counts the queries but the first that give
    most to the first column.
    """

    elsewhere: Array
    elsewhere_key: Array
    weight: Array
    key: Array
    firsts: Array

    def of_none(self) -> LayerLinks:
        """Those of a layer without heads in the same window."""
        return LayerLinks(**{name: array[:0] for name, array in vars(self).items()})

    def spread(self, columns: Sequence[int], heads: int) -> LayerLinks:
        """These heads at some columns of a table of `heads`, no links for the others."""

        def at(array: Array, fill: float) -> Array:
            table = np.full((heads, *array.shape[1:]), fill, array.dtype)
            table[list(columns)] = array
            return table

        return LayerLinks(
            elsewhere=at(self.elsewhere, 0),
            elsewhere_key=at(self.elsewhere_key, -1),
            weight=at(self.weight, 0),
            key=at(self.key, -1),
            firsts=at(self.firsts, 0),
        )


# What `layer_links` needs of the forward pass.
NEEDED = ("lse", "max_weight", "argmax")


def layer_links(problem: Problem, stats: Mapping[str, Tensor], drawn: Draw) -> LayerLinks:
    """The links of one layer's call, batch of 1; `stats` has those of `NEEDED`."""
    weight_hq, key_hq = elsewhere(problem, stats["lse"])
    rows = torch.from_numpy(drawn.columns).to(problem.query.device)
    strongest_hq = stats["argmax"][0]
    return LayerLinks(
        elsewhere=weight_hq.float().cpu().numpy(),
        elsewhere_key=key_hq.cpu().numpy(),
        weight=stats["max_weight"][0, :, rows].float().cpu().numpy(),
        key=strongest_hq[:, rows].cpu().numpy(),
        firsts=(strongest_hq[:, 1:] == 0).sum(-1).cpu().numpy(),
    )


def elsewhere(problem: Problem, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Each query's largest weight on a key that is not the first column, and that key: [H, Lq].

    0 and -1 where it sees no such key. Exact: a second pass over the logits, without the values.
    """
    parts = problem.parts
    shown_bk = torch.arange(parts.key_length, device=lse.device)[None] > 0
    if parts.key_visible is not None:
        shown_bk = shown_bk & parts.key_visible
    others = replace(problem, parts=replace(parts, key_visible=shown_bk))
    found = statistics_of(others, ("max_logit", "argmax"))
    none_hq = found["argmax"][0] < 0
    weight_hq = (found["max_logit"][0] - lse[0]).exp().masked_fill(none_hq, 0.0)
    return weight_hq, found["argmax"][0]


def stacked(layers: Sequence[LayerLinks], name: str, fill: float) -> Array:
    """One array of all layers, [l, h, ...], filled up where a layer has fewer heads."""
    found: Array = joined([getattr(layer, name) for layer in layers], fill=fill)
    return found


def around(ids: Array, columns: Array) -> Array:
    """The tokens around each column of a window: int32 [..., CONTEXT], -1 outside the window."""
    padded = np.pad(ids.astype(np.int32), (BEFORE, AFTER), constant_values=-1)
    # Column -1 stands for none; what is read for it is not kept.
    return padded[np.maximum(columns, 0)[..., None] + np.arange(CONTEXT)]


def _no_ids(shape: tuple[int, ...]) -> Array:
    return np.full((*shape, CONTEXT), -1, np.int32)


def _taken(array: Array, kept_lhn: Array) -> Array:
    inner = array.ndim - kept_lhn.ndim
    return np.take_along_axis(array, kept_lhn.reshape(*kept_lhn.shape, *(1,) * inner), 2)
