"""Mistakes that people make in multi-head attention, each run beside what is right.

    python examples/common_mistakes.py

prints what docs/common-mistakes.md shows. Every mistake runs without an error unless it says so;
what it gives is compared with the reference of the library in float64.

Shape suffixes: b batch, h head, n token that reads, m token that is read, d width of a head, c all
heads' widths together.
"""

from __future__ import annotations

import math
from textwrap import fill

import torch
from torch import Tensor
from torch.nn.functional import dropout, scaled_dot_product_attention

import multihead as mh
from mistake import MISTAKES, Ran, mistake

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 4, 6, 8
WIDTH = HEADS * HEAD_DIM


def qkv(heads: int = HEADS) -> list[Tensor]:
    """A query of all heads, and a key and value of `heads`; scores large enough to matter."""
    query, key, value = (
        torch.randn(BATCH, h, TOKENS, HEAD_DIM).double() for h in (HEADS, heads, heads)
    )
    return [2 * query, 2 * key, value]


def answer(query: Tensor, key: Tensor, value: Tensor, mask: mh.Mask | None = None) -> Tensor:
    """The definition, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    out: Tensor = mh.attention(query, key, value, mask=mask, backend="reference")
    return out


@mistake("Splitting heads by reshape alone", "Reshape to [B, N, H, d], then transpose(1, 2).")
def split_by_reshape() -> Ran:
    """The shape is right, but a head gets pieces of several tokens: memory lies token by token."""
    x_bnc = torch.randn(BATCH, TOKENS, WIDTH).double()
    wrong = x_bnc.reshape(BATCH, HEADS, TOKENS, HEAD_DIM)
    right = x_bnc.reshape(BATCH, TOKENS, HEADS, HEAD_DIM).transpose(1, 2)
    return Ran(wrong, right, torch.stack(x_bnc.split(HEAD_DIM, dim=-1), dim=1))


@mistake("Joining heads by reshape alone", "Transpose back first: `.transpose(1, 2).flatten(2)`.")
def join_by_reshape() -> Ran:
    """The same on the way back: [B, H, N, d] has the right number of elements for [B, N, H d]."""
    query, key, value = qkv()
    heads_bhnd = answer(query, key, value)
    wrong = heads_bhnd.reshape(BATCH, TOKENS, WIDTH)
    right = heads_bhnd.transpose(1, 2).flatten(2)
    return Ran(wrong, right, torch.cat(heads_bhnd.unbind(1), dim=-1))


@mistake("No scale", "Divide the scores by sqrt(d), d being the width of a head.")
def no_scale() -> Ran:
    """Scores grow with the width of a head, softmax saturates, gradients vanish."""
    query, key, value = qkv()
    wrong = (query @ key.mT).softmax(-1) @ value
    right = (query @ key.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ value
    return Ran(wrong, right, answer(query, key, value))


@mistake("Scaling by the model's width", "It is the width of a head: sqrt(d), not sqrt(h d).")
def scale_of_the_model() -> Ran:
    """Attention is flatter than it was meant to be, the more so the more heads there are."""
    query, key, value = qkv()
    wrong = (query @ key.mT / math.sqrt(WIDTH)).softmax(-1) @ value
    right = (query @ key.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ value
    return Ran(wrong, right, answer(query, key, value))


@mistake("Softmax over the wrong axis", "Over the keys, the last axis: each row sums to 1.")
def softmax_over_queries() -> Ran:
    """The columns sum to 1: queries compete for a key, instead of keys for a query."""
    query, key, value = qkv()
    scores_bhnm = query @ key.mT / math.sqrt(HEAD_DIM)
    wrong = scores_bhnm.softmax(-2) @ value
    right = scores_bhnm.softmax(-1) @ value
    return Ran(wrong, right, answer(query, key, value))


@mistake(
    "The other meaning of a bool mask",
    'True means "may attend" in `scaled_dot_product_attention` and in multihead, and "hidden" in '
    "`nn.MultiheadAttention`: invert on the way. Named masks have one meaning.",
)
def inverted_mask() -> Ran:
    """Every token reads the future and nothing else; the last one reads nothing, hence NaN."""
    query, key, value = qkv()
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    scores_bhnm = query @ key.mT / math.sqrt(HEAD_DIM)
    wrong = scores_bhnm.masked_fill(~hidden, -torch.inf).softmax(-1) @ value
    right = mh.attention(query, key, value, mask=mh.Causal())
    return Ran(wrong, right, answer(query, key, value, mh.Causal()))


@mistake("Adding a mask of 0 and 1", "Add 0 and minus infinity, or fill by a bool mask.")
def mask_of_zero_and_one() -> Ran:
    """Hidden keys lose 1 from their score, and so only about two thirds of their weight."""
    query, key, value = qkv()
    visible = torch.ones(TOKENS, TOKENS).double().tril()
    scores_bhnm = query @ key.mT / math.sqrt(HEAD_DIM)
    wrong = (scores_bhnm + visible).softmax(-1) @ value
    right = (scores_bhnm + visible.log()).softmax(-1) @ value
    return Ran(wrong, right, answer(query, key, value, mh.Causal()))


@mistake("Masking after the softmax", "Mask the scores, so that what remains sums to 1.")
def mask_after_softmax() -> Ran:
    """Rows sum to less than 1, and the future still acts through the denominator."""
    query, key, value = qkv()
    visible = torch.ones(TOKENS, TOKENS).double().tril()
    scores_bhnm = query @ key.mT / math.sqrt(HEAD_DIM)
    wrong = (scores_bhnm.softmax(-1) * visible) @ value
    right = scores_bhnm.masked_fill(visible == 0, -torch.inf).softmax(-1) @ value
    return Ran(wrong, right, answer(query, key, value, mh.Causal()))


@mistake(
    "The causal triangle beside a cache",
    "Align it at the last key: `Causal()` does, torch's `is_causal` does not.",
)
def causal_with_cache() -> Ran:
    """A new token after a cache of 5 reads only the first: the triangle starts at the top left."""
    query, key, value = qkv()
    newest = query[:, :, -1:]
    wrong = scaled_dot_product_attention(newest, key, value, is_causal=True)
    right = mh.attention(newest, key, value, mask=mh.Causal())
    return Ran(wrong, right, answer(query, key, value, mh.Causal())[:, :, -1:])


@mistake(
    "Rows of padding that see nothing",
    "Give them zeros, as multihead does, and leave them out of the loss.",
)
def rows_without_keys() -> Ran:
    """Softmax over nothing but minus infinity is 0 / 0; a NaN in the loss goes to every weight."""
    query, key, value = qkv()
    real = torch.tensor([[False, True, True, True, True, True], [True] * 6])
    visible_b1nm = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & real[:, None, None]
    scores_bhnm = query @ key.mT / math.sqrt(HEAD_DIM)
    wrong = scores_bhnm.masked_fill(~visible_b1nm, -torch.inf).softmax(-1) @ value
    mask = mh.Causal() & mh.KeyPadding(real)
    right = mh.attention(query, key, value, mask=mask)
    return Ran(wrong, right, answer(query, key, value, mask))


@mistake("No W_O", "Multiply the concatenated heads by W_O, which lets them mix.")
def no_output_projection() -> Ran:
    """Output coordinate c depends on head c // d alone: the heads never meet in this layer."""
    layer = mh.MultiHeadAttention(WIDTH, HEADS).double()
    x_bnc = torch.randn(BATCH, TOKENS, WIDTH).double()
    with torch.no_grad():
        heads_bhnd = layer.forward_with_stats(x_bnc)[1].out
        wrong = heads_bhnd.transpose(1, 2).flatten(2)
        right = wrong @ layer.out_proj.weight.mT
        return Ran(wrong, right, layer(x_bnc))


