"""What every head does on the probes: the scores that roles are made of, with their controls.

All are means over the counted queries of all sequences, in O(L) memory.

* `previous_token`: weight on the key before the query's own; control: the largest such mean at
  another distance of less than two reaches
* `induction`: weight on the token after the last occurrence of the query's own token, where a
  random sequence repeats (Olsson et al. 2022); control: the same column where its tokens come in
  another order
* `duplicate_token`: weight on the last occurrence of the query's own token; control as before
* `first_key`: weight on the first key, an ordinary token (Gu et al. 2024); control: the mean of the
  keys that follow it, one reach of them
* `second_sink`: in texts, weight on one key besides the first, which earlier queries chose: of the
  first quarter's keys the one that received most from them; control: the mean of that quarter's
  others
* `local`: weight on keys nearer than one reach; control: on those from one to two reaches away
* `positional`: share of queries whose strongest key stands at one fixed distance and stands out: it
  makes most of the sum of squared weights, so that ties do not count (Voita et al. 2019); control:
  the share of the next most frequent distance
* `uniform`: entropy over its maximum; control: the same where the sequence repeats, so that there
  is something to find
* `special_token`: weight that the second of two texts gives to the special tokens between them
  (Clark et al. 2019); control: on ordinary tokens in the same places

Shape suffixes: b sequence, h head, q query, k key, r bin of queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ...ops.diagonal import weights_along
from ...ops.problem import Problem
from ...ops.sweep import sweep, visible_keys
from ..forward import LayerObserver, run
from ..watching.histogram import Table
from .probes import Frame, Probes, Sequences, draw

ROLES = (
    "previous_token",
    "induction",
    "duplicate_token",
    "first_key",
    "second_sink",
    "local",
    "positional",
    "uniform",
    "special_token",
)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Score:
    """One role's score and control in every head, float64 [L, H], over `n` queries each.

    `offset` int64 [L, H] is the distance of a positional head's key, negative before the query and
    0 where no key stands out.
    Layers with fewer heads than another end in NaN.
    """

    score: Table
    control: Table
    n: int
    offset: np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None = None


@dataclass(frozen=True, eq=False)
class Scores:
    """What the probes gave: layers by name, scores by role, tokens read."""

    layers: tuple[str, ...]
    heads: tuple[int, ...]
    by_role: Mapping[str, Score]
    tokens: int


def measure(
    model: nn.Module,
    probes: Probes,
    seeds: Sequence[int],
    frame: Frame,
    progress: Progress | None = None,
) -> Scores:
    """Run the probes and score every head; roles that the model cannot have are left out.

    Raises:
        ArgumentError: probes that do not fit the model.
        ModelError: a model that cannot be run on tokens, or whose layers don't attend to them.
    """
    sequences = draw(model, probes, seeds, frame)
    jobs = _jobs(sequences, probes, frame)
    layers: list[str] = []
    tallies: list[_Tally] = []
    for done, (token_ids, take) in enumerate(jobs):
        observer = _Measurer(token_ids.shape, take, tallies)
        run(model, token_ids, observer)
        layers = layers or observer.layers
        if progress is not None:
            progress(done + 1, len(jobs))
    return Scores(
        layers=tuple(layers),
        heads=tuple(tally.heads for tally in tallies),
        by_role=_by_role(tallies, probes),
        tokens=sum(token_ids.numel() for token_ids, _ in jobs),
    )


class _Tally:
    """Sums over queries of what one layer's heads do, float64 [H, ...], and how many queries."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.heads = 0

    def add(self, name: str, sum_h: Tensor, count: int) -> None:
        self.heads = sum_h.shape[0]
        self.sums[name] = self.sums.get(name, 0.0) + sum_h.double().cpu()
        self.counts[name] = self.counts.get(name, 0) + count

    def mean(self, name: str) -> Tensor:
        return self.sums[name] / self.counts[name]


@dataclass(frozen=True, eq=False)
class _Call:
    """One layer's call on a batch of probes, as the `_take` functions read it."""

    problem: Problem
    stats: Mapping[str, Tensor]

    @property
    def length(self) -> int:
        return self.problem.query_length

    def along(self, offset: int, rows: slice) -> Tensor:
        """Summed weight that the queries `rows` give to the key at `offset` from their own: [H]."""
        columns_q = torch.arange(self.length, device=self.problem.query.device) + offset
        weights_bhq1, _ = weights_along(self.problem, self.stats["lse"], columns_q[None, :, None])
        return weights_bhq1[..., rows, 0].double().sum((0, 2))

    def received(self, edges: Sequence[int]) -> Tensor:
        """What each key receives from bins of queries: [B, H, r, Lk]."""
        parts = [part.sums for part in sweep(self.problem, self.stats["lse"], edges)]
        return torch.cat(parts, 2).double()

    def entropy_share(self, rows: slice) -> Tensor:
        """Entropy over the log of the number of outcomes, summed over the queries `rows`: [H]."""
        outcomes_bhq = visible_keys(self.problem) + (self.problem.sinks is not None)
        most_bhq = outcomes_bhq.clamp(min=2).double().log()
        return (self.stats["entropy"].double() / most_bhq)[..., rows].sum((0, 2))


