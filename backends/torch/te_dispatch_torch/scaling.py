# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scale arithmetic: amax, and the scales of current, block, MXFP8 and NVFP4 casts. All fp32, rounded to nearest.

Divisions are tensor by tensor: PyTorch turns `number / tensor` into a reciprocal and a product, and on a GPU
`tensor / number` likewise, which rounds twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_FP32_MAX = torch.finfo(torch.float32).max


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """max |x| as float32 (1,): NaN ignored, Inf kept, 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((1,), dtype=torch.float32, device=x.device)
    # aminmax needs one pass and no |x| in memory.
    low, high = torch.aminmax(_without_nan(x))
    return torch.maximum(-low, high).to(torch.float32).abs_().reshape(1)


def _without_nan(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=math.inf, neginf=-math.inf)


def block_amax(x: torch.Tensor, dim: int | Sequence[int]) -> torch.Tensor:
    """max |x| over dimensions, kept as size 1: float32, NaN ignored."""
    return _without_nan(x).abs_().amax(dim, keepdim=True).to(torch.float32)


def scale_from_amax(amax: torch.Tensor, max_value: float, epsilon: float, power_of_two: bool) -> torch.Tensor:
    """RN32(max_value / max(amax, epsilon)); 1 where that amax is 0, Inf or NaN; the largest fp32 instead of Inf."""
    if epsilon > 0.0:
        amax = amax.clamp_min(epsilon)
    scale = torch.full_like(amax, max_value) / amax
    scale = scale.clamp_max(_FP32_MAX)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    usable = (amax > 0) & (amax < math.inf)
    return torch.where(usable, scale, 1.0)


def e8m0_from_amax(amax: torch.Tensor, max_value: float) -> torch.Tensor:
    """E8M0 codes (uint8) of ceil(log2(RN32(amax / max_value))), clamped to [00, FE]; Inf gives FE, NaN FF."""
    ratio = amax / torch.full_like(amax, max_value)
    bits = ratio.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # A subnormal ratio is below 2^-126: it needs code 1 beyond 2^-127 (mantissa 0x400000), else code 0.
    up = mantissa > torch.where(exponent == 0, 0x400000, 0)
    code = (exponent + up).clamp_max(254)
    return torch.where(torch.isnan(amax), 255, code).to(torch.uint8)


def e8m0_inverse(codes: torch.Tensor) -> torch.Tensor:
    """2^(127 - code) as float32, what values are multiplied by; NaN for FF."""
    wide = codes.to(torch.int32)
    bits = torch.where(wide == 254, 0x00400000, (254 - wide) << 23)
    return torch.where(wide == 255, 0x7FC00000, bits).view(torch.float32)
