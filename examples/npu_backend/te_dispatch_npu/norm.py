# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""RMSNorm on the n1. Contracts: `te_dispatch.ops.norm`."""

from __future__ import annotations

import torch

from te_dispatch.core.autograd import below_autograd
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops import alloc
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import NormBackward, NormForward
from te_dispatch.ops.shapes import rows_of
from te_dispatch_npu import native


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
    """fp32, without a residual or a cast."""
    checks.norm_fwd(x, gamma, None, eps, residual, quantizer, usage, out_dtype)
    shape = tuple(x.shape)
    x, gamma = x.contiguous(), gamma.contiguous()
    y = alloc.empty("y", shape, torch.float32, x.device)
    rstd = alloc.empty("rstd", shape[:-1], torch.float32, x.device)
    native.library().tide_rmsnorm_fwd(
        x.data_ptr(), gamma.data_ptr(), y.data_ptr(), rstd.data_ptr(), rows_of(shape), shape[-1], eps,
        float(zero_centered_gamma),
    )  # fmt: skip
    return NormForward(y, None, None, None, rstd)


@below_autograd
def rmsnorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward:
    """The kernel's gradients; what is added comes after, by an operator of PyTorch, which autograd must not record."""
    checks.norm_bwd(dy, x, gamma, None, rstd, add, False)
    shape = tuple(x.shape)
    dy, x, gamma, rstd = (tensor.contiguous() for tensor in (dy, x, gamma, rstd))
    dx = alloc.empty("dx", shape, torch.float32, x.device)
    dgamma = alloc.empty("dgamma", tuple(gamma.shape), torch.float32, x.device)
    sums = alloc.empty("workspace", tuple(gamma.shape), torch.float64, x.device)
    native.library().tide_rmsnorm_bwd(
        dy.data_ptr(), x.data_ptr(), gamma.data_ptr(), rstd.data_ptr(), dx.data_ptr(), dgamma.data_ptr(),
        sums.data_ptr(), rows_of(shape), shape[-1], float(zero_centered_gamma),
    )  # fmt: skip
    if add is not None:
        dx.add_(add)
    return NormBackward(dx, dgamma, None)