_Take = Callable[[_Call, _Tally], None]
_Pair = Callable[[_Tally], tuple[Tensor, Tensor]]


class _Measurer(LayerObserver):
    """Adds what each layer does on one batch of probes to the layer's tally."""

    def __init__(self, shape: Sequence[int], take: _Take, tallies: list[_Tally]) -> None:
        super().__init__((shape[0], shape[1]))
        self._take = take
        self._tallies = tallies

    def wants(self, problem: Problem) -> tuple[str, ...]:
        return ("lse", "entropy", "max_weight", "argmax", "participation")

    def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
        layer = self.next_layer(problem)
        if layer == len(self._tallies):
            self._tallies.append(_Tally())
        self._take(_Call(problem, stats), self._tallies[layer])


def _jobs(sequences: Sequences, probes: Probes, frame: Frame) -> list[tuple[Tensor, _Take]]:
    """Batches to run, and what is taken from each."""

    def plain(call: _Call, tally: _Tally) -> None:
        _take_plain(call, tally, probes)
        _take_middle(call, tally, "plain_middle", sequences.middle, frame)

    def framed(call: _Call, tally: _Tally) -> None:
        _take_middle(call, tally, "framed_middle", sequences.middle, frame)

    jobs: list[tuple[Tensor, _Take]] = [(sequences.plain, plain)]
    if sequences.framed is not None:
        jobs.append((sequences.framed, framed))
    if sequences.texts is not None:
        jobs.append((sequences.texts, lambda call, tally: _take_text(call, tally, probes)))
    for name, batches in (("repeated", sequences.repeated), ("shuffled", sequences.shuffled)):
        for period, token_ids in batches.items():
            jobs.append((token_ids, _taker_of_copies(name, len(frame.front), period)))
    return jobs


def _take_plain(call: _Call, tally: _Tally, probes: Probes) -> None:
    """What is done by position alone."""
    length, start, reach = call.length, probes.counted_from, probes.reach
    both_ways = bool((visible_keys(call.problem)[..., 0] > 1).any())
    batch = call.problem.batch
    rows = slice(start, length - 2 * reach + 1 if both_ways else length)
    offsets = range(1 - 2 * reach, 2 * reach if both_ways else 1)
    along_ho = torch.stack([call.along(offset, rows) for offset in offsets], -1)
    tally.add("along", along_ho, batch * (rows.stop - rows.start))

    rows = slice(start, length)
    tally.add("entropy_share", call.entropy_share(rows), batch * (length - start))
    tally.add("argmax", _offsets_of_strongest(call, rows), batch * (length - start))

    received_bhrk = call.received((0, start, length))
    first_hk = received_bhrk[:, :, 1, : reach + 1].sum(0)
    tally.add("first_keys", first_hk, batch * (length - start))


def _take_text(call: _Call, tally: _Tally, probes: Probes) -> None:
    """What goes to a key that earlier queries chose, and to the others beside it."""
    length, start = call.length, probes.counted_from
    middle = (start + length) // 2
    received_bhrk = call.received((0, start, middle, length))
    early_bhk, late_bhk = received_bhrk[:, :, 1, 1:start], received_bhrk[:, :, 2, 1:start]
    chosen_bh1 = early_bhk.argmax(-1, keepdim=True)
    sink_bh = late_bhk.gather(-1, chosen_bh1)[..., 0]
    others_bh = (late_bhk.sum(-1) - sink_bh) / (start - 2)
    count = call.problem.batch * (length - middle)
    tally.add("second_sink", sink_bh.sum(0), count)
    tally.add("other_early_keys", others_bh.sum(0), count)


def _offsets_of_strongest(call: _Call, rows: slice) -> Tensor:
    """How often the strongest key stands at each offset, [H, 2 Lk]; `offset + Lk` is its place."""
    length = call.length
    position_q = torch.arange(length, device=call.problem.query.device)[rows]
    strongest_bhq = call.stats["argmax"][..., rows]
    # 1 / participation is the sum of squared weights; two equal keys have half of it each.
    alone_bhq = call.stats["max_weight"].square() * call.stats["participation"] > 0.55
    places_bhq = (strongest_bhq - position_q + length).clamp(0, 2 * length - 1)
    counts_bhq = torch.zeros(
        (*places_bhq.shape[:2], 2 * length), dtype=torch.float64, device=places_bhq.device
    )
    counts_bhq.scatter_add_(-1, places_bhq, alone_bhq[..., rows].double())
    return counts_bhq.sum(0)


