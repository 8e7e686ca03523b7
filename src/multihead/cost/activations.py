"""What autograd keeps of a forward pass for the backward one, in bytes, part by part.

The formulas are those of `multihead.nn` and `multihead.models` as they run on the CPU, in eager
mode, without dropout and without checkpointing. They count memory, not tensors: keys that are a
view of the projection's output are not counted again. Parameters are not counted, nor are a
mask's own tensors, which are the caller's.

A part counts what it makes and what it reads of other parts' intermediates in a copy of its own;
the input of a linear layer is counted by whoever makes it. Attention keeps no scores and no
weights, whatever the lengths: the backward pass computes them again, block by block.

`rows` is the number of tokens over the whole batch, `element_bytes` that of the model's dtype.
Norms and rotations compute in float32 at least, and what they keep is as wide.
"""

from __future__ import annotations

from typing import Literal, get_args

from multihead.cost.checks import check_counts
from multihead.errors import ArgumentError

Norm = Literal["rms", "rms_offset", "layer"]
Placement = Literal["pre", "post", "sandwich"]

# Of an index, and of a cosine or a sine.
_INDEX_BYTES, _ANGLE_BYTES = 8, 4

# Activations whose derivative is read off their result: their argument need not be kept.
_FROM_RESULT = ("relu", "tanh", "sigmoid")


def norm_kept(rows: int, width: int, norm: Norm, element_bytes: int) -> int:
    """A norm over `width`: its argument and what it divides by, its result not included.

    RMSNorm keeps the argument and the normalized numbers, both at least in float32, and one factor
    a row; with gains stored less 1 ("rms_offset") also the gains. LayerNorm keeps its argument, and
    a mean and a factor for each row, in the model's dtype.
    """
    check_counts(rows=rows, width=width, element_bytes=element_bytes)
    _check_choice("norm", norm, Norm)
    if norm == "layer":
        return rows * (width + 2) * element_bytes
    gains = width if norm == "rms_offset" else 0
    return (rows * (2 * width + 1) + gains) * _wide(element_bytes)


