"""The suite `layer`: one layer at inference, projections included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multihead.bench.case import Case, Entry
from multihead.bench.contest import OURS, TORCH, Contestant, Field, Setting, measure
from multihead.bench.suites.row import Row, of_case
from multihead.bench.timing import alternate
from multihead.bench.verify import SAMPLED_ROWS, Expected, rounding_of
from multihead.nn import MultiHeadAttention, prepack
from multihead.ops import attention

LINEAR_SDPA = "torch linear + SDPA"
UNPACKED = f"{OURS} unpacked"

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class LayerCase(Case):
    """A layer on [batch, queries, heads * width], with biases; keys are its own tokens."""

    @property
    def embed_dim(self) -> int:
        """The width of the layer."""
        return self.heads * self.width

    @property
    def name(self) -> str:
        """What `--only` looks into."""
        return f"{self.kind}-{self.keys}-{self.embed_dim}-{self.heads}h-{self.dtype_name}"

    @property
    def operations(self) -> int:
        """Those of attention and of the four projections."""
        return super().operations + 8 * self.batch * self.queries * self.embed_dim**2


def rows(*, quick: bool) -> list[Row]:
    """2048 tokens, 768 wide, 12 heads, in float32 and bfloat16."""
    tokens, heads, width = (96, 3, 16) if quick else (2048, 12, 64)
    return [
        of_case(
            LayerCase("layer", dtype, tokens, tokens, heads=heads, kv_heads=heads, width=width),
            _measure,
        )
        for dtype in _DTYPES
    ]


def _measure(case: Case, setting: Setting) -> Entry:
    case = cast(LayerCase, case)
    generator = torch.Generator().manual_seed(case.keys)
    x = torch.randn(case.batch, case.queries, case.embed_dim, generator=generator).to(case.dtype)
    theirs = _module(case, generator)
    ours = MultiHeadAttention.from_torch(theirs, cross=False)
    unpacked = MultiHeadAttention.from_torch(theirs, cross=False)
    packed = prepack(ours)
    packs = packed.serves(case.batch * case.queries)
    if not packs:
        packed.undo()
    calls: dict[str, Callable[[], Tensor]] = {
        OURS: lambda: ours(x),
        TORCH: lambda: theirs(x, x, x, need_weights=False)[0],
        LINEAR_SDPA: partial(_linear_sdpa, theirs, x),
    }
    if packs:
        calls[UNPACKED] = lambda: unpacked(x)
    contestants = {name: Contestant(call, partial(_as_heads, call)) for name, call in calls.items()}
    entry = measure(case, Field(contestants), _expect(theirs, x), setting)
    entry["packed_bytes"] = packed.nbytes if packs else 0
    return entry | {"shares": _shares(ours, x, setting, entry["times"][OURS]["median"])}


def _module(case: LayerCase, generator: torch.Generator) -> nn.MultiheadAttention:
    """torch's layer in eval mode, its weights so wide that attention is far from flat."""
    module = nn.MultiheadAttention(case.embed_dim, case.heads, batch_first=True)
    with torch.no_grad():
        for parameter in module.parameters():
            width = 1.5 / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 0.1
            parameter.normal_(0, width, generator=generator)
    return module.to(case.dtype).eval()


def _linear_sdpa(module: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """The layer as it is written today: two linear functions around torch's attention."""
    batch, length, width = x.shape
    projected = F.linear(x, module.in_proj_weight, module.in_proj_bias)
    query, key, value = (
        part.view(batch, length, module.num_heads, -1).transpose(1, 2)
        for part in projected.chunk(3, dim=-1)
    )
    heads = F.scaled_dot_product_attention(query, key, value)
    joined = heads.transpose(1, 2).reshape(batch, length, width)
    return F.linear(joined, module.out_proj.weight, module.out_proj.bias)


def _as_heads(call: Callable[[], Tensor]) -> Tensor:
    """The result as attention's would be, of one head: [B, 1, L, C]."""
    return call()[:, None]


def _expect(module: nn.MultiheadAttention, x: Tensor) -> Expected:
    """Sampled rows of the layer's formula in float64, and what torch makes of them in the dtype."""
    rows = torch.linspace(0, x.shape[1] - 1, min(SAMPLED_ROWS, x.shape[1])).long()
    values = _formula(module, x, rows, torch.float64)
    plain = _formula(module, x, rows, x.dtype)
    return Expected(
        rows, values, rounding_of(values, x.dtype), float((plain - values).abs().max().item())
    )


def _formula(module: nn.MultiheadAttention, x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    weights = module.in_proj_weight.detach().to(dtype).chunk(3)
    biases = module.in_proj_bias.detach().to(dtype).chunk(3)
    query, key, value = (
        F.linear(part, weight, bias).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for part, weight, bias in zip((x[:, rows], x, x), weights, biases, strict=True)
    )
    scores = query @ key.mT * query.shape[-1] ** -0.5
    joined = (torch.softmax(scores, dim=-1) @ value).transpose(1, 2).flatten(2)
    out = module.out_proj
    return F.linear(joined, out.weight.detach().to(dtype), out.bias.detach().to(dtype))[:, None]


def _shares(layer: MultiHeadAttention, x: Tensor, setting: Setting, whole: float) -> dict[str, Any]:
    """What of the layer's time its parts take by themselves; what is left moves numbers."""
    heads, width = layer.num_heads, layer.head_dim
    with torch.inference_mode():
        query, key, value = (
            part.unflatten(-1, (heads, width)).transpose(1, 2)
            for part in layer.qkv_proj(x).chunk(3, dim=-1)
        )
        times = alternate(
            {
                "projections": lambda: (layer.qkv_proj(x), layer.out_proj(x)),
                "attention": lambda: attention(query, key, value),
            },
            seconds=setting.seconds,
        )
    return {name: timing.median / whole for name, timing in times.items()}
