# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The one GEMM of `Linear` and `LayerNormLinear`, forward and backward, as steps of their autograd Functions."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.pytorch.casts import GemmCasts, Plan
from te_dispatch.pytorch.compile import snapshot
from te_dispatch.pytorch.gemm_steps import (
    as_dtype,
    column_sums,
    dgrad,
    fprop,
    note_backward,
    plain_weight_grads,
    quantize_gradient,
    wgrad,
)
from te_dispatch.pytorch.norm_steps import NormOptions
from te_dispatch.pytorch.saved import NOTHING, pack, unpack

Saved = tuple[Any, ...]
Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


class LinearOptions:
    """What the Functions need besides tensors that take gradients.

    Attributes:
        plan: None for high precision.
        weight: the quantized weight where the module has it cached.
        trains: whether a backward may follow.
        norm: the options of the norm in front; None without one.
        returns_norm: return the norm's output too.
    """

    __slots__ = ("plan", "weight", "trains", "norm", "returns_norm")

    def __init__(
        self,
        plan: Plan | None,
        weight: Quantized | None,
        trains: bool,
        norm: NormOptions | None = None,
        returns_norm: bool = False,
    ) -> None:
        self.plan = plan
        self.weight = weight
        self.trains = trains
        self.norm = norm
        self.returns_norm = returns_norm


def plain_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs_dgrad: bool, needs_wgrad: bool
) -> tuple[torch.Tensor, Saved]:
    """x W^T + bias in x's dtype, and what `product_backward` reads: as many tensors of x as of the weight."""
    dtype = x.dtype
    out = ops.gemm(x, as_dtype(weight, dtype), layout="NT", bias=as_dtype(bias, dtype)).out
    return out, (x if needs_wgrad else None, weight if needs_dgrad else None)  # type: ignore[return-value]


def quantized_product(
    ctx: Any,
    casts: GemmCasts,
    inp: torch.Tensor,
    x: Quantized,
    weight: torch.Tensor,
    kept: Quantized | None,
    bias: torch.Tensor | None,
    needs_dgrad: bool,
    needs_wgrad: bool,
) -> tuple[torch.Tensor, Saved]:
    """As `plain_product`, of x quantized already and the weight quantized here unless it was `kept`.

    The result has the dtype of the Function's input `inp`.
    """
    if kept is None:
        kept = ops.quantize(weight, snapshot(casts.weight, inp), usage=casts.weight_usage[1 if needs_dgrad else 0])
    out = fprop(casts, x, kept, bias, inp.dtype)
    x_parts = w_parts = NOTHING
    if needs_wgrad:
        ctx.x_header, x_parts = pack(x, casts.wgrad[1][0])
    if needs_dgrad:
        ctx.w_header, w_parts = pack(kept, casts.dgrad[1][0])
    return out, (*x_parts, *w_parts)


def note_forward(ctx: Any, plan: Plan | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Keep on `ctx` what the backward needs to know besides tensors."""
    ctx.scope = scopes.capture()
    ctx.plan = plan
    ctx.root = None if plan is None else plan.root
    ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)


def product_backward(
    ctx: Any, dy: torch.Tensor, saved: Saved, needs_dgrad: bool, needs_wgrad: bool, needs_bgrad: bool
) -> Gradients:
    """Gradients of x, weight and bias, each where it is needed, else None."""
    plan: Plan | None = ctx.plan
    x_dtype, weight_dtype, bias_dtype = ctx.dtypes
    if not needs_bgrad:
        bias_dtype = None
    half = len(saved) // 2
    dy = dy.contiguous()
    dx = dw = None
    if plan is None:
        if needs_dgrad:
            dx = ops.gemm(dy, as_dtype(saved[half], dy.dtype), layout="NN").out
        dw, db = plain_weight_grads(dy, saved[0], weight_dtype if needs_wgrad else None, bias_dtype)
        return dx, dw, db  # type: ignore[return-value]
    if not (needs_dgrad or needs_wgrad):
        return None, None, None if bias_dtype is None else column_sums(dy, bias_dtype)
    note_backward(plan, ctx.root, dy)
    casts = plan.gemms[0]
    dyq, db = quantize_gradient(casts.grad, casts.grad_usage[needs_dgrad + 2 * needs_wgrad], dy, bias_dtype)
    if needs_dgrad:
        dx = dgrad(casts, dyq, unpack(ctx.w_header, saved[half:]), x_dtype)
    if needs_wgrad:
        dw = wgrad(casts, dyq, unpack(ctx.x_header, saved[:half]), weight_dtype)
    return dx, dw, db
