"""What autograd keeps, to the byte, against what it really saved."""

import pytest
import torch

import multihead as mh
from multihead.cost import activations
from multihead.errors import ArgumentError
from multihead.models import BlockConfig, LanguageModel, LanguageModelConfig
from multihead.models.blocks import build_block, norm_factory
from multihead.nn import FeedForward, GatedFeedForward, LatentAttention, MultiHeadAttention, RoPE

BATCH, LENGTH, WIDTH = 2, 11, 24
ROWS = BATCH * LENGTH
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
NORMS = ("rms", "rms_offset", "layer")


def saved_bytes(module, call, *inputs):
    """Bytes of the memory that autograd holds after `call`, parameters and `inputs` left out."""
    held = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *inputs)}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    assert result.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


def inputs(dtype, width=WIDTH, length=LENGTH):
    return torch.randn(BATCH, length, width, dtype=dtype, requires_grad=True)


def build_norm(kind, width):
    return norm_factory(BlockConfig(WIDTH, 2, 8, norm=kind))(width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_keeps_its_argument_and_its_factors(norm, dtype):
    module, x = build_norm(norm, WIDTH).to(dtype), inputs(dtype)
    # Doubled, so that the argument is no input.
    found = saved_bytes(module, lambda: module(x + x))
    assert found == activations.norm_kept(ROWS, WIDTH, norm, dtype.itemsize)


ATTENTIONS = {
    "plain": ({}, {}),
    "grouped": ({"num_kv_heads": 2}, {}),
    "wide values": ({"num_kv_heads": 1, "value_dim": 7}, {}),
    "narrow heads": ({"head_dim": 10, "qkv_bias": True, "out_bias": True}, {}),
    "sinks": ({"sinks": True, "softcap": 3.0, "window": 5}, {}),
    "rope": ({"num_kv_heads": 2, "rope": RoPE()}, {"rope": True}),
    "partial rope": ({"rope": RoPE(rotary_dim=2)}, {"rope": True}),
    "interleaved": ({"rope": RoPE(interleaved=True)}, {"rope": True}),
    "wide interleaved": ({"head_dim": 32, "rope": RoPE(interleaved=True)}, {"rope": True}),
} | {
    f"{norm} of queries and keys{' and rope' if rope else ''}": (
        {"num_kv_heads": 2, "value_dim": 5, "rope": rope, "norm": norm},
        {"rope": rope is not None, "qk_norm": norm},
    )
    for norm in NORMS
    for rope in (None, RoPE())
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_self_attention(name, dtype):
    options, said = ATTENTIONS[name]
    options = dict(options)
    norm = options.pop("norm", None)
    qk_norm = None if norm is None else lambda width: build_norm(norm, width)
    layer = MultiHeadAttention(WIDTH, 4, qk_norm=qk_norm, **options).to(dtype)
    x = inputs(dtype)
    expected = activations.attention_kept(
        ROWS, **_heads(layer), **said, element_bytes=dtype.itemsize
    )
    if layer.rope is not None:
        expected += activations.rotation_kept(
            LENGTH, layer.rope.width(layer.head_dim), interleaved=layer.rope.interleaved
        )
    assert saved_bytes(layer, lambda: layer(x, mask=mh.Causal()), x) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, *NORMS])
def test_cross_attention_projects_two_sequences(norm, dtype):
    qk_norm = None if norm is None else lambda width: build_norm(norm, width)
    layer = MultiHeadAttention(WIDTH, 4, num_kv_heads=2, context_dim=18, qk_norm=qk_norm).to(dtype)
    x, context = inputs(dtype), inputs(dtype, 18, 7)
    expected = activations.attention_kept(
        ROWS, **_heads(layer), qk_norm=norm, context_rows=BATCH * 7, element_bytes=dtype.itemsize
    )
    assert saved_bytes(layer, lambda: layer(x, context), x, context) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("query_latent_dim", [None, 13])
@pytest.mark.parametrize("interleaved", [True, False])
def test_latent_attention(query_latent_dim, interleaved, dtype):
    sizes = {"latent_dim": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 5}
    sizes["query_latent_dim"] = query_latent_dim
    layer = LatentAttention(WIDTH, 3, rope=RoPE(interleaved=interleaved), **sizes).to(dtype)
    x = inputs(dtype)
    expected = activations.latent_attention_kept(
        ROWS, heads=3, **sizes, element_bytes=dtype.itemsize
    ) + activations.rotation_kept(LENGTH, 4, interleaved=interleaved)
    found = saved_bytes(layer, lambda: layer(x, mask=mh.Causal(), form="materialized"), x)
    assert found == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("gated", "activation"),
    [(True, "silu"), (True, "gelu"), *((False, it) for it in ("silu", "gelu", "relu", "tanh"))],
)
def test_feed_forward(gated, activation, dtype):
    kind = GatedFeedForward if gated else FeedForward
    functions = {"tanh": torch.tanh}
    function = functions.get(activation) or getattr(torch.nn.functional, activation)
    layer, x = kind(WIDTH, 37, activation=function).to(dtype), inputs(dtype)
    expected = activations.feed_forward_kept(
        ROWS, 37, gated=gated, activation=activation, element_bytes=dtype.itemsize
    )
    assert saved_bytes(layer, lambda: layer(x), x) == expected


