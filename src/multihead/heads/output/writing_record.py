"""What a forward pass leaves for `writing`: of each layer q, k, v, lse and where its heads write.

Nothing is taken for granted: that a layer's output projection reads its heads side by side, that
the stream is the sum of what is written to it, and that logits are the head of the last norm are
all measured on the pass itself, and what does not hold is refused.

Shape suffixes: h head, q query row, v width of a value, c width of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ModelError
from ...models import LanguageModel
from ...nn import Pruned
from ...ops.problem import Problem
from ..forward import LayerObserver
from ..watching.numbers import heads_before, pruned_layers
from .linear_norm import TOLERANCES, LinearNorm, linear_norm, relative_error
from .places import Rows, row_index

_OUT_PROJECTIONS = ("out_proj", "o_proj", "c_proj", "dense", "wo", "Wo")
_FEED_FORWARDS = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
_NORMS_BEHIND = (  # of attention, of the feed-forward
    ("attention_out_norm", "feed_forward_out_norm"),
    ("post_attention_layernorm", "post_feedforward_layernorm"),
)
_UNKNOWN = "the parts of its layers are not known (BERT and its like norm the sum, post-norm)"
_LAST_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")


@dataclass(eq=False)
class WritingLayer:
    """One layer: its call of attention, and how its heads enter the stream.

    `lse` [H, Lq] is its log-sum-exp, `heads` [H, Lq, Dv] what the heads gave, `weight` [H, Dv, C]
    the rows of the output projection that each head meets, `bias` [C]. `before` says which heads
    the layer had before some were pruned; the tables here are of those that are left. `norm` stands
    between the projection and the stream in sandwich-normed layers. `adds` tells why the stream is
    not the sum of what is written, if it is not.
    """

    name: str
    problem: Problem
    lse: Tensor
    heads: Tensor
    before: Pruned
    weight: Tensor | None = None
    bias: Tensor | None = None
    norm: LinearNorm | None = None
    adds: str | None = _UNKNOWN
    error: float = 0.0

    def places(self, rows: Rows) -> Tensor:
        """Queries as int64 indices."""
        return row_index(rows, self.problem.query_length, self.heads.device)

    def at_first_numbers(self, table: Tensor) -> Tensor:
        """A table [H, ...] with zeros for the heads that are gone."""
        if not self.before.heads:
            return table
        whole = table.new_zeros(self.before.num_heads, *table.shape[1:])
        whole[list(self.before.kept)] = table
        return whole


class WritingRecorder(LayerObserver):
    """Keeps every layer of one pass over one text."""

    def __init__(self, model: nn.Module, length: int) -> None:
        super().__init__((1, length))
        self.kept: list[WritingLayer] = []
        self._modules = dict(model.named_modules())
        self._blocks: list[_Block] = []
        self._pruned = pruned_layers(model)

    def wants(self, problem: Problem) -> tuple[str, ...]:
        return ("lse",)

    def record(self, problem: Problem, out: Tensor, stats: Mapping[str, Tensor]) -> None:
        number = self.next_layer(problem)
        name = self.layers[number]
        projection = _out_projection(self._modules, name)
        before = heads_before(self._pruned.get(name), problem.heads)
        heads = out[0].to(problem.compute_dtype)
        layer = WritingLayer(name, problem, stats["lse"][0], heads, before)
        self.kept.append(layer)
        block = self._blocks[-1] if self._blocks else None
        if block is not None:
            block.layers.append(layer)

        def project(module: nn.Module, inputs: Any, output: Tensor) -> None:
            handle.remove()
            _project(layer, module, inputs[0][0], output[0])
            if block is not None:
                block.projected = output[0]

        handle = projection.register_forward_hook(project)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Measure, inside the block, whether each layer's output is the sum of what it writes."""
        handles = []
        for parent in self._modules.values():
            if isinstance(parent, nn.ModuleList):
                for module in parent:
                    handles += self._hooks_of(module)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hooks_of(self, module: nn.Module) -> list[Any]:
        feed_forward = next((name for name in _FEED_FORWARDS if hasattr(module, name)), None)
        if feed_forward is None:
            return []
        behind = next(
            (pair for pair in _NORMS_BEHIND if getattr(module, pair[1], None) is not None), None
        )

        def enter(module: nn.Module, inputs: Any, keywords: Mapping[str, Any]) -> None:
            x = inputs[0] if inputs else keywords.get("hidden_states", keywords.get("x"))
            self._blocks.append(_Block(type(module).__name__, x, behind is not None))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self._blocks.pop().check(_tensor(output))

        def keep(what: str, module: nn.Module, inputs: Any, output: Any) -> None:
            if self._blocks:
                self._blocks[-1].parts[what] = (module, inputs[0], _tensor(output))

        handles = [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
            getattr(module, feed_forward).register_forward_hook(partial(keep, "feed_forward")),
        ]
        for what, name in zip(("norm", "feed_forward_norm"), behind or (), strict=False):
            handles.append(getattr(module, name).register_forward_hook(partial(keep, what)))
        return handles