@mistake(
    "Tiling shared KV heads",
    "Query heads 0 and 1 share KV head 0: repeat_interleave, or no copy at all (`attention`).",
)
def tiled_groups() -> Ran:
    """`repeat` gives the KV heads in the order 0 1 0 1, where 0 0 1 1 was trained."""
    query, key, value = qkv(heads=2)
    wrong = answer(query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1))
    right = mh.attention(query, key, value)
    key, value = (x.repeat_interleave(2, dim=1) for x in (key, value))
    return Ran(wrong, right, answer(query, key, value))


@mistake(
    "Scores in fp16",
    "Scale the query before the product, or keep scores in float32 as fused kernels do.",
)
def overflowing_scores() -> Ran:
    """q.k passes 65,504, becomes infinite before it is scaled, and infinity less itself is NaN."""
    query, key, value = (x.half() for x in qkv())
    query, key = 60 * query, 60 * key
    wrong = ((query @ key.mT) / math.sqrt(HEAD_DIM)).softmax(-1) @ value
    right = mh.attention(query, key, value)
    return Ran(wrong, right, answer(query, key, value))


@mistake(
    "Dropout in evaluation",
    "Pass `training=self.training`, or a `dropout_p` of 0; a layer's `eval()` does that for its "
    "own.",
    varies=True,
)
def dropout_in_evaluation() -> Ran:
    """The function knows no eval mode: it drops out unless it is told not to."""
    query, key, value = qkv()
    weights = (query @ key.mT / math.sqrt(HEAD_DIM)).softmax(-1)
    wrong = dropout(weights, 0.1) @ value
    right = dropout(weights, 0.1, training=False) @ value
    return Ran(wrong, right, answer(query, key, value))


