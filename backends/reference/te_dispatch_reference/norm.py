# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""LayerNorm and RMSNorm in float64."""

from __future__ import annotations

import numpy as np
import torch

from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import NormBackward, NormForward
from te_dispatch_reference import casts, host
from te_dispatch_reference.host import F64


def _factor(gamma: torch.Tensor, zero_centered: bool) -> F64:
    return host.double(gamma) + (1.0 if zero_centered else 0.0)


def _forward(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
    residual: torch.Tensor | None,
    quantizer: Quantizer | None,
    usage: str,
    with_y: bool,
    out_dtype: torch.dtype | None,
    centered: bool,
) -> NormForward:
    checks.norm_fwd(x, gamma, beta, eps, residual, quantizer, usage, out_dtype)
    residual_out = None
    values = host.double(x)
    if residual is not None:
        residual_out = host.result("residual_out", values + host.double(residual), x.dtype, x.device)
        values = host.double(residual_out)  # the norm sees the rounded sum, as its backward will
    with np.errstate(all="ignore"):
        mean = values.mean(-1, keepdims=True) if centered else np.zeros((*x.shape[:-1], 1))
        rstd = 1 / np.sqrt(((values - mean) ** 2).mean(-1, keepdims=True) + eps)
        y = (values - mean) * rstd * _factor(gamma, zero_centered_gamma)
        if beta is not None:
            y = y + host.double(beta)
        single = y.astype(np.float32)
    dtype = out_dtype or x.dtype
    made = None
    if quantizer is not None:
        made = casts.quantized(single, tuple(x.shape), quantizer, usage, dtype, x.device)
    return NormForward(
        host.result("y", y, dtype, x.device) if quantizer is None or with_y else None,
        made,
        residual_out,
        host.result("mean", mean[..., 0], torch.float32, x.device) if centered else None,
        host.result("rstd", rstd[..., 0], torch.float32, x.device),
    )


def layernorm_fwd(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_y: bool = False,
    out_dtype: torch.dtype | None = None,
) -> NormForward:
    return _forward(
        x, gamma, beta, eps, zero_centered_gamma, residual, quantizer, usage, with_y, out_dtype, centered=True
    )


def rmsnorm_fwd(
    x: torch.Tensor,
    gamma: torch.Tensor,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_y: bool = False,
    out_dtype: torch.dtype | None = None,
) -> NormForward:
    return _forward(
        x, gamma, None, eps, zero_centered_gamma, residual, quantizer, usage, with_y, out_dtype, centered=False
    )


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    zero_centered_gamma: bool,
    add: torch.Tensor | None,
    centered: bool,
) -> NormBackward:
    """With h = (x - mean) rstd and g = dy gamma: dx = rstd (g - mean(g) - h mean(g h)); RMSNorm lacks the mean(g)."""
    checks.norm_bwd(dy, x, gamma, mean, rstd, add, centered)
    with np.errstate(all="ignore"):
        inverse = host.double(rstd)[..., None]
        shift = 0.0 if mean is None else host.double(mean)[..., None]
        h = (host.double(x) - shift) * inverse
        grad = host.double(dy)
        g = grad * _factor(gamma, zero_centered_gamma)
        inner = g - h * (g * h).mean(-1, keepdims=True)
        if mean is not None:
            inner = inner - g.mean(-1, keepdims=True)
        dx = inverse * inner
        if add is not None:
            dx = dx + host.double(add)
        rows = tuple(range(x.ndim - 1))
        dgamma, dbeta = (grad * h).sum(rows), grad.sum(rows)
    return NormBackward(
        host.result("dx", dx, x.dtype, x.device),
        host.result("dgamma", dgamma, gamma.dtype, x.device),
        None if mean is None else host.result("dbeta", dbeta, gamma.dtype, x.device),
    )


def layernorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward:
    return _backward(dy, x, gamma, mean, rstd, zero_centered_gamma, add, centered=True)


def rmsnorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward:
    return _backward(dy, x, gamma, None, rstd, zero_centered_gamma, add, centered=False)