@dataclass(eq=False)
class _Block:
    """A layer of the model while it runs: what entered, what its parts gave."""

    name: str
    entered: Any
    sandwiched: bool
    layers: list[WritingLayer] = field(default_factory=list)
    parts: dict[str, tuple[nn.Module, Tensor, Tensor]] = field(default_factory=dict)
    projected: Tensor | None = None

    def check(self, left: Any) -> None:
        """Compare what left with the sum of what was written; sets `norm` and `adds`."""
        if len(self.layers) != 1:
            return
        [layer] = self.layers
        last = "feed_forward_norm" if self.sandwiched else "feed_forward"
        known = {last, "norm"} if self.sandwiched else {last}
        if not (known <= self.parts.keys() and isinstance(self.entered, Tensor)):
            layer.adds = f"{self.name} has parts that are not known"
            return
        written = self.projected
        if self.sandwiched:
            norm, read, gave = self.parts["norm"]
            layer.norm = linear_norm(norm, read[0], gave[0], layer.problem.compute_dtype)
            written = gave[0]
        assert written is not None
        dtype = layer.problem.compute_dtype
        total = self.entered[0].to(dtype) + written.to(dtype) + self.parts[last][2][0].to(dtype)
        error = relative_error(total, left[0].to(dtype))
        layer.adds = None
        if error > TOLERANCES[left.dtype]:
            layer.adds = (
                f"{self.name} gives another result than the sum of its input, its attention and "
                f"its feed-forward (off by {error:.1e} of a row's size): it norms or scales the sum"
            )


@dataclass(frozen=True, eq=False)
class Unembedding:
    """From the stream to logits: the last norm, and the head's matrix [V, C] and bias [V].

    `hidden` [Lq, C] is what the head read.
    """

    norm: LinearNorm
    weight: Tensor
    bias: Tensor | None
    hidden: Tensor

    def places(self, rows: Rows) -> Tensor:
        """Queries as int64 indices."""
        return row_index(rows, len(self.hidden), self.hidden.device)


def layer_output(layer: WritingLayer) -> Tensor:
    """The sum of what the heads of a layer and its bias give: [Lq, C], before a norm behind."""
    assert layer.weight is not None
    out_qc = layer.heads.transpose(0, 1).flatten(1) @ layer.weight.flatten(0, 1)
    return out_qc if layer.bias is None else out_qc + layer.bias


def _out_projection(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    """The linear layer behind the attention of the module `name`."""
    attention = modules.get(name)
    parent = modules.get(name.rpartition(".")[0])
    places = (attention, getattr(parent, "output", None))  # BERT's stands beside its attention
    for place in places:
        for projection in _OUT_PROJECTIONS:
            found = getattr(place, projection, None)
            if isinstance(found, nn.Module) and isinstance(getattr(found, "weight", None), Tensor):
                return found
    raise ModelError(
        f"{type(attention).__name__} ({name}) has no output projection that is known "
        f"({', '.join(_OUT_PROJECTIONS)}), so what its heads write cannot be told."
    )


def _project(layer: WritingLayer, module: nn.Module, read: Tensor, wrote: Tensor) -> None:
    """Give the layer its part of the projection, which read [Lq, H Dv] and wrote [Lq, C]."""
    dtype = layer.problem.compute_dtype
    heads, _, value_dim = layer.heads.shape
    given = layer.heads.transpose(0, 1).flatten(1)
    if read.shape != given.shape or relative_error(given, read) > TOLERANCES[read.dtype]:
        raise ModelError(
            f"{layer.name} does not pass its heads to the output projection as they are (it gates, "
            "norms or mixes them), so what each head writes is not one matrix of its output."
        )
    weight: Any = module.weight
    weight_ic = weight if hasattr(module, "nf") else weight.T  # GPT-2's Conv1D has [in, out]
    layer.weight = (
        weight_ic.detach().to(dtype).reshape(heads, value_dim, -1 if heads else wrote.shape[-1])
    )
    bias: Any = getattr(module, "bias", None)
    layer.bias = None if bias is None else bias.detach().to(dtype)
    layer.error = relative_error(layer_output(layer), wrote.to(dtype))
    if layer.error > TOLERANCES[wrote.dtype]:
        raise ModelError(
            f"{layer.name}: what the heads write sums to another result than its output projection "
            f"gave (off by {layer.error:.1e} of a row's size), so it is no plain linear layer."
        )


@contextmanager
def last_norm(model: Any) -> Iterator[dict[str, Any]]:
    """Keep, inside the block, what the model's last norm reads and gives; see `unembedding`."""
    kept: dict[str, Any] = {}
    norm = model.norm if isinstance(model, LanguageModel) else _last_norm(model)
    if norm is None:
        yield kept
        return

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        kept.update(norm=module, read=inputs[0], gave=output)

    handle = norm.register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


def unembedding(model: Any, kept: Mapping[str, Any], logits: Tensor, dtype: torch.dtype) -> Any:
    """The model's `Unembedding`, or the reason, a string, why it has none that is known."""
    ours = isinstance(model, LanguageModel)
    head = model.head if ours else _head(model)
    if head is None or "norm" not in kept:
        return f"{type(model).__name__} has no last norm and head that are known"
    gave = kept["gave"][0]
    try:
        norm = linear_norm(kept["norm"], kept["read"][0], gave, dtype)
    except ModelError as refusal:
        return str(refusal).rstrip(".")
    bias = None if head.bias is None else head.bias.detach().to(dtype)
    found = Unembedding(norm, head.weight.detach(), bias, gave)
    last = head.forward(gave[-1:])
    config = model.config if ours else model.config.get_text_config()
    cap = getattr(config, "logit_softcap" if ours else "final_logit_softcapping", None)
    if cap is not None:
        last = cap * torch.tanh(last / cap)
    error = relative_error(last, logits[0, -1:])
    if error > TOLERANCES[logits.dtype]:
        return (
            f"{type(model).__name__} changes its logits behind the head (they differ by "
            f"{error:.1e} of their size)"
        )
    return found


def _last_norm(model: Any) -> nn.Module | None:
    base = getattr(model, "base_model", None)
    for place in (base, getattr(base, "decoder", None)):
        for name in _LAST_NORMS:
            norm = getattr(place, name, None)
            if isinstance(norm, nn.Module):
                return norm
    return None


def _head(model: Any) -> nn.Linear | None:
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    return head if isinstance(head, nn.Linear) else None


def _tensor(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output
