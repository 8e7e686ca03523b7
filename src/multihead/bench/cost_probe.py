"""A pass of a model in a process of its own: what it took, and how fast its pieces run there.

`python -m multihead.bench.cost_probe KIND TOKENS DTYPE THREADS SECONDS (full|quick)`

Prints one JSON object. Memory comes first, before anything else has run; then the pass takes turns
with its pieces at one calibration length, so that both meet the same noise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multihead.bench.resident import lowered_peak, peak
from multihead.bench.timing import alternate
from multihead.masks import Causal
from multihead.models import BlockConfig, LanguageModel, LanguageModelConfig
from multihead.models.blocks import build_block
from multihead.nn import RoPE
from multihead.nn.norm import RMSNorm
from multihead.ops import attention

PREFILL, DECODE, TRAIN = "prefill", "decode", "train"

COLD_LAYERS = 12
"""How many layers' weights one row is multiplied with, to see the rate at which they are read."""

_WARM_TOKENS = 3

Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """The model, and how many tokens its pieces are timed on: at inference, trained, and cached."""

    model: LanguageModelConfig
    calibration: int
    trained_calibration: int
    cold_keys: int

    @property
    def block(self) -> BlockConfig:
        """A layer of the model; all are alike."""
        return self.model.layers[0]

    @property
    def layers(self) -> int:
        """How many the model has."""
        return len(self.model.layers)


def _shape(
    vocab_size: int, layers: int, block: BlockConfig, calibration: tuple[int, int, int]
) -> Shape:
    return Shape(LanguageModelConfig(vocab_size, (block,) * layers), *calibration)


_ROPE = RoPE(100000.0)

# SmolLM2-135M's sizes; and small ones, to see that everything works.
FULL = _shape(49152, 30, BlockConfig(576, 9, 1536, 3, rope=_ROPE), (1024, 512, 65536))
QUICK = _shape(307, 2, BlockConfig(48, 3, 64, 1, rope=_ROPE), (48, 24, 512))


def probe(
    kind: str, tokens: int, dtype: torch.dtype, seconds: float, shape: Shape
) -> dict[str, Any]:
    """Bytes that the pass grew this process by; with `seconds`, its time and that of its pieces."""
    torch.manual_seed(0)
    make = {PREFILL: _prefill, DECODE: _decode, TRAIN: _train}[kind]
    make(_WARM_TOKENS, dtype, QUICK)()  # what the first call of a process brings stays out
    before = lowered_peak()
    call = make(tokens, dtype, shape)
    lowered_peak()  # a tied head's own matrix came and went
    call()
    after = peak()
    if before is None or after is None:
        return {"not_measurable": "The system does not tell the peak of a process."}
    found: dict[str, Any] = {"base_bytes": before, "grown_bytes": after - before}
    if not seconds:
        return found
    pieces = _pieces_of(kind, dtype, shape)
    times = alternate({"pass": call, **pieces}, seconds=seconds, least=3)
    return found | {
        "time": times.pop("pass").to_json(),
        "pieces": {name: timing.median for name, timing in times.items()},
    }


def _prefill(tokens: int, dtype: torch.dtype, shape: Shape) -> Call:
    model = _model(dtype, shape)
    ids = torch.randint(shape.model.vocab_size, (1, tokens))

    @torch.inference_mode()
    def call() -> Tensor:
        logits: Tensor = model(ids, caches=model.make_caches(), rows="last")
        return logits

    return call


def _decode(tokens: int, dtype: torch.dtype, shape: Shape) -> Call:
    """One step behind `tokens` random keys and values; each call steps again."""
    model, block = _model(dtype, shape), shape.block
    caches = model.make_caches()
    for cache in caches:
        key, value = (
            torch.randn(1, block.kv_heads, tokens, block.width, dtype=dtype) for _ in "kv"
        )
        cache.update(key, value)
    ids = torch.randint(shape.model.vocab_size, (1, 1))

    @torch.inference_mode()
    def call() -> Tensor:
        logits: Tensor = model(ids, caches=caches)
        for cache in caches:
            cache.crop(tokens)
        return logits

    return call


def _train(tokens: int, dtype: torch.dtype, shape: Shape) -> Call:
    """One layer, forward and backward."""
    block = build_block(shape.block).to(dtype)
    x, grad = (torch.randn(1, tokens, shape.block.embed_dim, dtype=dtype) for _ in "xg")
    x.requires_grad_()

    def call() -> None:
        x.grad = None
        block.zero_grad()
        block(x, mask=Causal()).backward(grad)

    return call


def _model(dtype: torch.dtype, shape: Shape) -> LanguageModel:
    return LanguageModel(shape.model).to(dtype).eval()


