"""What a step of training holds: weights, gradients, the optimizer's state, and activations."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from multihead.cost.activations import Norm as KeptNorm
from multihead.cost.activations import (
    attention_kept,
    cross_entropy_kept,
    embedding_kept,
    feed_forward_kept,
    head_kept,
    latent_attention_kept,
    learned_positions_kept,
    norm_kept,
    rotation_kept,
)
from multihead.cost.attention import dtype_bytes
from multihead.cost.checks import check_counts
from multihead.cost.latent import AnyAttention, LatentAttention
from multihead.cost.model import AnyFeedForward, Experts, FeedForward, Layer, Model
from multihead.cost.parameters import parameters_of
from multihead.errors import ArgumentError

_ADAMW_STATES = 2

# What a norm keeps does not depend on its bias.
_KEPT_NORMS: dict[str, KeptNorm] = {
    "rms": "rms",
    "rms_offset": "rms_offset",
    "layer": "layer",
    "layer_unbiased": "layer",
    "none": "layer",
}


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes of one training step, by part; `total` at the moment when all of it is held."""

    weights: int
    gradients: int
    optimizer: int
    master: int
    activations: int

    @property
    def total(self) -> int:
        """All parts."""
        return self.weights + self.gradients + self.optimizer + self.master + self.activations

    def as_dict(self) -> dict[str, int]:
        """The parts under their names, and `total`."""
        return {**asdict(self), "total": self.total}


def training_memory(
    model: Model,
    tokens: int,
    *,
    batch: int = 1,
    dtype: object = "bfloat16",
    state_dtype: object = "float32",
    master: bool | None = None,
    checkpointing: bool = False,
) -> TrainingMemory:
    """What AdamW's step on `batch` rows of `tokens` holds.

    Args:
        dtype: of weights, gradients and activations.
        state_dtype: of AdamW's two moments, and of the master copy.
        master: a copy of the weights that the optimizer changes; by default where `dtype` is
            narrower than `state_dtype`, as mixed precision has it.
        checkpointing: keep each layer's input alone, and make the rest of one layer at a time
            again in the backward pass.

    Raises:
        ArgumentError: a negative count, or an unknown dtype.
    """
    parameters = parameters_of(model).total
    size, state = dtype_bytes(dtype), dtype_bytes(state_dtype)
    if master is None:
        master = size < state
    return TrainingMemory(
        weights=parameters * size,
        gradients=parameters * size,
        optimizer=_ADAMW_STATES * parameters * state,
        master=parameters * state if master else 0,
        activations=activation_bytes(
            model, tokens, batch=batch, dtype=dtype, checkpointing=checkpointing
        ),
    )


def activation_bytes(
    model: Model,
    tokens: int,
    *,
    batch: int = 1,
    dtype: object = "bfloat16",
    checkpointing: bool = False,
) -> int:
    """What autograd keeps of a forward pass with its loss, as our own layers keep it.

    To the byte for decoders that `multihead.models` can build (see `multihead.cost.activations`),
    but for the one number that scales embeddings, and a table of angles for each further base of
    rotations. Of experts, the visits of every token are counted as so many feed-forwards. Other
    frameworks' layers keep somewhat more or less, and N x N weights where they build them. The
    loss is the cross-entropy of all logits.

    Raises:
        ArgumentError: a negative count, an unknown dtype, or an encoder-decoder.
    """
    check_counts(tokens=tokens, batch=batch)
    if model.source is not None:
        raise ArgumentError(
            "what an encoder-decoder keeps for the backward pass is not counted; count its two "
            "stacks by themselves."
        )
    size, rows = dtype_bytes(dtype), batch * tokens
    layers = [layer_kept(layer, rows, size) for layer in model.layers]
    stream = rows * model.embed_dim * size
    kept = (len(layers) * stream + max(layers)) if checkpointing else sum(layers)
    turned = {_rotation(layer.attention) for layer in model.layers}
    kept += sum(rotation_kept(tokens, lanes, interleaved=pairs) for lanes, pairs in turned)
    return kept + _ends_kept(model, tokens, batch, size)


def layer_kept(layer: Layer, rows: int, size: int) -> int:
    """What one layer keeps: its norms, what they give its parts, and the parts' own."""
    norm = _KEPT_NORMS[layer.norm]
    parts = min(layer.norms, 2)
    kept = layer.norms * norm_kept(rows, layer.embed_dim, norm, size)
    kept += parts * rows * layer.embed_dim * size
    kept += _attention_kept(layer.attention, rows, size, norm)
    return kept + _feed_forward_kept(layer.feed_forward, rows, size)


def _attention_kept(attention: AnyAttention, rows: int, size: int, norm: KeptNorm) -> int:
    if isinstance(attention, LatentAttention):
        return latent_attention_kept(
            rows,
            heads=attention.heads,
            latent_dim=attention.latent_dim,
            nope_dim=attention.nope_dim,
            rope_dim=attention.rope_dim,
            value_dim=attention.value_dim,
            query_latent_dim=attention.query_latent_dim,
            element_bytes=size,
        )
    return attention_kept(
        rows,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        value_dim=attention.value_dim,
        element_bytes=size,
        rope=bool(attention.rotary_dim),
        qk_norm=norm if attention.qk_norm else None,
    )


def _feed_forward_kept(described: AnyFeedForward, rows: int, size: int) -> int:
    experts: list[tuple[FeedForward, int]]
    if isinstance(described, Experts):
        experts = [(described.expert, described.active * rows)]
        if described.shared is not None:
            experts.append((described.shared, rows))
    else:
        experts = [(described, rows)]
    return sum(
        feed_forward_kept(
            visits,
            expert.ffn_dim,
            gated=expert.gated,
            activation=expert.activation,
            element_bytes=size,
        )
        for expert, visits in experts
    )


def _rotation(attention: AnyAttention) -> tuple[int, bool]:
    """Rotated lanes, and whether they turn in neighboring pairs, as latent attention's do."""
    if isinstance(attention, LatentAttention):
        return attention.rope_dim, True
    return attention.rotary_dim, False


def _ends_kept(model: Model, tokens: int, batch: int, size: int) -> int:
    """Below and above the layers: ids, positions, outer norms, what the head reads, the loss."""
    rows, width = batch * tokens, model.embed_dim
    norm = _KEPT_NORMS[model.norm]
    kept = embedding_kept(rows, element_bytes=size) if model.vocab else 0
    kept += embedding_kept(rows, element_bytes=size) if model.types else 0
    kept += learned_positions_kept(tokens) if model.positions else 0
    outer = model.embedding_norm + model.final_norm
    kept += outer * norm_kept(rows, width, norm, size)
    if model.head and model.vocab:
        kept += head_kept(rows, width, model.vocab, softcap=model.capped_logits, element_bytes=size)
        kept += cross_entropy_kept(rows, model.vocab, size)
    return kept