def _take_middle(call: _Call, tally: _Tally, name: str, middle: slice, frame: Frame) -> None:
    """What the queries behind the places in the middle give to them."""
    if middle.start == middle.stop:
        return
    stop = call.length - len(frame.back)
    received_bhrk = call.received((0, middle.stop, stop, call.length))
    middle_h = received_bhrk[:, :, 1, middle].sum((0, 2))
    tally.add(name, middle_h, call.problem.batch * (stop - middle.stop))


def _taker_of_copies(name: str, front: int, period: int) -> _Take:
    """Takes what the second copy of a sequence reads in the first."""

    def take(call: _Call, tally: _Tally) -> None:
        rows = slice(front + period, front + 2 * period)
        count = call.problem.batch * period
        tally.add(f"{name}_after", call.along(1 - period, rows), count)
        tally.add(f"{name}_same", call.along(-period, rows), count)
        tally.add(f"{name}_entropy_share", call.entropy_share(rows), count)

    return take


def _by_role(tallies: list[_Tally], probes: Probes) -> dict[str, Score]:
    pairs: dict[str, tuple[str, _Pair]] = {
        "previous_token": ("along", lambda it: _previous_token(it.mean("along"), probes)),
        "induction": ("repeated_after", _means("repeated_after", "shuffled_after")),
        "duplicate_token": ("repeated_same", _means("repeated_same", "shuffled_same")),
        "first_key": ("first_keys", lambda it: _first_and_rest(it.mean("first_keys"))),
        "second_sink": ("second_sink", _means("second_sink", "other_early_keys")),
        "local": ("along", lambda it: _near_and_far(it.mean("along"), probes)),
        "positional": ("argmax", lambda it: _two_most_frequent(it.mean("argmax"))),
        "uniform": ("entropy_share", _means("entropy_share", "repeated_entropy_share")),
        "special_token": ("framed_middle", _means("framed_middle", "plain_middle")),
    }
    scores = {}
    for name, (counted, pair) in pairs.items():
        if counted in tallies[0].counts:
            both = [pair(tally) for tally in tallies]
            scores[name] = Score(
                score=_table([score_h for score_h, _ in both]),
                control=_table([control_h for _, control_h in both]),
                n=tallies[0].counts[counted],
            )
    offsets = [_most_frequent(tally.sums["argmax"], probes.length) for tally in tallies]
    offset_lh = np.nan_to_num(_table(offsets)).astype(np.int64)
    return {**scores, "positional": replace(scores["positional"], offset=offset_lh)}


def _means(score: str, control: str) -> _Pair:
    return lambda tally: (tally.mean(score), tally.mean(control))


def _most_frequent(counts_ho: Tensor, length: int) -> Tensor:
    """The offset at which most strongest keys stand, 0 where none stands out anywhere."""
    most_h = counts_ho.max(-1)
    return torch.where(most_h.values > 0, most_h.indices - length, 0)


def _own(along_ho: Tensor, probes: Probes) -> int:
    """The place of offset 0."""
    return 2 * probes.reach - 1


def _previous_token(along_ho: Tensor, probes: Probes) -> tuple[Tensor, Tensor]:
    previous = _own(along_ho, probes) - 1
    others_ho = along_ho.clone()
    others_ho[:, previous] = 0.0
    return along_ho[:, previous], others_ho.amax(-1)


def _near_and_far(along_ho: Tensor, probes: Probes) -> tuple[Tensor, Tensor]:
    own, reach = _own(along_ho, probes), probes.reach
    near_h = along_ho[:, own - reach + 1 : own + reach].sum(-1)
    return near_h, along_ho.sum(-1) - near_h


def _first_and_rest(first_hk: Tensor) -> tuple[Tensor, Tensor]:
    return first_hk[:, 0], first_hk[:, 1:].mean(-1)


def _two_most_frequent(share_ho: Tensor) -> tuple[Tensor, Tensor]:
    most_h2 = share_ho.topk(2, dim=-1).values
    return most_h2[:, 0], most_h2[:, 1]


def _table(rows: list[Tensor]) -> Table:
    """Rows of different length as one float64 array, NaN where a row is short."""
    table = np.full((len(rows), max(len(row) for row in rows)), np.nan)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row.numpy()
    return table
