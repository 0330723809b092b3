# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The one GEMM of `Linear` and `LayerNormLinear`, forward and backward, as steps of their autograd Functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.pytorch.capture.functions import Replayable
from te_dispatch.pytorch.distributed.arguments import Division
from te_dispatch.pytorch.fp8.casts import Plan
from te_dispatch.pytorch.fp8.quantized_io import Leaves, leaving, operand
from te_dispatch.pytorch.modules.gemm_steps import (
    Wanted,
    as_dtype,
    note_backward,
    product,
    product_gradients,
    weight_operand,
)
from te_dispatch.pytorch.modules.norm_steps import NormOptions
from te_dispatch.pytorch.modules.weight_grads import WeightSink
from te_dispatch.pytorch.tensor.casting import detached
from te_dispatch.pytorch.tensor.packing import PARTS, keep, restored
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor

Saved = tuple[Any, ...]
Gradients = tuple["torch.Tensor | None", "torch.Tensor | None", "torch.Tensor | None"]


class LinearOptions(Replayable):
    """What the Functions need besides tensors that take gradients.

    Attributes:
        plan: None for high precision.
        weight: the quantized weight where the module has it cached.
        trains: whether a backward may follow.
        norm: the options of the norm in front; None without one.
        returns_norm: return the norm's output too.
        passes_input: also return the input, for a residual connection: the norm's backward then adds its gradient.
        output, input_grad: how the output and the input's gradient leave the module, None for plain.
        saves_input: save x as it came, and quantize it again in the backward.
        sink: where the weight's gradient goes instead of being returned; None to return it.
        division: how several ranks divide the weight; None for one rank.
        returns_gathered: return the norm of all ranks' tokens, if the norm's output is returned.
        rows: where weight and bias are several parameters and come without gradient: rows of each. The parameters
            themselves then follow the options among the Function's arguments, weights first. Else ().
    """

    __slots__ = (
        "plan", "weight", "trains", "norm", "returns_norm", "output", "input_grad", "passes_input", "saves_input",
        "sink", "rows", "division", "returns_gathered",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan | None,
        weight: Quantized | None,
        trains: bool,
        norm: NormOptions | None = None,
        returns_norm: bool = False,
        output: Leaves | None = None,
        input_grad: Leaves | None = None,
        passes_input: bool = False,
        rows: tuple[int, ...] = (),
        division: Division | None = None,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.weight = weight
        self.trains = trains
        self.norm = norm
        self.returns_norm = returns_norm
        self.output = output
        self.input_grad = input_grad
        self.passes_input = passes_input
        self.saves_input = False
        self.sink: WeightSink | None = None
        self.rows = rows
        self.division = division
        self.returns_gathered = False

    @property
    def repeatable(self) -> bool:
        """Whether a call with these options can be captured."""
        return (
            self.sink is None
            and not self.saves_input
            and not self.returns_norm
            and self.output is None
            and self.input_grad is None
            and (self.plan is None or self.plan.override is None)
        )

    def trained(self, needs: Sequence[bool], at: int) -> tuple[bool, bool]:
        """Whether a gradient of the weight is needed, and of the bias.

        Args:
            needs: `ctx.needs_input_grad`, of (.., weight, bias, options, *parameters) with the weight at `at`.
        """
        if not self.rows:
            return needs[at], needs[at + 1]
        weights = needs[at + 3 : at + 3 + len(self.rows)]
        return any(weights), any(needs[at + 3 + len(self.rows) :])

    def gradients(
        self, needs: Sequence[bool], at: int, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """What a backward returns from `at` on, of the gradients of the whole weight and bias."""
        sink = self.sink
        if sink is not None and not self.trained(needs, at)[0]:
            sink = None
        if not self.rows:
            if sink is not None:
                (weight,) = sink.returned()
            return weight, bias, None
        parts: list[torch.Tensor | None] = [None] * len(self.rows)
        if sink is not None:
            parts = sink.returned()
        elif weight is not None:
            parts = [*weight.split_with_sizes(self.rows)]
        if len(needs) > at + 3 + len(self.rows):
            parts += [None] * len(self.rows) if bias is None else bias.split_with_sizes(self.rows)
        return None, None, None, *parts


def plain_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    needs_dgrad: bool,
    needs_wgrad: bool,
    division: Division | None,
) -> tuple[torch.Tensor, Saved]:
    """x W^T + bias in x's dtype, and what `product_backward` reads: as many tensors of x as of the weight."""
    out = product(None, x, as_dtype(weight, x.dtype), bias, x.dtype, division=division)
    return out, (x if needs_wgrad else None, weight if needs_dgrad else None)


def quantized_product(
    ctx: Any,
    options: LinearOptions,
    inp: torch.Tensor,
    original: torch.Tensor | None,
    x: Quantized,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    needs_dgrad: bool,
    needs_wgrad: bool,
    leaves: Leaves | None = None,
) -> tuple[torch.Tensor, Saved]:
    """As `plain_product`, of x quantized already and the weight quantized here unless the module has it cached.

    The result has the dtype of the Function's input `inp`, and is quantized where it `leaves` so.

    Args:
        original: x before its cast; None where the plan's backward does not read that.
    """
    plan = options.plan
    assert plan is not None
    casts = plan.sole()
    override = plan.override
    quantized = weight_operand(casts, weight, options.weight, inp, needs_dgrad and override is None)
    out = product(casts, x, quantized, bias, inp.dtype, leaves, inp, options.division)
    x_usage, w_usage = casts.wgrad[1][0], casts.dgrad[1][0]
    kept_x: Any = x
    kept_w: Any = quantized
    if override == "high_precision":
        kept_x, kept_w = None if original is None else detached(original), detached(weight)
    elif override is not None:
        x_usage, w_usage = casts.input_usage[0], casts.weight_usage[0]
    elif options.saves_input and inp.__class__ is not QuantizedTensor:
        kept_x = inp  # an input that came quantized is kept as it came
    ctx.x_header, x_parts = keep(kept_x, x_usage, needs_wgrad)
    ctx.w_header, w_parts = keep(kept_w, w_usage, needs_dgrad)
    return out, (*x_parts, *w_parts)


def note_forward(
    ctx: Any, options: LinearOptions, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Keep on `ctx` what the backward needs to know besides tensors."""
    ctx.scope = scopes.capture()
    ctx.options = options
    # A later recomputation of the same plan would replace it.
    ctx.root = None if options.plan is None else options.plan.root
    ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)


def product_backward(
    ctx: Any,
    dy: torch.Tensor,
    saved: Saved,
    needs_dgrad: bool,
    needs_wgrad: bool,
    needs_bgrad: bool,
    leaves: Leaves | None = None,
) -> Gradients:
    """Gradients of x, weight and bias, each where it is needed, else None; x's is quantized where it `leaves` so."""
    plan: Plan | None = ctx.options.plan
    wanted = _wanted(ctx.dtypes, needs_dgrad, needs_wgrad, needs_bgrad)
    dy = dy.contiguous()
    into, division = ctx.options.sink, ctx.options.division
    if plan is None:
        return product_gradients(None, dy, *saved, wanted, None, into, division)
    if needs_dgrad or needs_wgrad:
        note_backward(plan, ctx.root, dy)
    x, weight = restored(ctx.x_header, saved[:PARTS]), restored(ctx.w_header, saved[PARTS:])
    if plan.override is not None:
        operands = (_values(t, ctx.dtypes[0]) for t in (x, weight))
        dx, dw, db = product_gradients(None, dy, *operands, wanted, None, into, division)
        return dx if dx is None or leaves is None else leaving(dx, leaves), dw, db
    casts = plan.sole()
    if isinstance(x, torch.Tensor):
        x = operand(x, casts.input, casts.wgrad[1][0], in_backward=True)
    return product_gradients(casts, dy, x, weight, wanted, leaves, into, division)


def _values(x: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """An operand as high-precision products read it."""
    return ops.dequantize(x, dtype=dtype) if isinstance(x, Quantized) else x


def _wanted(dtypes: Any, needs_dgrad: bool, needs_wgrad: bool, needs_bgrad: bool) -> Wanted:
    x_dtype, weight_dtype, bias_dtype = dtypes
    return (
        x_dtype if needs_dgrad else None, weight_dtype if needs_wgrad else None, bias_dtype if needs_bgrad else None
    )  # fmt: skip
