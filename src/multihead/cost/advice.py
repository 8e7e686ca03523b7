"""What is known about the size of a head, each with its evidence; none of it is a law."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from multihead.cost.model import Model


@dataclass(frozen=True, slots=True)
class Remark:
    """A sentence about a model's heads, and where it is from."""

    text: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Trial:
    """One row of Vaswani et al. 2017, table 3 (A): heads, their width, perplexity and BLEU."""

    heads: int
    head_dim: int
    perplexity: float
    bleu: float


VASWANI_3A = (
    Trial(1, 512, 5.29, 24.9),
    Trial(4, 128, 5.00, 25.5),
    Trial(8, 64, 4.92, 25.8),
    Trial(16, 32, 4.91, 25.8),
    Trial(32, 16, 5.01, 25.4),
)
"""The base model of 512 lanes on English to German, the same parameters throughout."""

# Numbers of a vector register, or of a step of a matrix unit, that a head's lanes fill.
_REGISTER_LANES = 16
_REGISTER_SOURCE = "16 float32 numbers fill a register of AVX-512; tensor cores step by 16 in half"


def head_size_remarks(model: Model) -> list[Remark]:
    """What is known about heads as wide as those of the model's first layer."""
    dim = model.layers[0].attention.head_dim
    return [_measured(dim), *_vectors(dim), _rank(dim), _groups()]


def _measured(dim: int) -> Remark:
    best = min(VASWANI_3A, key=lambda trial: trial.perplexity)
    nearest = min(VASWANI_3A, key=lambda trial: abs(log2(trial.head_dim / dim)))
    relation = "as wide as yours" if nearest.head_dim == dim else "nearest to yours"
    heads = "1 head" if nearest.heads == 1 else f"{nearest.heads} heads"
    return Remark(
        f"At equal parameters {heads} of {nearest.head_dim}, {relation}, reached "
        f"perplexity {nearest.perplexity:.2f} (BLEU {nearest.bleu}); the best, {best.heads} of "
        f"{best.head_dim}, {best.perplexity:.2f} ({best.bleu}); one head of 512, "
        f"{VASWANI_3A[0].perplexity:.2f} ({VASWANI_3A[0].bleu}).",
        "Vaswani et al. 2017, table 3 (A): one model, one task, differences of a few per cent",
    )


def _vectors(dim: int) -> list[Remark]:
    used = -(-dim // _REGISTER_LANES) * _REGISTER_LANES
    if used == dim:
        return []
    return [
        Remark(
            f"A head of {dim} lanes takes registers of {used}: {dim / used:.0%} of them work.",
            _REGISTER_SOURCE,
        )
    ]


def _rank(dim: int) -> Remark:
    return Remark(
        f"Q Kᵀ of one head has rank {dim} at most, so narrow heads cannot give every pattern of "
        "weights over long contexts; what tasks need is often far less.",
        "Bhojanapalli et al. 2020, 'Low-rank bottleneck in multi-head attention'",
    )


def _groups() -> Remark:
    return Remark(
        "Fewer KV heads shrink the cache and what decoding reads. Of 64 heads on 64, 8 and 1 KV "
        "heads the mean score was 47.2, 47.1 and 46.6.",
        "Ainslie et al. 2023, 'GQA', table 1: T5-XXL after further training",
    )
