# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The autograd Function of `LayerNormMLP`: norm, GEMM, activation, GEMM, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.pytorch.casts import Plan
from te_dispatch.pytorch.compile import returned, snapshot
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
from te_dispatch.pytorch.norm_steps import NormOptions, norm_backward, norm_forward
from te_dispatch.pytorch.saved import NOTHING, PARTS, Header, Parts, pack, unpack
from te_dispatch.pytorch.scoped import in_forward_scope


class LayerNormMLPOptions:
    """What the Function needs besides tensors that take gradients.

    Attributes:
        plan: None for high precision.
        weights: the two quantized weights where the module has them cached.
        trains: whether a backward may follow.
        norm: the norm's options. returns_norm: return the norm's output too.
        kind, params: of the activation.
        recomputes: save the input only and run the first half again in the backward.
        calibrate: called with (GEMM index, input, weight) to record amaxes of a high-precision run.
    """

    __slots__ = ("plan", "weights", "trains", "norm", "returns_norm", "kind", "params", "recomputes", "calibrate")

    def __init__(
        self,
        plan: Plan | None,
        weights: list[Quantized | None] | None,
        trains: bool,
        norm: NormOptions,
        returns_norm: bool,
        kind: str,
        params: tuple[float, float] | None,
        recomputes: bool,
        calibrate: Callable[[int, torch.Tensor, torch.Tensor], None] | None,
    ) -> None:
        self.plan = plan
        self.weights = weights
        self.trains = trains
        self.norm = norm
        self.returns_norm = returns_norm
        self.kind = kind
        self.params = params
        self.recomputes = recomputes
        self.calibrate = calibrate


class Half(NamedTuple):
    """Norm, first GEMM and activation: operands of the GEMMs (quantized under a plan), and what the backward reads.

    Attributes:
        normed: norm(x) in high precision, where asked or where there is no plan.
        operand: norm(x) as the first GEMM read it. z: its output, the activation's input.
        hidden: the activation's output as the second GEMM reads it.
        mean, rstd: of the norm.
    """

    normed: torch.Tensor | None
    operand: Any
    z: torch.Tensor
    hidden: Any
    mean: torch.Tensor | None
    rstd: torch.Tensor


class Needs(NamedTuple):
    """Which gradients a backward will want: of the norm's output, of the two weights."""

    norm: bool
    first: bool
    second: bool

    @property
    def hidden(self) -> bool:
        """Whether the gradient reaches the activation."""
        return self.norm or self.first


def first_half(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    weight: Any,
    bias: torch.Tensor | None,
    options: LayerNormMLPOptions,
    plan: Plan | None,
    needs: Needs,
    with_normed: bool,
) -> Half:
    """`weight` is quantized under a plan and in x's dtype without one."""
    if plan is None:
        normed = norm_forward(x, gamma, beta, options.norm)
        z = ops.gemm(normed.y, weight, layout="NT", bias=as_dtype(bias, x.dtype)).out
        hidden = ops.activation_fwd(z, kind=options.kind, params=options.params).out
        return Half(normed.y, normed.y, z, hidden, normed.mean, normed.rstd)  # type: ignore[arg-type]
    first, second = plan.gemms
    normed = norm_forward(
        x, gamma, beta, options.norm, snapshot(first.input, x), first.input_usage[1 if needs.first else 0], with_normed
    )
    operand = normed.y_quantized
    assert operand is not None
    z = fprop(first, operand, weight, bias, x.dtype)
    hidden = ops.activation_fwd(
        z,
        kind=options.kind,
        params=options.params,
        quantizer=snapshot(second.input, x),
        usage=second.input_usage[1 if needs.second else 0],
    ).out_quantized
    return Half(normed.y, operand, z, hidden, normed.mean, normed.rstd)


def _kept(operand: Any, usage: str, wanted: bool) -> tuple[Header | None, Parts]:
    """An operand as saved tensors: packed if it is quantized."""
    if not wanted:
        return None, NOTHING
    if isinstance(operand, torch.Tensor):
        return None, (operand, None, None, None, None)
    return pack(operand, usage)