@mistake(
    "Rotating what is in the cache",
    "Rotate a key once, by its own position, before it enters the cache.",
)
def rope_after_cache() -> Ran:
    """Each step turns the old keys once more: after one, key j seems to stand at position 2 j."""
    query, key, value = qkv()
    positions = torch.arange(TOKENS)
    turned_query, turned_key = mh.apply_rope(query, positions), mh.apply_rope(key, positions)
    cached = torch.cat((turned_key[:, :, :-1], key[:, :, -1:]), dim=2)
    wrong = answer(turned_query, mh.apply_rope(cached, positions), value)[:, :, -1:]
    right = mh.attention(turned_query[:, :, -1:], turned_key, value)
    return Ran(wrong, right, answer(turned_query, turned_key, value)[:, :, -1:])


@mistake(
    "Positions that start anew",
    "Count on from the cache's length: layers with `rope` and a `cache` do.",
)
def positions_start_anew() -> Ran:
    """In decoding each new token is rotated as position 0, as if it were the first."""
    query, key, value = qkv()
    turned_key = mh.apply_rope(key, torch.arange(TOKENS))
    newest = query[:, :, -1:]
    wrong = mh.attention(mh.apply_rope(newest, torch.tensor([0])), turned_key, value)
    right = mh.attention(mh.apply_rope(newest, torch.tensor([TOKENS - 1])), turned_key, value)
    turned_query = mh.apply_rope(query, torch.arange(TOKENS))
    return Ran(wrong, right, answer(turned_query, turned_key, value)[:, :, -1:])


@mistake(
    "Batch and tokens swapped",
    "Say `batch_first=True`; multihead's layers take [B, N, width] always.",
)
def batch_is_attended() -> Ran:
    """`nn.MultiheadAttention` takes [N, B, width] by default, so samples read one another."""
    torch_layer = torch.nn.MultiheadAttention(WIDTH, HEADS).double()
    x_bnc = torch.randn(BATCH, TOKENS, WIDTH).double()
    with torch.no_grad():
        wrong = torch_layer(x_bnc, x_bnc, x_bnc, need_weights=False)[0]
        right = mh.MultiHeadAttention.from_torch(torch_layer)(x_bnc)
        x_nbc = x_bnc.transpose(0, 1)
        by_token = torch_layer(x_nbc, x_nbc, x_nbc, need_weights=False)[0].transpose(0, 1)
    return Ran(wrong, right, by_token)


def markdown() -> str:
    """The mistakes as sections of a page."""
    return "\n".join(
        f"## {m.title}\n\n{m.symptom}\n\n```python\n{m.code}\n```\n\n```text\n"
        + "\n".join(m.lines())
        + f"\n```\n\n{m.remedy}\n"
        for m in MISTAKES
    )


if __name__ == "__main__":
    for one in MISTAKES:
        print(f"{one.title}\n{fill(one.symptom, 80)}")
        print(*(f"    {line}" for line in one.lines()), sep="\n")
        print(f"{fill(one.remedy, 80)}\n")
