# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scaled and masked softmax. Contracts: `te_dispatch.ops.softmax`."""

from __future__ import annotations

import torch

from te_dispatch.ops.checks import rows as checks


def softmax_fwd(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Softmax of scale * x over unmasked entries, in fp32."""
    checks.softmax_fwd(x, mask, scale, out_dtype)
    if x.numel() == 0:
        return x.new_empty(x.shape, dtype=out_dtype or x.dtype)
    masked = _combined(x, mask, causal)
    z = x.float() * scale
    if masked is not None:
        z = z.masked_fill_(masked, float("-inf"))
    # A row of nothing but -Inf, masked or not, is 0/0.
    empty = z.amax(-1, keepdim=True) == float("-inf")
    return torch.softmax(z, -1).masked_fill_(empty, 0.0).to(out_dtype or x.dtype)


def _combined(x: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> torch.Tensor | None:
    if not causal:
        return mask
    above = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu_(1)
    return above if mask is None else mask | above


def softmax_bwd(
    dy: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """scale * y * (dy - sum(dy * y)), in fp32."""
    checks.softmax_bwd(dy, y, scale, out_dtype)
    y32, product = y.float(), dy.float() * y.float()
    dx = torch.addcmul(product, y32, product.sum(-1, keepdim=True), value=-1.0)
    return (dx * scale).to(out_dtype or y.dtype)
