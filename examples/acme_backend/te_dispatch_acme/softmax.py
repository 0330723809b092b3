# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scaled, masked softmax in fp32. Contracts: `te_dispatch.ops.softmax`."""

from __future__ import annotations

import numpy as np
import torch

from te_dispatch_acme import memory


def softmax_fwd(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """softmax(scale * x) over the last dimension; masked entries and fully masked rows are 0."""
    if x.ndim < 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (..., s_q, s_kv)")
    z = memory.single("x", x) * np.float32(scale)
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"mask: got dtype {mask.dtype}, expected bool")
        try:
            hidden = np.broadcast_to(mask.numpy(), z.shape)
        except ValueError as error:
            raise ValueError(f"mask: got shape {tuple(mask.shape)}, expected one that broadcasts to x's") from error
        z = np.where(hidden, np.float32(-np.inf), z)
    if causal:
        z = np.where(np.triu(np.ones(z.shape[-2:], bool), 1), np.float32(-np.inf), z)
    top = z.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(z - np.where(np.isneginf(top), np.float32(0), top))
    total = weights.sum(-1, keepdims=True)
    y = weights / np.where(total == 0, np.float32(1), total)
    return memory.result("out", y, memory.dtype_of("out_dtype", out_dtype, x.dtype), x.device)


def softmax_bwd(
    dy: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """scale * y * (dy - sum_j dy_j y_j)."""
    memory.check_shape("dy", dy, tuple(y.shape))
    grad, value = memory.single("dy", dy), memory.single("y", y)
    dx = np.float32(scale) * value * (grad - (grad * value).sum(-1, keepdims=True))
    return memory.result("dx", dx, memory.dtype_of("out_dtype", out_dtype, y.dtype), y.device)
