# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantized tensors at the edges of a module: what comes in as one, and what leaves as one.

A module that was asked for ``fp8_output`` or ``fp8_grad`` casts its output, or its input's gradient, once, and hands
on a `QuantizedTensor`. The module that gets it multiplies with that record instead of casting again, where it is in
the format that its own cast would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch import ops
from te_dispatch.numerics.quantized import CANONICAL_SCALES, NVFP4_SCALINGS, Quantized
from te_dispatch.numerics.quantizers import DelayedQuantizer, Quantizer
from te_dispatch.pytorch.compile import returned, snapshot
from te_dispatch.pytorch.tensor.attributes import TRANSPOSABLE
from te_dispatch.pytorch.tensor.casting import detached, rounded
from te_dispatch.pytorch.tensor.packing import with_layout
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor, as_tensor, record_of

if TYPE_CHECKING:
    from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales


class Leaves:
    """How a product leaves its module.

    Attributes:
        quantizer: its cast.
        stochastic: whether that rounds stochastically.
        usage: ``row``, or ``both`` where whoever receives it may need a column-wise copy and cannot make one.
    """

    __slots__ = ("quantizer", "stochastic", "usage")

    def __init__(self, quantizer: Quantizer, trains: bool, stochastic: bool = False) -> None:
        self.quantizer = quantizer
        self.stochastic = stochastic
        self.usage = "both" if trains and quantizer.scaling not in TRANSPOSABLE else "row"


class Boundary:
    """The casts at a module's edges under one plan.

    They are those of the first GEMM's input and gradient, which is what the neighbours expect, but for the scale
    layout: others than the canonical one can be neither sliced nor written to. With delayed scaling each has a state of
    its own.

    Attributes:
        output, input_grad: quantizers; None for what leaves in high precision all the same.
        stochastic: whether the input's gradient is rounded stochastically.
        forward, backward: their states with delayed scaling, of one tensor each; else None.
    """

    __slots__ = ("output", "input_grad", "forward", "backward", "stochastic")

    def __init__(
        self,
        output: Quantizer | None,
        input_grad: Quantizer | None,
        forward: DelayedScales | None = None,
        backward: DelayedScales | None = None,
        stochastic: bool = False,
    ) -> None:
        self.stochastic = stochastic
        self.output = _canonical(output)
        self.input_grad = _canonical(input_grad)
        self.forward = forward
        self.backward = backward

    @classmethod
    def delayed(
        cls, input: Quantizer, grad: Quantizer, margin: int, forward: DelayedScales, backward: DelayedScales
    ) -> Boundary:
        """With delayed scaling, in the encodings of the quantizers `input` and `grad`."""
        forward.retarget([input.max_value], margin)
        backward.retarget([grad.max_value], margin)
        output = DelayedQuantizer(input.encoding, input.common, forward.scale_views[0], forward.amax_views[0])
        input_grad = DelayedQuantizer(grad.encoding, grad.common, backward.scale_views[0], backward.amax_views[0])
        return cls(output, input_grad, forward, backward)

    def as_replay(self) -> Boundary:
        """One that repeats this forward bit for bit, whatever the scales are by then, and records nothing in it."""
        if self.forward is None:
            return self
        (scale,) = self.forward.frozen_scales()
        return self._recording_nothing(scale)

    def evaluation(self) -> Boundary:
        """One for a forward that will have no backward: it uses the scale in force, and records nothing."""
        if self.forward is None:
            return self
        return self._recording_nothing(self.forward.scale_views[0])

    def _recording_nothing(self, scale: torch.Tensor) -> Boundary:
        assert self.output is not None
        output = DelayedQuantizer(self.output.encoding, self.output.common, scale, None)
        return Boundary(output, self.input_grad, self.forward, self.backward)


def _canonical(quantizer: Quantizer | None) -> Quantizer | None:
    if quantizer is None or quantizer.scale_layout == CANONICAL_SCALES:
        return quantizer
    return replace(quantizer, scale_layout=CANONICAL_SCALES)  # type: ignore[call-arg]


def operand(
    x: torch.Tensor, quantizer: Quantizer, usage: str, in_backward: bool = False, stochastic: bool = False
) -> Quantized:
    """A Function's input or incoming gradient as a GEMM operand, with the copies `usage` names.

    A `QuantizedTensor` in the quantizer's format is used as it is; the quantizer then records no amax of it.

    Args:
        stochastic: round stochastically.
    """
    if x.__class__ is QuantizedTensor:
        found = _in_format(record_of(x), quantizer, usage)
        if found is not None:
            return found if found.scale_layout != CANONICAL_SCALES else with_layout(found, quantizer.scale_layout)
    return rounded(detached(x), snapshot(quantizer, x, in_backward), usage, stochastic)


