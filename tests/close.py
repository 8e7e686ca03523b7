"""The one tolerance: an error may be a small multiple of what plain torch makes in that dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_close(
    actual: Tensor,
    expected: Tensor,
    baseline: Tensor,
    *,
    factor: float = 2.0,
    what: str = "result",
) -> None:
    """Assert `max |actual - expected| <= factor * max |baseline - expected|`.

    `expected` is the answer in float64, `baseline` what plain torch operations give in `actual`'s
    dtype. One rounding of the dtype at the largest expected magnitude is allowed on top, since a
    baseline can be exact by luck. Shapes must match; NaN and infinities must coincide.
    """
    assert actual.shape == expected.shape, f"{what}: {actual.shape} instead of {expected.shape}"
    assert baseline.shape == expected.shape, f"{what}: the baseline has {baseline.shape}"
    actual, baseline, expected = actual.detach(), baseline.detach(), expected.detach()
    rounding = torch.finfo(actual.dtype).eps
    got, want, plain = actual.double(), expected.double(), baseline.double()
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN in other places"
    infinite = want.isinf()
    assert torch.equal(got.isinf(), infinite), f"{what}: infinities in other places"
    assert torch.equal(got[infinite], want[infinite]), f"{what}: infinities of another sign"
    finite = want.isfinite()
    if not bool(finite.any()):
        return
    usable = finite & plain.isfinite()
    assert bool(usable.any()), f"{what}: the baseline has no finite value to compare with"
    allowed = factor * float((plain - want)[usable].abs().max())
    allowed += rounding * float(want[finite].abs().max())
    error = float((got - want)[finite].abs().max())
    assert error <= allowed, f"{what}: error {error:.3e} is above {allowed:.3e}"


def float64_baseline(expected: Tensor, baseline_float32: Tensor) -> Tensor:
    """A baseline for float64 results: float32's error, scaled by the ratio of the roundings."""
    ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    error = (baseline_float32.double() - expected.double()) * ratio
    return expected.double() + error.nan_to_num()
