# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""LayerNorm and RMSNorm: fp32 arithmetic, one rounding. Contracts: `te_dispatch.ops.norm`."""

from __future__ import annotations

import torch

from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import NormBackward, NormForward
from te_dispatch_torch.quantize import cast


def _factor(gamma: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    return gamma.float() + 1.0 if zero_centered else gamma.float()


def _finish(
    y: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    quantizer: Quantizer | None,
    usage: str,
    with_y: bool,
    out_dtype: torch.dtype | None,
) -> NormForward:
    dtype = out_dtype or x.dtype
    quantized = None if quantizer is None else cast(y, quantizer, usage, dtype)
    kept = y.to(dtype) if quantizer is None or with_y else None
    mean = None if mean is None else mean.squeeze(-1)
    return NormForward(kept, quantized, None if residual is None else x, mean, rstd.squeeze(-1))


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
    """Through PyTorch's kernel in fp32: in lower precision it rounds mean and rstd on some devices."""
    checks.norm_fwd(x, gamma, beta, eps, residual, quantizer, usage, out_dtype)
    if residual is not None:
        x = x + residual
    shift = None if beta is None else beta.float()
    factor = _factor(gamma, zero_centered_gamma)
    y, mean, rstd = torch.native_layer_norm(x.float(), (x.shape[-1],), factor, shift, eps)
    return _finish(y, x, residual, mean, rstd, quantizer, usage, with_y, out_dtype)


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
    """RMSNorm, spelled out."""
    checks.norm_fwd(x, gamma, None, eps, residual, quantizer, usage, out_dtype)
    if residual is not None:
        x = x + residual
    x32 = x.float()
    rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    y = (x32 * rstd).mul_(_factor(gamma, zero_centered_gamma))
    return _finish(y, x, residual, None, rstd, quantizer, usage, with_y, out_dtype)


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
    """Gradients through PyTorch's kernel in fp32."""
    checks.norm_bwd(dy, x, gamma, mean, rstd, add, True)
    factor = _factor(gamma, zero_centered_gamma)
    # The kernel reads the statistics as dense memory, whatever their strides say.
    mean, rstd = mean.unsqueeze(-1).contiguous(), rstd.unsqueeze(-1).contiguous()
    dx, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward(
        dy.float(), x.float(), [x.shape[-1]], mean, rstd, factor, factor, [True, True, True]
    )  # fmt: skip
    if add is not None:
        dx = dx + add
    return NormBackward(dx.to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype))


def rmsnorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward:
    """With n = x rstd and g = dy gamma: dx = rstd (g - n mean(g n)), dgamma = sum over rows of dy n."""
    checks.norm_bwd(dy, x, gamma, None, rstd, add, False)
    n = x.float() * rstd.unsqueeze(-1)
    dy32 = dy.float()
    g = dy32 * _factor(gamma, zero_centered_gamma)
    dgamma = (dy32 * n).reshape(-1, x.shape[-1]).sum(0)
    dx = torch.addcmul(g, n, (g * n).mean(-1, keepdim=True), value=-1.0).mul_(rstd.unsqueeze(-1))
    if add is not None:
        dx = dx + add
    return NormBackward(dx.to(x.dtype), dgamma.to(gamma.dtype), None)
