"""What the inspection is compared with: `python -m multihead.bench.rivals NAME TOKENS`.

`sdpa` computes no statistics, `dense` and `eager` three of dense matrices, `maps` ours. All run the
model that `multihead inspect` looks at on the same tokens, in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from multihead.heads.text import built_in, tokenize
from multihead.integrations import load
from multihead.masks import Causal
from multihead.ops import STATISTICS, attention_with_stats

_BINS = 64

DENSE, MAPS = "one_head_at_a_time", "statistics_and_maps"


def read_matrix(weights_qk: Tensor) -> tuple[float, float, float]:
    """Entropy, largest weight and its key, means over the queries of one head."""
    largest_q, key_q = weights_qk.max(dim=-1)
    entropy_q = torch.special.entr(weights_qk).sum(dim=-1)
    return entropy_q.mean().item(), largest_q.mean().item(), key_q.double().mean().item()


def read_kept(layers: Iterable[Tensor]) -> list[tuple[float, float, float]]:
    """`read_matrix` of every head of matrices [1, H, N, N], as `output_attentions` keeps them."""
    return [read_matrix(weights_qk) for weights_bhqk in layers for weights_qk in weights_bhqk[0]]


@dataclass
class Dense:
    """Attention that forms one head's whole matrix, reads its statistics, and frees it.

    `rows` collects entropy, largest weight and its key for each layer and head, means over queries.
    """

    rows: list[tuple[float, float, float]] = field(default_factory=list)
    _hidden: Tensor | None = field(default=None, repr=False)

    def __call__(
        self,
        module: nn.Module,
        query_bhqd: Tensor,
        key_bgkd: Tensor,
        value_bgkd: Tensor,
        attention_mask: object,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """As transformers calls it: causal, one text without padding. Returns [B, Lq, H, Dv]."""
        del attention_mask  # causal, and nothing else: there is one text
        heads = query_bhqd.shape[1]
        group = heads // key_bgkd.shape[1]
        outputs = [
            self._head(
                query_bhqd[:, h], key_bgkd[:, h // group], value_bgkd[:, h // group], scaling
            )
            for h in range(heads)
        ]
        return torch.stack(outputs, dim=2), None

    def _head(self, query_bqd: Tensor, key_bkd: Tensor, value_bkd: Tensor, scale: float) -> Tensor:
        scores_bqk = query_bqd @ key_bkd.transpose(1, 2)
        scores_bqk.mul_(scale)
        scores_bqk.masked_fill_(self._future(scores_bqk.shape[1]), -torch.inf)
        weights_bqk = torch.softmax(scores_bqk, dim=-1)
        del scores_bqk
        self.rows.append(read_matrix(weights_bqk))
        return weights_bqk @ value_bkd

    def _future(self, length: int) -> Tensor:
        """The hidden triangle [N, N], made once: it is the same for every head of a text."""
        if self._hidden is None or len(self._hidden) != length:
            self._hidden = torch.ones(length, length, dtype=torch.bool).triu_(1)
        return self._hidden


@dataclass
class Maps:
    """Our attention, which gives all statistics and the pooled maps of a layer in the same pass.

    `statistics` has for each layer the means over queries [H], `maps` [H, 64, 64].
    """

    statistics: list[dict[str, Tensor]] = field(default_factory=list)
    maps: list[Tensor] = field(default_factory=list)

    def __call__(
        self,
        module: nn.Module,
        query_bhqd: Tensor,
        key_bgkd: Tensor,
        value_bgkd: Tensor,
        attention_mask: object,
        scaling: float,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """As `Dense`."""
        del attention_mask
        result = attention_with_stats(
            query_bhqd,
            key_bgkd,
            value_bgkd,
            mask=Causal(),
            scale=scaling,
            stats=STATISTICS,
            bins=_BINS,
        )
        self.statistics.append(
            {name: result.stats[name][0].double().mean(dim=-1) for name in STATISTICS}
        )
        self.maps.append(result.map[0])
        return result.out.transpose(1, 2), None


def main(name: str, tokens: int) -> None:
    """Load the model, read the tokens once, compute no logits but the last."""
    from transformers import AttentionInterface

    loaded = load()
    AttentionInterface.register(DENSE, Dense())
    AttentionInterface.register(MAPS, Maps())
    loaded.model.set_attn_implementation({"dense": DENSE, "maps": MAPS}.get(name, name))
    ids = torch.tensor([tokenize(loaded.tokenizer, built_in(), tokens).ids])
    options = {"use_cache": False, "logits_to_keep": 1, "output_attentions": name == "eager"}
    with torch.inference_mode():
        output = loaded.model(ids, **options)
        if name == "eager":
            read_kept(output.attentions)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
