"""The parts of a layer as plain integers: matrices, norms and attention.

Torch and transformers have no part in these frozen dataclasses. Each tells its matrices as
`Projection`s and its other parameters by name, and all counts follow from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from multihead.cost.checks import check_counts, check_sizes
from multihead.errors import ArgumentError

Norm = Literal["rms", "rms_offset", "layer", "layer_unbiased", "none"]
"""What a norm trains: a gain ("rms", "rms_offset", "layer_unbiased"), a gain and a bias ("layer"),
or nothing."""

_NORM_WEIGHTS: dict[str, int] = {
    "rms": 1,
    "rms_offset": 1,
    "layer": 2,
    "layer_unbiased": 1,
    "none": 0,
}


def norm_parameters(norm: Norm, width: int) -> int:
    """Parameters of one norm over `width` lanes."""
    return _NORM_WEIGHTS[norm] * width


@dataclass(frozen=True, slots=True)
class Projection:
    """One matrix that tokens are multiplied with: `inputs` x `outputs`, perhaps with a bias.

    `part` is what the counts file it under: "q", "k", "v", "o", "kv" where one matrix makes
    both, "feed_forward", "router" or "head". `reads` tells which tokens it multiplies: the
    queries, or those whose keys and values are made.
    """

    part: str
    inputs: int
    outputs: int
    bias: bool = False
    reads: Literal["queries", "keys"] = "queries"

    @property
    def weights(self) -> int:
        """Numbers of the matrix, which are also the multiply-adds of one token."""
        return self.inputs * self.outputs

    @property
    def biases(self) -> int:
        """Numbers of the bias."""
        return self.outputs if self.bias else 0


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head attention with a cache of keys and values: MHA, GQA or MQA.

    Attributes:
        embed_dim: width of the stream that it reads and adds to.
        heads, kv_heads: query heads, and the key and value heads that they share.
        head_dim, value_dim: width of a head's queries and keys, and of its values.
        context_dim: width of the sequence that a cross-attention reads; None is self-attention.
        q_bias, k_bias, v_bias, o_bias: which projections have a bias.
        qk_norm: parameters of the norms of queries and keys together, 0 for none.
        sinks: a trained logit for each head.
        window: how many of the newest keys a query sees, its own included; None is all.
        window_ahead: how many keys after its own a query with a window sees; for encoders.
        keep_first: how many of the first keys a query with a window sees beside it.
        head_windows: a window for each query head, None for all keys; in place of `window`.
        bias_table: parameters of a table of score biases (T5), 0 for none.
        rotary_dim: lanes of each query and key that are rotated, 0 for none; it changes what is
            kept for the backward pass and nothing else.

    Raises:
        ArgumentError: a size below 1, or KV heads that do not divide the heads.
    """

    embed_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    context_dim: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    qk_norm: int = 0
    sinks: bool = False
    window: int | None = None
    window_ahead: int = 0
    keep_first: int = 0
    head_windows: tuple[int | None, ...] | None = None
    bias_table: int = 0
    rotary_dim: int = 0

    def __post_init__(self) -> None:
        check_sizes(embed_dim=self.embed_dim, heads=self.heads, kv_heads=self.kv_heads)
        check_sizes(head_dim=self.head_dim, value_dim=self.value_dim)
        check_counts(qk_norm=self.qk_norm, bias_table=self.bias_table)
        check_counts(window_ahead=self.window_ahead, rotary_dim=self.rotary_dim)
        if self.context_dim is not None:
            check_sizes(context_dim=self.context_dim)
        check_counts(keep_first=self.keep_first)
        check_window(self.window)
        if self.head_windows is not None:
            self._check_head_windows(self.head_windows)
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"heads is {self.heads} and kv_heads is {self.kv_heads}: each KV head serves a "
                "group of query heads, so kv_heads must divide heads."
            )

    @classmethod
    def of(
        cls,
        embed_dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        *,
        bias: bool = False,
        window: int | None = None,
        rotary: bool = False,
    ) -> Self:
        """With the usual defaults: as many KV heads as heads, each `embed_dim / heads` wide.

        `bias` is one on every projection; `rotary` rotates all lanes of queries and keys.

        Raises ArgumentError where heads do not divide embed_dim and no head_dim is given.
        """
        check_sizes(embed_dim=embed_dim, heads=heads)
        if head_dim is None:
            if embed_dim % heads:
                raise ArgumentError(
                    f"embed_dim {embed_dim} is not a multiple of heads {heads}; "
                    "say head_dim where a head is not embed_dim / heads wide."
                )
            head_dim = embed_dim // heads
        return cls(
            embed_dim,
            heads,
            heads if kv_heads is None else kv_heads,
            head_dim,
            head_dim if value_dim is None else value_dim,
            q_bias=bias,
            k_bias=bias,
            v_bias=bias,
            o_bias=bias,
            window=window,
            rotary_dim=head_dim if rotary else 0,
        )

    def _check_head_windows(self, windows: tuple[int | None, ...]) -> None:
        for window in windows:
            check_window(window)
        if self.window is not None:
            raise ArgumentError("give either window, for all heads, or head_windows; not both.")
        if len(windows) != self.heads:
            raise ArgumentError(
                f"head_windows must be one a head, {self.heads} in all; got {len(windows)}."
            )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each query head."""
        return (self.window,) * self.heads if self.head_windows is None else self.head_windows

    @property
    def kept_windows(self) -> tuple[int | None, ...]:
        """For each KV head the widest window of the heads that it serves, `keep_first` included."""
        group = self.heads // self.kv_heads
        kept: list[int | None] = []
        for first in range(0, self.heads, group):
            shared = [w for w in self.windows[first : first + group] if w is not None]
            kept.append(max(shared) + self.keep_first if len(shared) == group else None)
        return tuple(kept)

    @property
    def kind(self) -> str:
        """ "mha", "gqa" or "mqa"."""
        if self.kv_heads == self.heads:
            return "mha"
        return "mqa" if self.kv_heads == 1 else "gqa"

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Queries, keys, values and output."""
        keys, values = self.kv_heads * self.head_dim, self.kv_heads * self.value_dim
        source = self.embed_dim if self.context_dim is None else self.context_dim
        return (
            Projection("q", self.embed_dim, self.heads * self.head_dim, self.q_bias),
            Projection("k", source, keys, self.k_bias, "keys"),
            Projection("v", source, values, self.v_bias, "keys"),
            Projection("o", self.heads * self.value_dim, self.embed_dim, self.o_bias),
        )

    @property
    def norm_parameters(self) -> int:
        """Of the norms of queries and keys."""
        return self.qk_norm

    @property
    def other_parameters(self) -> int:
        """Sinks, and the table of score biases."""
        return self.bias_table + (self.heads if self.sinks else 0)

    @property
    def score_lanes(self) -> int:
        """Multiply-adds of one query-key pair of one head in Q K^T."""
        return self.head_dim

    @property
    def value_lanes(self) -> int:
        """Multiply-adds of one query-key pair of one head in P V."""
        return self.value_dim

    @property
    def cached_numbers(self) -> int:
        """Numbers that a cache keeps of one token."""
        return self.kv_heads * (self.head_dim + self.value_dim)


def check_window(window: int | None) -> None:
    """Raise ArgumentError unless `window` is None, or an integer, one or more."""
    if window is not None:
        check_sizes(window=window)