class LayerNormMLPFunction(torch.autograd.Function):
    """x (..., hidden), norm's and both layers' parameters -> (..., hidden), and norm(x) where asked."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        options: LayerNormMLPOptions,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        plan, trains = options.plan, options.trains
        wants = ctx.needs_input_grad
        norm_wanted = trains and (wants[0] or wants[1] or wants[2])
        # The first bias's gradient needs what the first weight's does.
        needs = Needs(norm_wanted, trains and (wants[3] or wants[4]), trains and wants[5])
        first_operand: Any
        second_operand: Any
        if plan is None:
            first_operand, second_operand = as_dtype(w1, x.dtype), as_dtype(w2, x.dtype)
        else:
            first_operand, second_operand = options.weights or (None, None)
            casts1, casts2 = plan.gemms
            if first_operand is None:
                usage = casts1.weight_usage[1 if needs.norm else 0]
                first_operand = ops.quantize(w1, snapshot(casts1.weight, x), usage=usage)
            if second_operand is None:
                usage = casts2.weight_usage[1 if needs.hidden else 0]
                second_operand = ops.quantize(w2, snapshot(casts2.weight, x), usage=usage)
        half = first_half(x, gamma, beta, first_operand, b1, options, plan, needs, options.returns_norm)
        if plan is None:
            out = ops.gemm(half.hidden, second_operand, layout="NT", bias=as_dtype(b2, x.dtype)).out
            if options.calibrate is not None:
                options.calibrate(0, half.operand, w1)
                options.calibrate(1, half.hidden, w2)
        else:
            out = fprop(casts2, half.hidden, second_operand, b2, x.dtype)
        if trains:
            _save(ctx, x, gamma, beta, w1, b1, w2, b2, options, needs, half, first_operand, second_operand)
        if options.returns_norm:
            return returned(out), returned(half.normed)  # type: ignore[return-value]
        return returned(out)  # type: ignore[return-value]

    @staticmethod
    @in_forward_scope
    def backward(ctx: Any, dy: torch.Tensor, dnormed: torch.Tensor | None = None) -> tuple[torch.Tensor | None, ...]:
        options: LayerNormMLPOptions = ctx.options
        plan: Plan | None = ctx.plan
        wants, needs = ctx.needs_input_grad, ctx.needs
        x, gamma, mean, rstd, beta, b1, z, *saved = ctx.saved_tensors
        w1 = _restored(ctx.headers[0], saved[:PARTS], x.dtype)
        w2 = _restored(ctx.headers[1], saved[PARTS : 2 * PARTS], x.dtype)
        if options.recomputes:
            half = first_half(x, gamma, beta, w1, b1, options, ctx.replay, needs, False)
            operand, z, hidden = half.operand, half.z, half.hidden
        else:
            operand = _restored(ctx.headers[2], saved[2 * PARTS : 3 * PARTS], x.dtype)
            hidden = _restored(ctx.headers[3], saved[3 * PARTS :], x.dtype)
        x_dtype, w1_dtype, b1_dtype, w2_dtype, b2_dtype = ctx.dtypes
        dtypes = (
            w1_dtype if wants[3] else None,
            b1_dtype if wants[4] else None,
            w2_dtype if wants[5] else None,
            b2_dtype if wants[6] else None,
        )
        dy = dy.contiguous()
        if plan is None:
            step = _plain_backward(dy, w1, w2, operand, z, hidden, options, needs, dtypes)
        else:
            note_backward(plan, ctx.root, dy)
            step = _quantized_backward(dy, w1, w2, operand, z, hidden, options, plan, needs, dtypes, x_dtype)
        dnorm, dw1, db1, dw2, db2 = step
        if not needs.norm:
            return None, None, None, dw1, db1, dw2, db2, None
        if dnormed is not None:
            dnorm = dnorm + dnormed
        assert dnorm is not None
        grads = norm_backward(dnorm, x, gamma, mean, rstd, options.norm)
        return grads.dx, grads.dgamma, grads.dbeta if wants[2] else None, dw1, db1, dw2, db2, None


def _save(
    ctx: Any,
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    options: LayerNormMLPOptions,
    needs: Needs,
    half: Half,
    first_operand: Any,
    second_operand: Any,
) -> None:
    """Keep for the backward the one copy of each operand that it reads."""
    plan, again = options.plan, options.recomputes
    usages = ("row",) * 4
    if plan is not None:
        casts1, casts2 = plan.gemms
        usages = (casts1.dgrad[1][0], casts2.dgrad[1][0], casts1.wgrad[1][0], casts2.wgrad[1][0])
        if again:
            # The first GEMM runs again and reads the copy that fprop reads, which may not be dgrad's.
            usages = (casts1.weight_usage[1], *usages[1:])
    w1_header, w1_parts = _kept(first_operand if plan is not None else w1, usages[0], needs.norm or again)
    w2_header, w2_parts = _kept(second_operand if plan is not None else w2, usages[1], needs.hidden)
    x_header, x_parts = _kept(half.operand, usages[2], needs.first and not again)
    h_header, h_parts = _kept(half.hidden, usages[3], needs.second and not again)
    ctx.save_for_backward(
        x,
        gamma,
        half.mean,
        half.rstd,
        beta if again else None,
        b1 if again else None,
        half.z if needs.hidden and not again else None,
        *w1_parts,
        *w2_parts,
        *x_parts,
        *h_parts,
    )
    ctx.headers = (w1_header, w2_header, x_header, h_header)
    ctx.needs = needs
    ctx.options = options
    ctx.plan = plan
    ctx.replay = plan.as_replay() if again and plan is not None else None
    ctx.root = None if plan is None else plan.root
    ctx.scope = scopes.capture()
    biases = (None if b1 is None else b1.dtype, None if b2 is None else b2.dtype)
    ctx.dtypes = (x.dtype, w1.dtype, biases[0], w2.dtype, biases[1])


def _restored(header: Header | None, parts: Any, dtype: torch.dtype) -> Any:
    """An operand that `_kept` saved; plain ones in `dtype`, since weights are saved as they are."""
    return as_dtype(parts[0], dtype) if header is None else unpack(header, parts)


_Dtypes = tuple["torch.dtype | None", "torch.dtype | None", "torch.dtype | None", "torch.dtype | None"]
_Grads = tuple[
    "torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"
]


def _plain_backward(
    dy: torch.Tensor,
    w1: Any,
    w2: Any,
    operand: Any,
    z: torch.Tensor,
    hidden: Any,
    options: LayerNormMLPOptions,
    needs: Needs,
    dtypes: _Dtypes,
) -> _Grads:
    """(gradient of norm(x), dw1, db1, dw2, db2) in high precision; weight gradients where `dtypes` has a dtype."""
    w1_dtype, b1_dtype, w2_dtype, b2_dtype = dtypes
    dw2, db2 = plain_weight_grads(dy, hidden, w2_dtype, b2_dtype)
    if not needs.hidden:
        return None, None, None, dw2, db2
    dhidden = ops.gemm(dy, w2, layout="NN").out
    dz = ops.activation_bwd(dhidden, z, kind=options.kind, params=options.params).dx  # type: ignore[arg-type]
    assert dz is not None
    dw1, db1 = plain_weight_grads(dz, operand, w1_dtype, b1_dtype)
    dnorm = ops.gemm(dz, w1, layout="NN").out if needs.norm else None
    return dnorm, dw1, db1, dw2, db2  # type: ignore[return-value]


def _quantized_backward(
    dy: torch.Tensor,
    w1: Any,
    w2: Any,
    operand: Any,
    z: torch.Tensor,
    hidden: Any,
    options: LayerNormMLPOptions,
    plan: Plan,
    needs: Needs,
    dtypes: _Dtypes,
    dtype: torch.dtype,
) -> _Grads:
    """As `_plain_backward`, with dy and the activation's gradient quantized."""
    w1_dtype, b1_dtype, w2_dtype, b2_dtype = dtypes
    first, second = plan.gemms
    dw1 = db1 = dw2 = dnorm = None
    if not (needs.hidden or needs.second):
        return None, None, None, None, None if b2_dtype is None else column_sums(dy, b2_dtype)
    dyq, db2 = quantize_gradient(second.grad, second.grad_usage[needs.hidden + 2 * needs.second], dy, b2_dtype)
    if needs.second:
        assert w2_dtype is not None
        dw2 = wgrad(second, dyq, hidden, w2_dtype)
    if not needs.hidden:
        return None, None, None, dw2, db2
    dhidden = dgrad(second, dyq, w2, dtype)
    step = ops.activation_bwd(
        dhidden,
        z,
        kind=options.kind,
        params=options.params,
        quantizer=snapshot(first.grad, dy),
        usage=first.grad_usage[needs.norm + 2 * needs.first],
        with_dbias=b1_dtype is not None,
    )
    if b1_dtype is not None:
        db1 = as_dtype(step.dbias, b1_dtype)
    if w1_dtype is not None:
        dw1 = wgrad(first, step.dx_quantized, operand, w1_dtype)  # type: ignore[arg-type]
    if needs.norm:
        dnorm = dgrad(first, step.dx_quantized, w1, dtype)  # type: ignore[arg-type]
    return dnorm, dw1, db1, dw2, db2
