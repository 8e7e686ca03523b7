"""What was seen of a model's heads over a whole corpus, as one frozen object to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ArgumentError
from ..watching.histogram import BINS_OF
from ..watching.record import HeadRecord
from .links import AFTER, BEFORE, SAMPLED, STRONGEST, SampledLinks, StrongestLinks

DECILES = 10
PER_DECILE = 8

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Link:
    """A query token, the key token that it gives `weight` to, and the text around both.

    Attributes:
        weight: of the softmax.
        query: the text of the query token, `query_before` and `query_after` what stands around it.
        key: likewise of the key.
        document: the name of the document: of a file, or of a file and a line.
        query_position: the token's place in its document, from 0; likewise `key_position`. Special
            tokens that begin a window count backwards from the window's first.
        window: the place of the window's first token in the document.
    """

    weight: float
    query: str
    key: str
    query_before: str
    query_after: str
    key_before: str
    key_after: str
    document: str
    query_position: int
    key_position: int
    window: int


@dataclass(frozen=True)
class CorpusFacts:
    """What was read, and how.

    Attributes:
        asked: how many tokens were asked for; `HeadRecord.tokens` has how many there were.
        documents: how many documents were read from.
        windows: in how many windows.
        skipped: how many windows of fewer than two tokens were left out.
        text_bytes: UTF-8 bytes of the text that was read, the last piece to its end.
        sha256: the hash of the corpus, in the order in which it was read: where its documents
            begin, the bytes of their text, and the tokens of every window.
        model_sha256: the hash of the model: its config, names, shapes and dtypes of its tensors,
            and of each at most some 4096 values spread over it.
        context: the longest window, special tokens included.
        special: how many special tokens stand before and after the text's own in every window.
        seed: of the sample of queries.
        seconds: how long reading took, without what was lost by interruptions.
    """

    asked: int
    documents: int
    windows: int
    skipped: int
    text_bytes: int
    sha256: str
    model_sha256: str
    context: int
    special: tuple[int, int]
    seed: int
    seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class CorpusRecord:
    """Statistics and links of every head over a corpus: see `read_corpus`.

    Attributes:
        heads: every statistic of every head, with histograms; its `texts` are documents.
        facts: what was read, and how.
        firsts: how many queries give most to the first token of their window, int64
            [layers, heads]; of `queries`, the tokens that are no window's first.
        strongest: the strongest links of every head, as arrays; `strongest_links` gives objects.
        sampled: the strongest key of each of a sample of queries; `deciles` gives objects.
        names: of the documents that links are in, by number.
        pieces: the text of every token in a link or beside one, by id.
    """

    heads: HeadRecord
    facts: CorpusFacts
    firsts: Array
    strongest: StrongestLinks
    sampled: SampledLinks
    names: Mapping[int, str] = field(default_factory=dict)
    pieces: Mapping[int, str] = field(default_factory=dict)

    @property
    def one_text(self) -> bool:
        """Whether all of it was seen on a single text, of which no head should be judged."""
        return self.facts.documents <= 1

    @property
    def tokens(self) -> int:
        """How many tokens the model read."""
        return self.heads.tokens

    @property
    def queries(self) -> int:
        """How many tokens were no window's first."""
        return self.tokens - self.facts.windows

    @property
    def first_key_first(self) -> Array:
        """The share of queries that give most to their window's first token, float64
        [layers, heads]; NaN past a layer's last head.
        """
        share: Array = self.firsts / max(1, self.queries)
        return np.where(self.heads.queries > 0, share, np.nan)

    def strongest_links(self, layer: int, head: int, count: int = STRONGEST) -> list[Link]:
        """The links of one head with the largest weights, strongest first.

        Of each query one link is considered: to the key that it gives most to, the first token of
        its window aside. `layer` and `head` are places in the tables, from 0.

        Raises ArgumentError for a head that there is not.
        """
        self._check(layer, head)
        links = self.strongest
        there = int((links.weight[layer, head] > 0).sum())
        return [
            self._link(
                links.weight[layer, head, place],
                (links.query[layer, head, place], links.query_ids[layer, head, place]),
                (links.key[layer, head, place], links.key_ids[layer, head, place]),
                links.document[layer, head, place],
                links.start[layer, head, place],
            )
            for place in range(min(count, there))
        ]

    def deciles(self, layer: int, head: int, count: int = PER_DECILE) -> list[list[Link]]:
        """Links of one head from all over the range of its max weight, lowest decile first.

        The queries of the sample are sorted by the weight they give to the key they give most to,
        whichever it is, and cut into ten parts of one size; of each part `count` are drawn.

        Raises ArgumentError for a head that there is not.
        """
        self._check(layer, head)
        links = self.sampled
        (drawn,) = np.nonzero(links.key[layer, head] >= 0)
        order = drawn[np.argsort(links.weight[layer, head, drawn], kind="stable")]
        found = []
        for part in np.array_split(order, DECILES):
            chosen = set(part[np.argsort(links.priority[part], kind="stable")][:count].tolist())
            found.append([self._sampled_link(layer, head, it) for it in part if int(it) in chosen])
        return found

    def to_json(self, links: int = STRONGEST, per_decile: int = PER_DECILE) -> dict[str, Any]:
        """All of it as JSON values: facts, and for each head its statistics and links."""
        record = self.heads
        return {
            **record.facts(),
            **vars(self.facts),
            "bins": {name: BINS_OF[name].edges.tolist() for name in record.names},
            "links": {
                "strongest": f"{STRONGEST} a head, to keys other than the window's first",
                "deciles": f"{PER_DECILE} a decile of max weight, of {SAMPLED} sampled queries",
                "context": [BEFORE, AFTER],
            },
            "heads": [self._head_json(*place, links, per_decile) for place in record.places()],
        }

    def save(self, path: str | Path) -> None:
        """Write it to one safetensors file, whole or not at all; `load` reads it back.

        Raises:
            InputError: the path cannot be written.
            MissingExtraError: safetensors is not installed.
        """
        from .store import save

        save(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> CorpusRecord:
        """Read what `save` wrote.

        Raises:
            InputError: no such file, or none that `save` wrote.
            MissingExtraError: safetensors is not installed.
        """
        from .store import load

        return load(Path(path))

    def __repr__(self) -> str:
        texts = "one text" if self.one_text else f"{self.facts.documents:,} documents"
        return (
            f"CorpusRecord({self.heads.model}: {len(self.heads.layers)} layers, "
            f"{sum(map(len, self.heads.heads))} heads over {self.tokens:,} tokens of {texts}, "
            f"sha256 {self.facts.sha256[:12]})"
        )

    def _head_json(self, layer: int, head: int, links: int, per_decile: int) -> dict[str, Any]:
        place = (layer, head)
        statistics = {
            name: {
                "mean": float(totals.mean[place]),
                "lowest": float(totals.lowest[place]),
                "highest": float(totals.highest[place]),
                "count": int(totals.count[place]),
                "histogram": totals.histogram[place].tolist(),
            }
            for name, totals in self.heads.totals.items()
        }
        return {
            "layer": layer,
            "head": self.heads.heads[layer][head],
            "first_key_first": float(self.first_key_first[place]),
            "statistics": statistics,
            "strongest": [vars(it) for it in self.strongest_links(layer, head, links)],
            "deciles": [
                [vars(it) for it in part] for part in self.deciles(layer, head, per_decile)
            ],
        }

    def _sampled_link(self, layer: int, head: int, place: int) -> Link:
        links = self.sampled
        return self._link(
            links.weight[layer, head, place],
            (links.query[place], links.query_ids[place]),
            (links.key[layer, head, place], links.key_ids[layer, head, place]),
            links.document[place],
            links.start[place],
        )

    def _link(
        self,
        weight: float,
        query: tuple[int, Sequence[int]],
        key: tuple[int, Sequence[int]],
        document: int,
        start: int,
    ) -> Link:
        before = self.facts.special[0]
        query_texts, key_texts = self._texts(query[1]), self._texts(key[1])
        return Link(
            weight=float(weight),
            query=query_texts[1],
            key=key_texts[1],
            query_before=query_texts[0],
            query_after=query_texts[2],
            key_before=key_texts[0],
            key_after=key_texts[2],
            document=self.names[int(document)],
            query_position=int(start + query[0]) - before,
            key_position=int(start + key[0]) - before,
            window=int(start),
        )

    def _texts(self, ids: Sequence[int]) -> tuple[str, str, str]:
        """The text before a token, its own, and that after it."""
        pieces = ["" if it < 0 else self.pieces[int(it)] for it in ids]
        return "".join(pieces[:BEFORE]), pieces[BEFORE], "".join(pieces[BEFORE + 1 :])

    def _check(self, layer: int, head: int) -> None:
        heads = self.heads.heads
        if not (0 <= layer < len(heads) and 0 <= head < len(heads[layer])):
            raise ArgumentError(
                f"There is no head {head} in layer {layer}: there are {len(heads)} layers, from 0"
                + (f", this one of {len(heads[layer])} heads." if 0 <= layer < len(heads) else ".")
            )
