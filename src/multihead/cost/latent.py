"""Latent attention as plain integers, and the two ways to compute it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from multihead.cost.checks import check_sizes
from multihead.cost.parts import Attention, Projection, check_window

Form = Literal["materialized", "absorbed"]
"""How latent attention is computed: with every head's keys and values, or on the latents."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA): a cache keeps one latent and one rotated key a token.

    Attributes:
        embed_dim, heads: as in `Attention`.
        latent_dim: width of the latent; `kv_lora_rank` in configs.
        nope_dim, rope_dim: lanes of a head's query and key without and with rotation.
        value_dim: width of a head's values.
        query_latent_dim: width of the latent that queries are made of; None makes them from x.
        latent_bias: biases on what makes the latents.
        o_bias: a bias on the output.
        window: as in `Attention`.

    Raises:
        ArgumentError: a size below 1.

    Source: DeepSeek-V2, 2024, section 2.1.
    """

    embed_dim: int
    heads: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_latent_dim: int | None = None
    latent_bias: bool = False
    o_bias: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        check_sizes(embed_dim=self.embed_dim, heads=self.heads, latent_dim=self.latent_dim)
        check_sizes(nope_dim=self.nope_dim, rope_dim=self.rope_dim, value_dim=self.value_dim)
        if self.query_latent_dim is not None:
            check_sizes(query_latent_dim=self.query_latent_dim)
        check_window(self.window)

    @property
    def kind(self) -> str:
        """ "mla"."""
        return "mla"

    @property
    def kv_heads(self) -> int:
        """Every head has keys and values of its own, made from the one latent."""
        return self.heads

    @property
    def head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def sinks(self) -> bool:
        """Latent attention has none."""
        return False

    @property
    def window_ahead(self) -> int:
        """Latent attention looks back alone."""
        return 0

    @property
    def keep_first(self) -> int:
        """Latent attention keeps no first keys."""
        return 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each query head."""
        return (self.window,) * self.heads

    @property
    def context_dim(self) -> None:
        """Latent attention reads its own sequence."""
        return None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Queries (through their latent, if any), the latent of keys and values, and output.

        The matrix that makes keys and values from latents is counted as read by keys: in the
        absorbed form, which decoding takes, queries and outputs are multiplied with it instead.
        """
        width = self.heads * self.head_dim
        if self.query_latent_dim is None:
            queries: tuple[Projection, ...] = (Projection("q", self.embed_dim, width),)
        else:
            queries = (
                Projection("q", self.embed_dim, self.query_latent_dim, self.latent_bias),
                Projection("q", self.query_latent_dim, width),
            )
        entry = self.latent_dim + self.rope_dim
        return (
            *queries,
            Projection("kv", self.embed_dim, entry, self.latent_bias, "keys"),
            self.up_projection,
            Projection("o", self.heads * self.value_dim, self.embed_dim, self.o_bias),
        )

    @property
    def up_projection(self) -> Projection:
        """What makes every head's keys and values from a latent."""
        return Projection(
            "kv", self.latent_dim, self.heads * (self.nope_dim + self.value_dim), reads="keys"
        )

    @property
    def norm_parameters(self) -> int:
        """Gains of the norms of the latents."""
        return self.latent_dim + (self.query_latent_dim or 0)

    @property
    def other_parameters(self) -> int:
        """None."""
        return 0

    def lanes(self, form: Form) -> tuple[int, int]:
        """Multiply-adds of one query-key pair of one head in Q K^T and in P V."""
        if form == "absorbed":
            return self.latent_dim + self.rope_dim, self.latent_dim
        return self.head_dim, self.value_dim

    def cheaper_form(self, queries: int, keys: int) -> Form:
        """The form with fewer products for so many queries and keys; see `nn.LatentAttention`."""
        weights = self.latent_dim * (self.nope_dim + self.value_dim)
        materialized = keys * weights + queries * keys * sum(self.lanes("materialized"))
        absorbed = queries * weights + queries * keys * sum(self.lanes("absorbed"))
        return "absorbed" if absorbed < materialized else "materialized"

    @property
    def cached_numbers(self) -> int:
        """Numbers that a cache keeps of one token."""
        return self.latent_dim + self.rope_dim


AnyAttention = Attention | LatentAttention
