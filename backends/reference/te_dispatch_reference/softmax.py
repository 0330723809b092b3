# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scaled, masked softmax in float64."""

from __future__ import annotations

import numpy as np
import torch

from te_dispatch.ops.checks import rows as checks
from te_dispatch_reference import host
from te_dispatch_reference.host import F64


def masked_softmax(z: F64) -> F64:
    """Over the last dimension; -Inf entries get 0, rows of nothing else are 0."""
    top = z.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(z - np.where(top == -np.inf, 0.0, top))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1.0, total)


def softmax_fwd(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    checks.softmax_fwd(x, mask, scale, out_dtype)
    masked = np.zeros(x.shape, bool)
    if mask is not None:
        masked |= np.broadcast_to(host.array(mask), x.shape)
    if causal:
        masked |= np.triu(np.ones(x.shape[-2:], bool), 1)
    with np.errstate(all="ignore"):
        y = masked_softmax(np.where(masked, -np.inf, scale * host.double(x)))
    return host.result("out", y, out_dtype or x.dtype, x.device)


def softmax_bwd(
    dy: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    checks.softmax_bwd(dy, y, scale, out_dtype)
    grad, value = host.double(dy), host.double(y)
    with np.errstate(all="ignore"):
        dx = scale * value * (grad - (grad * value).sum(-1, keepdims=True))
    return host.result("dx", dx, out_dtype or y.dtype, y.device)
