# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The autograd Function of `LayerNormMLP`: norm, GEMM, activation, GEMM, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.pytorch.autograd.scoped import in_forward_scope_as_is
from te_dispatch.pytorch.capture.functions import Replayable, replayed
from te_dispatch.pytorch.compile import returned, snapshot
from te_dispatch.pytorch.distributed.arguments import Division
from te_dispatch.pytorch.fp8.casts import GemmCasts, Plan
from te_dispatch.pytorch.modules.gemm_steps import (
    Wanted,
    as_dtype,
    dgrad,
    note_backward,
    product,
    product_gradients,
    weight_operand,
    wgrad,
)
from te_dispatch.pytorch.modules.norm_steps import NormOptions, norm_backward, norm_operand, norm_operand_gradient
from te_dispatch.pytorch.modules.weight_grads import WeightSink
from te_dispatch.pytorch.tensor.casting import detached, rounded
from te_dispatch.pytorch.tensor.packing import PARTS, keep, restored, taken


class LayerNormMLPOptions(Replayable):
    """What the Function needs besides tensors that take gradients.

    Attributes:
        plan: None for high precision.
        weights: the two quantized weights where the module has them cached.
        trains: whether a backward may follow.
        norm: the norm's options. returns_norm: return the norm's output too. passes_input: return the input last.
        kind, params: of the activation.
        recomputes: save the input only and run the first half again in the backward.
        calibrate: called with (GEMM index, input, weight) to record amaxes of a high-precision run.
        division: how several ranks divide both weights; None for one rank.
        returns_gathered: return the norm of all ranks' tokens, if the norm's output is returned.
        sinks: of both weights: where the gradient goes instead of being returned; None to return them.
    """

    __slots__ = (
        "plan", "weights", "trains", "norm", "returns_norm", "kind", "params", "recomputes", "calibrate",
        "passes_input", "sinks", "division", "returns_gathered",
    )  # fmt: skip

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
        passes_input: bool,
        sinks: tuple[WeightSink, WeightSink] | None = None,
        division: Division | None = None,
        returns_gathered: bool = False,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.weights = weights
        self.trains = trains
        self.norm = norm
        self.returns_norm = returns_norm
        self.kind = kind
        self.params = params
        self.recomputes = recomputes
        self.calibrate = calibrate
        self.passes_input = passes_input
        self.sinks = sinks
        self.division = division
        self.returns_gathered = returns_gathered

    @property
    def repeatable(self) -> bool:
        """Whether a call with these options can be captured."""
        return self.sinks is None and not self.returns_norm and not self.recomputes


#: How many tensors are saved in front of those of the two products.
_FRONT = 7


class Half(NamedTuple):
    """Norm, first GEMM and activation: operands of the GEMMs (quantized under a plan), and what the backward reads.

    Attributes:
        normed: norm(x) in high precision, where asked or where there is no plan; of all ranks' tokens where asked.
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


def _casts(plan: Plan | None) -> tuple[GemmCasts | None, GemmCasts | None]:
    """Of the first GEMM and the second; each None for high precision."""
    return (None, None) if plan is None else plan.gemms  # type: ignore[return-value]


def _read_in_backward(casts: GemmCasts | None) -> tuple[str, str]:
    """Usages of a weight and an input; of plain ones, any."""
    return ("row", "row") if casts is None else (casts.dgrad[1][0], casts.wgrad[1][0])


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
    """`weight` is quantized where the first GEMM is, else in x's dtype."""
    first, second = _casts(plan)
    operand: Any
    hidden: Any
    if first is None:
        normed, whole, operand = norm_operand(x, gamma, beta, options.norm, options.division)
    else:
        usage = first.input_usage[1 if needs.first else 0]
        normed, whole, operand = norm_operand(
            x, gamma, beta, options.norm, options.division, snapshot(first.input, x), usage, with_normed
        )
    z = product(first, operand, weight, bias, x.dtype)
    if second is None:
        hidden = ops.activation_fwd(z, kind=options.kind, params=options.params).out
    else:
        hidden = ops.activation_fwd(
            z,
            kind=options.kind,
            params=options.params,
            quantizer=snapshot(second.input, x),
            usage=second.input_usage[1 if needs.second else 0],
        ).out_quantized
    shown = whole if options.returns_gathered else normed.y
    return Half(shown, operand, z, hidden, normed.mean, normed.rstd)


