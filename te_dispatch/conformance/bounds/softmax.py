# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scaled and masked softmax as values known within a bound."""

from __future__ import annotations

import torch

from te_dispatch.conformance.bounds import U32
from te_dispatch.conformance.bounds.elementary import TWO_ULP
from te_dispatch.conformance.bounds.known import FLUSH, Known, gamma


def forward(x: torch.Tensor, masked: torch.Tensor | None, scale: float) -> Known:
    """y_i = w_i / sum w with w_i = exp(z_i - max z) and z = scale x.

    scale is rounded to fp32 and so is the product: z errs by 2 u32 |z|, the difference by one rounding more, and where
    exp is taken as 2^(z log2 e) that product is rounded too. An absolute error of exp's argument is a relative one of
    w: delta_i = 3 u32 (|z_i| + |max z|) + 2 ulp of exp. The quotient's relative error is delta_i plus the mean of all
    delta_j under the weights y_j, plus gamma(n) of the sum of n terms of one sign, plus the division. Weights below the
    normal range may be lost. Masked entries are 0 exactly.
    """
    z = scale * x.double()
    if masked is not None:
        z = torch.where(masked, -torch.inf, z)
    top = z.amax(-1, keepdim=True) if z.numel() else z
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.exp(z - top)
    total = weights.sum(-1, keepdim=True)
    y = weights / torch.where(total == 0, 1.0, total)
    present = z != -torch.inf
    delta = torch.where(present, 3 * U32 * (torch.where(present, z, 0.0).abs() + top.abs()) + TWO_ULP, 0.0)
    mean_delta = (y * delta).sum(-1, keepdim=True)
    relative = torch.expm1(delta + mean_delta) + gamma(z.shape[-1] + 4)
    return Known(y, torch.where(present, relative * y + 2 * FLUSH, 0.0))


def backward(dy: torch.Tensor, y: torch.Tensor, scale: float) -> Known:
    """dx = scale y (dy - sum_j dy_j y_j), or y dy - y sum, whose terms are rounded apart."""
    grad, value = Known.read(dy), Known.read(y)
    product = grad * value
    total = product.sum(-1, keepdim=True)
    return (product - value * total).rounded() * scale