def attention_kept(
    rows: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    element_bytes: int,
    rope: bool = False,
    qk_norm: Norm | None = None,
    context_rows: int | None = None,
) -> int:
    """`MultiHeadAttention`, beyond its input: projections, what is rotated, and the heads' output.

    Rotated or normalized queries and keys are new tensors; the values stay a view of the
    projection, which is therefore kept whole. A cross-attention (`context_rows`) projects apart.
    The angles are `rotation_kept`'s: layers share them.
    """
    value_dim = head_dim if value_dim is None else value_dim
    check_counts(rows=rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
    check_counts(element_bytes=element_bytes)
    key_rows = rows if context_rows is None else context_rows
    check_counts(context_rows=key_rows)
    both = rows * heads + key_rows * kv_heads
    projected = both * head_dim + key_rows * kv_heads * value_dim
    turned = both * head_dim if rope or qk_norm else 0
    joined = rows * heads * value_dim
    kept = (projected + turned + joined) * element_bytes
    if qk_norm is None:
        return kept
    kept += norm_kept(rows * heads, head_dim, qk_norm, element_bytes)
    kept += norm_kept(key_rows * kv_heads, head_dim, qk_norm, element_bytes)
    if qk_norm == "layer" or _wide(element_bytes) == element_bytes:
        kept -= both * head_dim * element_bytes  # their argument is the projection
    elif context_rows is not None:
        kept -= rows * heads * head_dim * element_bytes  # only a wider copy of it is kept
    return kept


def latent_attention_kept(
    rows: int,
    *,
    heads: int,
    latent_dim: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    query_latent_dim: int | None = None,
    element_bytes: int,
) -> int:
    """`LatentAttention` in its materialized form, beyond its input; angles as in `attention_kept`.

    Every head's keys and values are made, so that nothing is left here of what the cache saves.
    """
    check_counts(rows=rows, heads=heads, latent_dim=latent_dim, nope_dim=nope_dim)
    check_counts(rope_dim=rope_dim, value_dim=value_dim, element_bytes=element_bytes)
    entry = latent_dim + rope_dim
    query_and_key = 2 * heads * (nope_dim + rope_dim)
    values = heads * (nope_dim + value_dim)
    kept = rows * (entry + query_and_key + values + heads * value_dim) * element_bytes
    kept += norm_kept(rows, latent_dim, "rms", element_bytes)
    if _wide(element_bytes) == element_bytes:
        kept += rows * rope_dim * element_bytes  # the norm's argument is a view of both
    if query_latent_dim is not None:
        check_counts(query_latent_dim=query_latent_dim)
        kept += norm_kept(rows, query_latent_dim, "rms", element_bytes)
        kept += rows * query_latent_dim * element_bytes
    return kept


def feed_forward_kept(
    rows: int, hidden_dim: int, *, gated: bool, activation: str = "silu", element_bytes: int
) -> int:
    """`GatedFeedForward` or `FeedForward`, beyond its input.

    Gated: gate and up, the activated gate, and their product. Plain: the hidden layer before and
    after its activation; after it alone where the derivative is read off the result (ReLU).
    """
    check_counts(rows=rows, hidden_dim=hidden_dim, element_bytes=element_bytes)
    widths = 4 if gated else 1 if activation in _FROM_RESULT else 2
    return rows * widths * hidden_dim * element_bytes


def rotation_kept(
    length: int, rotary_dim: int, *, interleaved: bool = False, batch: int = 1
) -> int:
    """Cosines and sines of `length` positions, float32; `batch` where rows differ.

    Once for all layers that turn alike. Half-split lanes read them for every lane, interleaved
    ones for every pair.
    """
    check_counts(length=length, rotary_dim=rotary_dim, batch=batch)
    return batch * length * rotary_dim * (1 if interleaved else 2) * _ANGLE_BYTES


def block_kept(
    rows: int,
    width: int,
    *,
    norm: Norm,
    placement: Placement = "pre",
    attention: int,
    feed_forward: int,
    cross_attention: int | None = None,
    element_bytes: int,
) -> int:
    """`TransformerBlock`: its norms, what they give its parts, and the parts' own bytes.

    Before a part stands its norm ("pre"), after it ("post"), or on both sides ("sandwich").
    """
    _check_choice("placement", placement, Placement)
    parts = [attention, feed_forward] + ([] if cross_attention is None else [cross_attention])
    of_norm = norm_kept(rows, width, norm, element_bytes)
    if placement == "sandwich":
        of_norm *= 2
    return len(parts) * (of_norm + rows * width * element_bytes) + sum(parts)


def embedding_kept(rows: int, *, scaled: bool = False, element_bytes: int) -> int:
    """The token ids, and the factor on their embeddings where there is one."""
    check_counts(rows=rows, element_bytes=element_bytes)
    return rows * _INDEX_BYTES + (element_bytes if scaled else 0)


def learned_positions_kept(length: int, *, batch: int = 1) -> int:
    """The positions that a learned table was read at; `batch` where rows differ."""
    check_counts(length=length, batch=batch)
    return batch * length * _INDEX_BYTES


def head_kept(
    rows: int, width: int, vocab: int, *, softcap: bool = False, element_bytes: int
) -> int:
    """What the head reads, and a capped logit's tanh; the logits themselves are the caller's."""
    check_counts(rows=rows, width=width, vocab=vocab, element_bytes=element_bytes)
    return rows * (width + (vocab if softcap else 0)) * element_bytes


def cross_entropy_kept(rows: int, vocab: int, element_bytes: int) -> int:
    """`torch.nn.functional.cross_entropy` on all logits: log-probabilities, targets, one total.

    With a vocabulary of 50,000 it is most of what a small model keeps.
    """
    check_counts(rows=rows, vocab=vocab, element_bytes=element_bytes)
    return rows * (vocab * element_bytes + _INDEX_BYTES) + element_bytes


def _wide(element_bytes: int) -> int:
    return max(4, element_bytes)


def _check_choice(name: str, choice: object, kinds: object) -> None:
    names = get_args(kinds)
    if choice not in names:
        raise ArgumentError(f"{name} must be one of {', '.join(map(repr, names))}; got {choice!r}.")