@replayed(in_forward_scope_as_is)
class LayerNormMLPFunction(torch.autograd.Function):
    """x (..., hidden), norm's and both layers' parameters -> (..., hidden), and norm(x), and x, where asked."""

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
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        plan, trains, wants = options.plan, options.trains, ctx.needs_input_grad
        norm_wanted = trains and (wants[0] or wants[1] or wants[2])
        # The first bias's gradient needs what the first weight's does.
        needs = Needs(norm_wanted, trains and (wants[3] or wants[4]), trains and wants[5])
        first, second = _casts(plan)
        cached = options.weights or (None, None)
        first_operand = weight_operand(first, w1, cached[0], x, needs.norm)
        second_operand = weight_operand(second, w2, cached[1], x, needs.hidden)
        half = first_half(x, gamma, beta, first_operand, b1, options, plan, needs, options.returns_norm)
        out = product(second, half.hidden, second_operand, b2, x.dtype, division=options.division)
        if plan is None and options.calibrate is not None:
            options.calibrate(0, half.operand, w1)
            options.calibrate(1, half.hidden, w2)
        if trains:
            _save(ctx, x, gamma, beta, w1, b1, w2, b2, options, needs, half, first_operand, second_operand)
        beside = (returned(half.normed),) if options.returns_norm else ()  # type: ignore[arg-type]
        if options.passes_input:
            beside += (x.view_as(x),)
        return (returned(out), *beside) if beside else returned(out)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *beside: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        options: LayerNormMLPOptions = ctx.options
        wants, saved = ctx.needs_input_grad, list(taken(ctx))
        x, gamma, mean, rstd = saved[:4]
        dy = dy.contiguous()  # that of a sum is expanded; not asked first, which the compiler cannot trace here
        dnorm, dw1, db1, dw2, db2 = _gradients(ctx, dy, saved)
        if options.sinks is not None:
            into = options.sinks
            (dw1,), (dw2,) = (to.returned() if want else [None] for to, want in zip(into, (wants[3], wants[5])))
        if dnorm is None:
            return None, None, None, dw1, db1, dw2, db2, None
        dshown = beside[0] if options.returns_norm else None
        dnorm = norm_operand_gradient(dnorm, dshown, options.division, options.returns_gathered)
        residual = beside[-1] if options.passes_input else None
        if residual is not None:
            residual = detached(residual).contiguous()
        grads = norm_backward(dnorm, x, gamma, mean, rstd, options.norm, residual)
        return grads.dx, grads.dgamma, grads.dbeta if wants[2] else None, dw1, db1, dw2, db2, None


def _gradients(ctx: Any, dy: torch.Tensor, saved: list[Any]) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the norm's output, of w1, b1, w2 and b2, each where it is wanted; empties what was `saved`."""
    options, wants = ctx.options, ctx.needs_input_grad
    plan: Plan | None = options.plan
    x, gamma, _, _, beta, b1, z = saved[:_FRONT]
    needs: Needs = ctx.needs
    w1, w2, operand, hidden = _operands(ctx.headers, saved[_FRONT:])
    saved.clear()
    casts1, casts2 = _casts(plan)
    if options.recomputes:
        w1_again = as_dtype(w1, x.dtype) if casts1 is None else w1
        half = first_half(x, gamma, beta, w1_again, b1, options, ctx.replay, needs, False)
        operand, z, hidden = half.operand, half.z, half.hidden
        del half
    x_dtype, w1_dtype, b1_dtype, w2_dtype, b2_dtype = ctx.dtypes
    first = (x_dtype if needs.norm else None, w1_dtype if wants[3] else None, b1_dtype if wants[4] else None)
    second = (x_dtype if needs.hidden else None, w2_dtype if wants[5] else None, b2_dtype if wants[6] else None)
    if plan is not None:
        note_backward(plan, ctx.root, dy)
    into1, into2 = options.sinks or (None, None)
    dnorm = dw1 = db1 = None
    dhidden, dw2, db2 = product_gradients(casts2, dy, hidden, w2, second, None, into2, options.division)
    # What is widest goes as soon as it was used: here is where a step needs the most memory.
    del hidden, w2
    if dhidden is not None:
        dz, db1 = _activation_gradient(casts1, dhidden, z, options, first, dy)
        del dhidden, z
        dnorm, dw1, db1 = _first_gradients(casts1, dz, db1, operand, w1, first, into1)
    return dnorm, dw1, db1, dw2, db2


