"""Results over disjoint keys joined into one: keys that lie on several devices, or in parts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError, DeviceError, DtypeError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """The attention of queries over two disjoint sets of keys, from what each set gave.

        a = mh.attention_with_stats(query, key[:, :, :n], value[:, :, :n], stats=("lse",))
        b = mh.attention_with_stats(query, key[:, :, n:], value[:, :, n:], stats=("lse",))
        out, lse = mh.merge_attention(a.out, a.lse, b.out, b.lse)

    The softmax over all keys is that of each part, weighted by e^lse (Dao et al. 2022,
    FlashAttention, section 3.1; Milakov and Gimelshein 2018). Merging may go on with further
    parts, in any order, up to rounding. Sinks belong to no part: compute the parts without them.
    Masks of the parts need a frame that says where their keys stand, such as `Positions`.

    Args:
        out_a, out_b: [B, H, Lq, Dv], of one dtype.
        lse_a, lse_b: [B, H, Lq], natural log, float32 or float64: -inf where a row saw no key.

    Returns:
        out [B, H, Lq, Dv] in the outputs' dtype and lse [B, H, Lq] in that of lse, computed in
        float32 (float64 if an argument is), differentiable. A part that saw no key changes
        nothing; rows of two such parts are zeros and -inf, with zero gradients.

    Raises:
        ArgumentError: shapes that do not fit.
        DtypeError: outputs of two dtypes, or no floats.
        DeviceError: tensors on different devices.
    """
    _check(out_a, lse_a, out_b, lse_b)
    wide = torch.promote_types(torch.promote_types(out_a.dtype, lse_a.dtype), torch.float32)
    a, b = lse_a.to(wide), lse_b.to(wide)
    # As a constant: what its gradient adds cancels.
    largest = torch.maximum(a, b).detach()
    nothing = largest == -torch.inf
    largest = largest.masked_fill(nothing, 0.0)
    share_a, share_b = (a - largest).exp(), (b - largest).exp()
    total = (share_a + share_b).masked_fill(nothing, 1.0)
    out = _part(out_a, share_a / total, a) + _part(out_b, share_b / total, b)
    lse = (largest + total.log()).masked_fill(nothing, -torch.inf)
    return out.to(out_a.dtype), lse.to(lse_a.dtype)


def _part(out: Tensor, share: Tensor, lse: Tensor) -> Tensor:
    """A part's output times its share of the softmax; nothing, whatever it holds, of no key."""
    empty = (lse == -torch.inf)[..., None]
    return out.to(share.dtype).masked_fill(empty, 0.0) * share[..., None]


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    named = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise DtypeError(f"{name} must be a tensor; got {type(x).__name__}.")
        allowed = _DTYPES if name.startswith("out") else (torch.float32, torch.float64)
        if x.dtype not in allowed:
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise DtypeError(f"{name} must be one of {expected}; got {x.dtype}.")
        if x.device != out_a.device:
            raise DeviceError(
                f"{name} is on {x.device}, out_a on {out_a.device}; move one of them."
            )
    if out_a.dtype != out_b.dtype or lse_a.dtype != lse_b.dtype:
        a, b = ("out_a", "out_b") if out_a.dtype != out_b.dtype else ("lse_a", "lse_b")
        raise DtypeError(
            f"{a} is {named[a].dtype} and {b} is {named[b].dtype}; both parts must be of one dtype."
        )
    if out_a.ndim != 4:
        raise ArgumentError(f"out_a must be [B, H, Lq, Dv]; got {list(out_a.shape)}.")
    for name, shape in (
        ("lse_a", out_a.shape[:3]),
        ("out_b", out_a.shape),
        ("lse_b", out_a.shape[:3]),
    ):
        if named[name].shape != shape:
            raise ArgumentError(
                f"{name} must be {list(shape)}, as out_a is {list(out_a.shape)}; got "
                f"{list(named[name].shape)}."
            )
