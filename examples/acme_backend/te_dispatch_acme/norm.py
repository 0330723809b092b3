# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Row norms in fp32. Contracts: `te_dispatch.ops.norm`.

With h = (x - mean) * rstd and g = dy * factor: dx = rstd * (g - mean(g) - h * mean(g * h)); RMSNorm lacks mean(g).
"""

from __future__ import annotations

import numpy as np
import torch

from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import NormBackward, NormForward
from te_dispatch_acme import memory
from te_dispatch_acme.memory import F32


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
    """The plain norm; residuals and casts are left to the composite."""
    checks.norm_fwd(x, gamma, beta, eps, residual, quantizer, usage, out_dtype)
    values = memory.single("x", x)
    mean = values.mean(-1, keepdims=True)
    centered = values - mean
    rstd = _inverse_root(centered, eps)
    y = centered * rstd * _factor(gamma, zero_centered_gamma)
    if beta is not None:
        y = y + memory.single("beta", beta)
    return NormForward(
        memory.result("y", y, memory.dtype_of("out_dtype", out_dtype, x.dtype), x.device),
        None,
        None,
        memory.result("mean", mean[..., 0], torch.float32, x.device),
        memory.result("rstd", rstd[..., 0], torch.float32, x.device),
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
    """The plain norm; residuals and casts are left to the composite."""
    checks.norm_fwd(x, gamma, None, eps, residual, quantizer, usage, out_dtype)
    values = memory.single("x", x)
    rstd = _inverse_root(values, eps)
    y = values * rstd * _factor(gamma, zero_centered_gamma)
    return NormForward(
        memory.result("y", y, memory.dtype_of("out_dtype", out_dtype, x.dtype), x.device),
        None,
        None,
        None,
        memory.result("rstd", rstd[..., 0], torch.float32, x.device),
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
    """Gradients of `layernorm_fwd`."""
    return _backward(dy, x, gamma, mean, rstd, zero_centered_gamma, add)


def rmsnorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward:
    """Gradients of `rmsnorm_fwd`."""
    return _backward(dy, x, gamma, None, rstd, zero_centered_gamma, add)


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    zero_centered: bool,
    add: torch.Tensor | None,
) -> NormBackward:
    checks.norm_bwd(dy, x, gamma, mean, rstd, add, mean is not None)
    inverse = memory.single("rstd", rstd)[..., None]
    shift = np.float32(0) if mean is None else memory.single("mean", mean)[..., None]
    h = (memory.single("x", x) - shift) * inverse
    grad = memory.single("dy", dy)
    g = grad * _factor(gamma, zero_centered)
    inner = g - h * (g * h).mean(-1, keepdims=True)
    if mean is not None:
        inner = inner - g.mean(-1, keepdims=True)
    dx = inverse * inner
    if add is not None:
        dx = dx + memory.single("add", add)
    rows = tuple(range(grad.ndim - 1))
    dbeta = None
    if mean is not None:
        dbeta = memory.result("dbeta", grad.sum(rows), gamma.dtype, x.device)
    return NormBackward(
        memory.result("dx", dx, x.dtype, x.device),
        memory.result("dgamma", (grad * h).sum(rows), gamma.dtype, x.device),
        dbeta,
    )


def _inverse_root(centered: F32, eps: float) -> F32:
    inverse: F32 = 1 / np.sqrt(np.square(centered).mean(-1, keepdims=True) + np.float32(eps))
    return inverse


def _factor(gamma: torch.Tensor, zero_centered: bool) -> F32:
    values = memory.single("gamma", gamma)
    return values + np.float32(1) if zero_centered else values