def _operands(headers: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
    """What `_save` kept of both weights and both inputs."""
    return [restored(header, saved[i * PARTS : (i + 1) * PARTS]) for i, header in enumerate(headers)]


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
    casts1, casts2 = _casts(plan)
    w1_usage, x_usage = _read_in_backward(casts1)
    w2_usage, h_usage = _read_in_backward(casts2)
    if casts1 is not None and again:
        # The first GEMM runs again and reads the copy that fprop reads, which may not be dgrad's.
        w1_usage = casts1.weight_usage[1]
    w1_header, w1_parts = keep(first_operand if casts1 is not None else w1, w1_usage, needs.norm or again)
    w2_header, w2_parts = keep(second_operand if casts2 is not None else w2, w2_usage, needs.hidden)
    x_header, x_parts = keep(half.operand, x_usage, needs.first and not again)
    h_header, h_parts = keep(half.hidden, h_usage, needs.second and not again)
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
    ctx.replay = plan.as_replay() if again and plan is not None else None
    ctx.root = None if plan is None else plan.root
    ctx.scope = scopes.capture()
    biases = (None if b1 is None else b1.dtype, None if b2 is None else b2.dtype)
    ctx.dtypes = (x.dtype, w1.dtype, biases[0], w2.dtype, biases[1])


def _activation_gradient(
    casts: GemmCasts | None,
    dhidden: torch.Tensor,
    z: torch.Tensor,
    options: LayerNormMLPOptions,
    wanted: Wanted,
    dy: torch.Tensor,
) -> tuple[Any, torch.Tensor | None]:
    """(gradient of z as the GEMMs read it, that of the first bias); `dy` is the Function's."""
    x_dtype, weight_dtype, bias_dtype = wanted
    asked = {"kind": options.kind, "params": options.params, "with_dbias": bias_dtype is not None}
    if casts is None:
        step = ops.activation_bwd(dhidden, z, **asked)
        dz = step.dx
    else:
        usage = casts.grad_usage[(x_dtype is not None) + 2 * (weight_dtype is not None)]
        assert casts.grad is not None
        if casts.stochastic:  # an activation's cast takes no random numbers
            step = ops.activation_bwd(dhidden, z, **asked)
            dz = rounded(step.dx, casts.grad, usage, True)
        else:
            quantizer = snapshot(casts.grad, dy, in_backward=True)
            step = ops.activation_bwd(dhidden, z, quantizer=quantizer, usage=usage, **asked)
            dz = step.dx_quantized
    return dz, None if bias_dtype is None else as_dtype(step.dbias, bias_dtype)


def _first_gradients(
    casts: GemmCasts | None,
    dz: Any,
    dbias: torch.Tensor | None,
    operand: Any,
    weight: Any,
    wanted: Wanted,
    into: WeightSink | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of norm(x), w1 and b1, from that of the activation's input."""
    x_dtype, weight_dtype, _ = wanted
    if casts is None:
        dx, dw, _ = product_gradients(None, dz, operand, weight, (x_dtype, weight_dtype, None), into=into)
        return dx, dw, dbias
    dx = None if x_dtype is None else dgrad(casts, dz, weight, x_dtype)
    return dx, None if weight_dtype is None else wgrad(casts, dz, operand, weight_dtype, into), dbias
