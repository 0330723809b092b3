# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""residual + drop_path(dropout(x)): what joins the halves of a transformer layer."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.pytorch.autograd.apply import applied
from te_dispatch.pytorch.autograd.scoped import in_forward_scope, outside_autocast
from te_dispatch.pytorch.compile import returned
from te_dispatch.pytorch.randomness import draw_rng_state
from te_dispatch.pytorch.tensor.quantized_tensor import plain


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        dropout_p: float,
        rng_state: torch.Tensor,
    ) -> torch.Tensor:
        out, mask = ops.dropout_add_fwd(x, residual, dropout_p=dropout_p, rng_state=rng_state)
        ctx.save_for_backward(mask)
        ctx.dropout_p = dropout_p
        ctx.scope = scopes.capture()
        return returned(out)

    @staticmethod
    @in_forward_scope
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        dx = ops.dropout_add_bwd(dy.contiguous(), mask, dropout_p=ctx.dropout_p)
        return dx, (dy if ctx.needs_input_grad[1] else None), None, None


_run_dropout_add = applied(_DropoutAdd)


def dropout_add(x: torch.Tensor, residual: torch.Tensor | None, dropout_p: float) -> torch.Tensor:
    """residual + dropout(x) with gradients, one operator each way; without dropout PyTorch's sum.

    Args:
        x: (..., K); residual: like x or None. Where dtypes differ (torch.autocast with a float32
            residual) the residual's counts.
        dropout_p: probability of dropping, 0 outside training.
    """
    x, residual = plain(x), plain(residual)
    if residual is not None and residual.dtype != x.dtype:
        x = x.to(residual.dtype)
    if not dropout_p:
        # The sum that the operator gives, computed in float32 and rounded once, at a fifth of a Function's host time.
        return x if residual is None else residual + x
    arguments = x, residual, dropout_p, draw_rng_state(x.device)
    return outside_autocast(_run_dropout_add, *arguments)  # type: ignore[no-any-return]


class DropPath(torch.nn.Module):
    """Stochastic depth (Huang et al., 2016): in training, x is zeroed for a sequence with probability `drop_prob`.

    Kept sequences are scaled by 1 / (1 - drop_prob); with a probability of 1 none is kept and all are zeros, where
    Transformer Engine's are NaN.
    """

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= drop_prob <= 1.0:
            raise ValueError(f"drop_path_rate must be at least 0 and at most 1, got {drop_prob!r}")
        self.drop_prob = drop_prob

    def extra_repr(self) -> str:
        return f"drop_prob={self.drop_prob}"

    def forward(
        self, hidden_state: torch.Tensor, layout: str | None = None, cu_seqlens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Drop.

        Args:
            hidden_state: x, (s, b, K), (b, s, K) or (t, K) as `layout` says. Without a layout (n, ..), of which each of
                the first dimension is dropped by itself, as in Transformer Engine.
            cu_seqlens: int32 (b + 1,), sequence starts for thd.
        """
        x = hidden_state
        if not self.training or self.drop_prob == 0.0:
            return x
        keep = 1.0 - self.drop_prob
        divisor = keep or 1.0
        if layout != "thd":
            shape = (1, x.shape[1], 1) if layout == "sbhd" else (x.shape[0], *(1 for _ in x.shape[1:]))
            return x * (torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(keep) / divisor)
        if cu_seqlens is None:
            raise ValueError("drop_path_rate with attn_input_format='thd' needs cu_seqlens_q, got None")
        kept = torch.empty(cu_seqlens.numel(), dtype=x.dtype, device=x.device).bernoulli_(keep) / divisor
        tokens = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
        return x * kept[torch.searchsorted(cu_seqlens, tokens, right=True) - 1].unsqueeze(-1)