def block_expected(config, rows, element_bytes, context_rows=None):
    """The bytes of a block as the formulas have it, angles not included."""
    heads = {"heads": config.num_heads, "kv_heads": config.kv_heads, "head_dim": config.width}
    cross = None
    if context_rows is not None:
        cross = activations.attention_kept(
            rows, **heads, context_rows=context_rows, element_bytes=element_bytes
        )
    return activations.block_kept(
        rows,
        config.embed_dim,
        norm=config.norm,
        placement=config.norm_placement,
        attention=activations.attention_kept(
            rows,
            **heads,
            rope=config.rope is not None,
            qk_norm=config.norm if config.qk_norm else None,
            element_bytes=element_bytes,
        ),
        feed_forward=activations.feed_forward_kept(
            rows,
            config.ffn_dim,
            gated=config.gated,
            activation=config.activation,
            element_bytes=element_bytes,
        ),
        cross_attention=cross,
        element_bytes=element_bytes,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("crosses", [False, True])
def test_a_block_by_its_placement(crosses, placement, norm, dtype):
    config = BlockConfig(
        WIDTH, 4, 37, 2, norm=norm, norm_placement=placement, context_dim=18 if crosses else None
    )
    block = build_block(config).to(dtype)
    x, context = inputs(dtype), inputs(dtype, 18, 7)
    given = (context,) if crosses else ()
    # Doubled, so that the block's argument is counted as what it keeps.
    found = saved_bytes(block, lambda: block(x + x, *given, mask=mh.Causal()), *given)
    expected = block_expected(config, ROWS, dtype.itemsize, BATCH * 7 if crosses else None)
    assert found == expected


MODELS = {
    "llama": LanguageModelConfig(31, (BlockConfig(WIDTH, 4, 37, 2, rope=RoPE()),) * 3),
    "two rotations": LanguageModelConfig(
        31,
        (
            BlockConfig(WIDTH, 4, 37, 2, rope=RoPE(), qk_norm=True, norm="rms_offset"),
            BlockConfig(WIDTH, 4, 37, 2, rope=RoPE(base=500.0), norm="rms_offset", window=4),
        ),
        tied=False,
        embedding_scale=5.0,
        logit_softcap=30.0,
    ),
    "gpt2": LanguageModelConfig(
        31,
        (BlockConfig(WIDTH, 4, 37, norm="layer", gated=False, activation="gelu"),) * 2,
        positions="learned",
        max_positions=50,
        embedding_norm=True,
    ),
    "post, no final norm": LanguageModelConfig(
        31,
        (BlockConfig(WIDTH, 4, 37, norm_placement="post", gated=False, activation="relu"),) * 2,
        positions="sinusoidal",
        final_norm=False,
    ),
}


def model_expected(config, batch, length, element_bytes):
    rows, width = batch * length, config.embed_dim
    norm = config.layers[0].norm
    turns = {(layer.rope, layer.width) for layer in config.layers if layer.rope is not None}
    return (
        activations.embedding_kept(
            rows, scaled=config.embedding_scale is not None, element_bytes=element_bytes
        )
        + (activations.learned_positions_kept(length) if config.positions == "learned" else 0)
        + (config.embedding_norm + config.final_norm)
        * activations.norm_kept(rows, width, norm, element_bytes)
        + sum(block_expected(layer, rows, element_bytes) for layer in config.layers)
        + sum(
            activations.rotation_kept(length, rope.width(head), interleaved=rope.interleaved)
            for rope, head in turns
        )
        + activations.head_kept(
            rows,
            width,
            config.vocab_size,
            softcap=config.logit_softcap is not None,
            element_bytes=element_bytes,
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_language_model_and_its_loss(name, dtype):
    config = MODELS[name]
    model = LanguageModel(config).to(dtype)
    ids = torch.randint(31, (BATCH, LENGTH))
    expected = model_expected(config, BATCH, LENGTH, dtype.itemsize)
    assert saved_bytes(model, lambda: model(ids)) == expected

    def loss():
        logits = model(ids).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets)

    targets = torch.randint(31, (ROWS,))
    with_loss = expected + activations.cross_entropy_kept(ROWS, 31, dtype.itemsize)
    assert saved_bytes(model, loss) == with_loss


def test_nothing_grows_with_the_square_of_the_length():
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 6, "element_bytes": 4}
    once = activations.attention_kept(1000, **heads)
    assert activations.attention_kept(2000, **heads) == 2 * once


def test_unknown_words_are_refused():
    with pytest.raises(ArgumentError, match="norm must be one of 'rms'"):
        activations.norm_kept(3, 4, "batch", 4)
    with pytest.raises(ArgumentError, match="placement must be one of 'pre'"):
        activations.block_kept(
            3, 4, norm="rms", placement="both", attention=0, feed_forward=0, element_bytes=4
        )
    with pytest.raises(ArgumentError, match="rows must be 0 or more"):
        activations.norm_kept(-3, 4, "rms", 4)


def _heads(layer):
    return {
        "heads": layer.num_heads,
        "kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "value_dim": layer.value_dim,
    }
