"""A language model whose heads are set by hand, so that everyone knows what each does.

Its stream has one axis for each token, one for each position and, written by a head of the first
layer, one for the token before.
"""

import torch

from multihead.models import BlockConfig, LanguageModel, LanguageModelConfig

TOKENS, POSITIONS = 151, 137
WIDTH = TOKENS + POSITIONS + TOKENS
HEAD_DIM = TOKENS + POSITIONS
SHARP = 0.25  # norms make each axis some 15 long, so that logits are about 50
REACH, FAR, SINK = 8, 20, 5

PLANTED = (
    ("previous", "duplicate", "first", "uniform", "local", "far", "sink", "content"),
    ("induction", *("content",) * 7),
)
ROLES = {
    "previous": {"previous_token", "local", "positional"},
    "duplicate": {"duplicate_token"},
    "first": {"first_key"},
    "uniform": {"uniform"},
    "local": {"local"},
    "far": {"positional"},
    "sink": {"second_sink"},
    "content": set(),
    "induction": {"induction"},
}


def planted_model():
    """Two layers of eight heads, as `PLANTED` names them; feed-forwards write nothing."""
    block = BlockConfig(WIDTH, 8, 8, head_dim=HEAD_DIM, gated=False, scale=1.0)
    config = LanguageModelConfig(
        TOKENS, (block,) * 2, positions="learned", max_positions=POSITIONS, tied=False
    )
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            if parameter.ndim > 1:
                parameter.zero_()
        model.embedding.weight.copy_(torch.eye(WIDTH)[:TOKENS])
        model.positions.weight.copy_(torch.eye(WIDTH)[TOKENS:HEAD_DIM])
        generator = torch.Generator().manual_seed(5)
        for block, names in zip(model.blocks, PLANTED, strict=True):
            for head, name in enumerate(names):
                _set(block.attention, head, *_matrices(name, generator))
        _copy_tokens(model.blocks[0].attention, head=0)
    return model


def _matrices(name, generator):
    """The head's query and key matrices, [HEAD_DIM, WIDTH]."""
    query, key = torch.zeros(2, HEAD_DIM, WIDTH)
    token, place = torch.arange(TOKENS), torch.arange(POSITIONS)
    if name == "content":
        size = 0.028  # logits of a few units
        query[:, :TOKENS] = torch.randn(HEAD_DIM, TOKENS, generator=generator) * size
        key[:, :TOKENS] = torch.randn(HEAD_DIM, TOKENS, generator=generator) * size
    elif name == "induction":
        query[token, token] = 1.0
        key[token, HEAD_DIM + token] = SHARP
    elif name == "duplicate":
        query[token, token] = 1.0
        key[token, token] = SHARP
        query[TOKENS + place, TOKENS + place] = -2.0
        key[TOKENS + place, TOKENS + place] = SHARP
    elif name != "uniform":
        query[TOKENS + place, TOKENS + place] = 1.0
        key[TOKENS:, TOKENS:HEAD_DIM] = SHARP * _pattern(name).float()
    return query, key


def _pattern(name):
    """Which keys a head of this name looks at, by position alone: bool [query, key]."""
    query, key = torch.arange(POSITIONS)[:, None], torch.arange(POSITIONS)
    return {
        "previous": key == query - 1,
        "first": (key == 0).expand(POSITIONS, -1),
        "local": (query - key).abs() < REACH,
        "far": key == query - FAR,
        "sink": (key == SINK).expand(POSITIONS, -1),
    }[name]


def _set(attention, head, query, key):
    rows = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
    of_keys = slice((8 + head) * HEAD_DIM, (9 + head) * HEAD_DIM)
    attention.qkv_proj.weight[rows] = query
    attention.qkv_proj.weight[of_keys] = key


def _copy_tokens(attention, head):
    """The head writes the token that it reads into the axes of the token before."""
    token = torch.arange(TOKENS)
    values = attention.qkv_proj.weight[2 * 8 * HEAD_DIM :].view(8, HEAD_DIM, WIDTH)[head]
    values[token, token] = 1.0
    attention.out_proj.weight.view(WIDTH, 8, HEAD_DIM)[HEAD_DIM + token, head, token] = 1 / 15