def _in_format(x: Quantized, quantizer: Quantizer, usage: str) -> Quantized | None:
    """x with all copies that `usage` names, None where it has another format or lacks one that cannot be made of it."""
    if x.encoding != quantizer.encoding or x.scaling != quantizer.scaling:
        return None
    if usage != "column" and x.row_data is None:
        return None
    if usage != "row" and x.col_data is None:
        if x.row_data is None or x.scaling not in TRANSPOSABLE:
            return None
        return ops.transpose_quantized(with_layout(x, CANONICAL_SCALES))
    return x


def leaving(x: torch.Tensor, leaves: Leaves) -> QuantizedTensor:
    """A plain gradient as it leaves a module's backward."""
    record = rounded(x, snapshot(leaves.quantizer, x, in_backward=True), leaves.usage, leaves.stochastic)
    return as_tensor(record, leaves.quantizer)


def leaving_product(
    a: Quantized,
    b: Quantized,
    leaves: Leaves,
    after: torch.Tensor,
    dtype: torch.dtype,
    in_backward: bool,
    **how: Any,
) -> QuantizedTensor:
    """A product as it leaves a module: cast from its fp32 sums, with the nominal dtype `dtype`.

    Args:
        after: an input of the Function, or the incoming gradient, as `snapshot` wants it; `in_backward` says which.
        how: the other arguments of `ops.gemm`.
    """
    quantizer = snapshot(leaves.quantizer, after, in_backward)
    if leaves.usage == "row" and not leaves.stochastic:
        out = ops.gemm(a, b, out_dtype=dtype, out_quantizer=quantizer, **how).out
        return as_tensor(out, leaves.quantizer)  # type: ignore[arg-type]
    out = ops.gemm(a, b, out_dtype=torch.float32, **how).out
    record = rounded(out, quantizer, leaves.usage, leaves.stochastic)  # type: ignore[arg-type]
    record.dtype = dtype
    return as_tensor(record, leaves.quantizer)


def outgoing(ctx: Any, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a Function returns of its `out`: `out` itself; while compiling, of a `QuantizedTensor` (stand-in, parts).

    Dynamo takes the gradient of a Function's output to be of the output's class, but the gradient of a quantized
    output is an ordinary tensor. So a traced Function returns a stand-in of the output's shape and dtype, which takes
    the gradient, with the tensors of the record beside it, and `arrived` makes the `QuantizedTensor` of them.
    """
    if out.__class__ is not QuantizedTensor or not torch.compiler.is_compiling():
        return (returned(out),)
    record = record_of(out)
    parts = [part for part in (getattr(record, name) for name in _PARTS) if part is not None]
    ctx.mark_non_differentiable(*parts)
    return returned(torch.zeros((), dtype=out.dtype, device=out.device).expand(out.shape)), *parts


def arrived(stand_in: torch.Tensor, parts: Sequence[torch.Tensor], leaves: Leaves) -> torch.Tensor:
    """The `QuantizedTensor` of a traced Function's `outgoing` results."""
    return _Arrived.apply(stand_in, _Parts(parts, leaves))  # type: ignore[no-any-return]


#: The tensors of a record that leaves a module, in the order of `outgoing`; those it has depend on `Leaves`.
_PARTS = ("row_data", "row_scale_inv", "col_data", "col_scale_inv", "global_scale_inv")


class _Parts:
    """What `_Arrived` makes a tensor of."""

    __slots__ = ("tensors", "leaves")

    def __init__(self, tensors: Sequence[torch.Tensor], leaves: Leaves) -> None:
        self.tensors = tensors
        self.leaves = leaves


class _Arrived(torch.autograd.Function):
    """(stand-in, parts of a record) -> `QuantizedTensor`; the gradient passes unlooked at."""

    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, parts: _Parts) -> torch.Tensor:
        quantizer, both = parts.leaves.quantizer, parts.leaves.usage == "both"
        row, row_scale, *rest = parts.tensors
        col, col_scale = rest[:2] if both else (None, None)
        global_scale = rest[-1] if quantizer.scaling in NVFP4_SCALINGS else None
        return QuantizedTensor(
            row, col, row_scale, col_scale, global_scale, quantizer.encoding, quantizer.scaling, CANONICAL_SCALES,
            stand_in.shape, stand_in.dtype,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None
