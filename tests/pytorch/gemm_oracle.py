# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Float64 oracles for the GEMM modules: the same quantized operands, products in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_dispatch.numerics.quantizers import DelayedQuantizer

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}


def frozen(quantizer: Any) -> Any:
    """The quantizer as it is now: a delayed one keeps its scale and records nothing."""
    if isinstance(quantizer, DelayedQuantizer):
        return dataclasses.replace(quantizer, scale=quantizer.scale.clone(), amax=None)
    return quantizer


def seen_by_gemm(x: torch.Tensor, quantizer: Any, usage: str) -> torch.Tensor:
    """What a GEMM that reads the copy `usage` of the cast x multiplies with, in float64."""
    return ops.dequantize(ops.quantize(x.detach(), quantizer, usage=usage), dtype=torch.float32).double()


def product_bound(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bound on the error of the product a @ b (given in float64) computed in float32 and rounded to `dtype`.

    Products of 8-bit values are exact in float32. A sum of k terms in any order, with one more rounding for each of
    two scales, is off by at most (k + 2) u sum |a||b| with u = 2^-24 (Higham, Accuracy and Stability, 4.2); the
    result is rounded once, by at most u_dtype of its magnitude, or half the smallest subnormal.
    """
    k = a.shape[-1]
    magnitude = a.abs() @ b.abs()
    info = torch.finfo(dtype)
    return (k + 2) * 2.0**-24 * magnitude + info.eps / 2 * magnitude + info.smallest_normal * info.eps


def assert_within(got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    assert got.shape == expected.shape, f"{tuple(got.shape)} != {tuple(expected.shape)}"
    if not got.numel():
        return
    error = (got.double() - expected).abs()
    assert (error <= bound).all(), f"off by {error.max():.3e}, bound exceeded by {(error - bound).max():.3e}"