def _pieces_of(kind: str, dtype: torch.dtype, shape: Shape) -> dict[str, Call]:
    if kind == TRAIN:
        return _layer_pieces(shape.trained_calibration, dtype, shape, trains=True)
    head = nn.Linear(shape.block.embed_dim, shape.model.vocab_size, bias=False).to(dtype)
    last = {"head": _timed(head, torch.randn(1, 1, shape.block.embed_dim, dtype=dtype))}
    if kind == PREFILL:
        return last | _layer_pieces(shape.calibration, dtype, shape, trains=False)
    return last | _step_pieces(dtype, shape)


def _step_pieces(dtype: torch.dtype, shape: Shape) -> dict[str, Call]:
    """One row's products with other layers' weights, one query on many keys, and calls alone.

    Weights and keys are more than a cache holds; the calls are those of a step of as many layers
    that move next to nothing.
    """
    block = shape.block
    width, ffn = block.embed_dim, block.ffn_dim
    queries, both = block.num_heads * block.width, 2 * block.kv_heads * block.width
    sizes = [(width, queries + both), (queries, width), (width, 2 * ffn), (ffn, width)]
    sets = [nn.Linear(*it, bias=False, dtype=dtype) for _ in range(COLD_LAYERS) for it in sizes]
    rows = [torch.randn(1, 1, layer.in_features, dtype=dtype) for layer in sets]

    def products(*rows: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(row) for layer, row in zip(sets, rows, strict=True))

    query = torch.randn(1, block.num_heads, 1, block.width, dtype=dtype)
    kv = [torch.randn(1, block.kv_heads, shape.cold_keys, block.width, dtype=dtype) for _ in "kv"]
    narrow = replace(shape.model, vocab_size=7, layers=QUICK.model.layers[:1] * shape.layers)
    return {
        "products": _timed(products, *rows),
        "keys": _timed(attention, query, *kv),
        "calls": _decode(1, dtype, replace(shape, model=narrow)),
    }


def _layer_pieces(
    tokens: int, dtype: torch.dtype, shape: Shape, *, trains: bool
) -> dict[str, Call]:
    """The parts of a layer on `tokens` tokens, each by itself: forward, or backward too."""
    block = shape.block
    width, ffn, head_dim = block.embed_dim, block.ffn_dim, block.width
    queries, keys = block.num_heads * head_dim, block.kv_heads * head_dim

    def numbers(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, requires_grad=trains)

    def linear(inputs: int, outputs: int) -> Call:
        layer = nn.Linear(inputs, outputs, bias=False).to(dtype)
        return _timed(layer, numbers(1, tokens, inputs), parameters=list(layer.parameters()))

    others = _Others(block).to(dtype)
    heads = (block.num_heads, block.kv_heads, block.kv_heads)
    return {
        "qkv": linear(width, queries + 2 * keys),
        "o": linear(queries, width),
        "up": linear(width, 2 * ffn),
        "down": linear(ffn, width),
        "attention": _timed(
            lambda *qkv: attention(*qkv, mask=Causal()),
            *(numbers(1, h, tokens, head_dim) for h in heads),
        ),
        "others": _timed(
            others,
            numbers(1, tokens, width),
            numbers(1, block.num_heads + block.kv_heads, tokens, head_dim),
            numbers(1, tokens, 2 * ffn),
            parameters=list(others.parameters()),
        ),
    }


class _Others(nn.Module):
    """What a layer does beside products: norms, rotation, gate, residual sums."""

    def __init__(self, block: BlockConfig) -> None:
        super().__init__()
        assert block.rope is not None
        self.rope, self.head_dim = block.rope, block.width
        self.norms = nn.ModuleList(RMSNorm(block.embed_dim) for _ in range(2))

    def forward(self, x: Tensor, both_bhld: Tensor, hidden_blf: Tensor) -> tuple[Tensor, ...]:
        rotation = self.rope.rotation(torch.arange(x.shape[1]), self.head_dim)
        turned = rotation.apply(both_bhld)
        gate, up = hidden_blf.chunk(2, dim=-1)
        for norm in self.norms:
            x = x + norm(x)
        if gate.requires_grad:
            return x, turned, F.silu(gate) * up
        return x, turned, F.silu(gate).mul_(up)


def _timed(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    *inputs: Tensor,
    parameters: Sequence[Tensor] = (),
) -> Call:
    """The function at inference; forward and backward where its inputs want gradients."""
    if not any(it.requires_grad for it in inputs):
        return torch.inference_mode()(lambda: function(*inputs))
    results = function(*inputs)
    results = (results,) if isinstance(results, Tensor) else results
    grads = [torch.randn_like(it) for it in results]

    def both() -> None:
        for it in (*inputs, *parameters):
            it.grad = None
        results = function(*inputs)
        torch.autograd.backward((results,) if isinstance(results, Tensor) else results, grads)

    return both


def main(arguments: Sequence[str]) -> None:
    """Measure as the command line says, and print what was found."""
    kind, tokens, dtype, threads, seconds, size = arguments
    torch.set_num_threads(int(threads))
    shape = FULL if size == "full" else QUICK
    found = probe(kind, int(tokens), getattr(torch, dtype), float(seconds), shape)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
