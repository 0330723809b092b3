# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The GEMMs of a layer as steps that the modules' autograd Functions are made of.

The steps take the casts of one weight, or None for high precision: operands are then plain tensors, else `Quantized`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.numerics.quantized import Quantized, single_copy
from te_dispatch.pytorch.compile import snapshot
from te_dispatch.pytorch.distributed.arguments import Division
from te_dispatch.pytorch.distributed.tensor_parallel import leaving, leaving_gradient
from te_dispatch.pytorch.fp8 import scale_update
from te_dispatch.pytorch.fp8.casts import GemmCasts, Plan
from te_dispatch.pytorch.fp8.quantized_io import Leaves, leaving_product, operand
from te_dispatch.pytorch.modules.weight_grads import WeightSink
from te_dispatch.pytorch.tensor.casting import detached
from te_dispatch.pytorch.tensor.packing import with_layout
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor


def note_backward(plan: Plan, root: int | None, dy: torch.Tensor) -> None:
    """Have the backward scales updated when this backward pass, whose incoming gradient is `dy`, ends."""
    if plan.backward_group is None:
        return
    if torch.compiler.is_compiling():
        scale_update.note_compiled_backward_cast(plan.backward_group, dy)
    else:
        scale_update.note_backward_cast(plan.backward_group, root)


def as_dtype(x: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return x if x is None or x.dtype == dtype else x.to(dtype)


def cast_if_needed(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor in another dtype, differentiable even under ``torch.no_grad()``; itself where it has that dtype."""
    with torch.enable_grad():
        return as_dtype(tensor, dtype)


#: Which gradients of a product x W^T + bias to compute: the dtypes of x's, the weight's and the bias's, None for those
#: not wanted.
Wanted = tuple["torch.dtype | None", "torch.dtype | None", "torch.dtype | None"]


def weight_operand(
    casts: GemmCasts | None, weight: torch.Tensor, cached: Quantized | None, x: torch.Tensor, trains_x: bool
) -> Any:
    """The weight as the product with x reads it: in x's dtype, or quantized here unless it is `cached`.

    Args:
        x: the Function's input. trains_x: whether a dgrad may read the weight, too.
    """
    if casts is None:
        return as_dtype(detached(weight), x.dtype)
    if cached is not None:
        return cached
    usage = casts.weight_usage[1 if trains_x else 0]
    if weight.__class__ is QuantizedTensor:
        return operand(weight, casts.weight, usage)
    return ops.quantize(weight, snapshot(casts.weight, x), usage=usage)


def product(
    casts: GemmCasts | None,
    x: Any,
    weight: Any,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    leaves: Leaves | None = None,
    after: torch.Tensor | None = None,
    division: Division | None = None,
) -> torch.Tensor:
    """x W^T + bias in `dtype`, which is that of plain operands.

    Args:
        leaves: how it leaves the module, if quantized; `after` is then the Function's input.
        division: of the module. Where its ranks divide this weight by inputs, the result is the sum over them, and the
            bias, which each of them has, comes behind that.
    """
    if division is not None and division.row:
        out = leaving(product(casts, x, weight, None, dtype), division)
        return out if bias is None else torch.add(out, bias.to(dtype))
    if casts is not None:
        return fprop(casts, x, weight, bias, dtype, leaves, after)
    return ops.gemm(x, weight, layout="NT", bias=as_dtype(bias, dtype)).out  # type: ignore[return-value]


def product_gradients(
    casts: GemmCasts | None,
    dy: torch.Tensor,
    x: Any,
    weight: Any,
    wanted: Wanted,
    leaves: Leaves | None = None,
    into: WeightSink | None = None,
    division: Division | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `product`: of x, weight and bias.

    Args:
        into: where the weight's gradient goes instead of being returned.
        dy: contiguous, may be a `QuantizedTensor`.
        leaves: how the gradient of x leaves the module, if quantized.
        x, weight: as the product read them, or a plain weight in its own dtype; None where no wanted gradient reads it.
        division: as in `product`.
    """
    x_dtype, weight_dtype, bias_dtype = wanted
    if division is not None and division.row:
        db = None if bias_dtype is None else column_sums(dy, bias_dtype)
        if x_dtype is None and weight_dtype is None:
            return None, None, db
        dy, wanted = leaving_gradient(dy, division), (x_dtype, weight_dtype, None)
        return *product_gradients(casts, dy, x, weight, wanted, leaves, into)[:2], db
    if casts is None:
        dy = detached(dy)
        dx = None if x_dtype is None else ops.gemm(dy, as_dtype(weight, dy.dtype), layout="NN").out
        dw, db = plain_weight_grads(dy, x, weight_dtype, bias_dtype, into)
        return dx, dw, db  # type: ignore[return-value]
    usage = (x_dtype is not None) + 2 * (weight_dtype is not None)
    if not usage:
        return None, None, None if bias_dtype is None else column_sums(dy, bias_dtype)
    dyq, db = quantize_gradient(casts, casts.grad_usage[usage], dy, bias_dtype)
    dx = None if x_dtype is None else dgrad(casts, dyq, weight, x_dtype, leaves, dy)
    dw = None if weight_dtype is None else wgrad(casts, dyq, x, weight_dtype, into)
    return dx, dw, db


def _laid_out(formats: Any, a: Quantized, b: Quantized) -> tuple[Quantized, Quantized]:
    """Operands as the GEMM of these `formats` reads them: scales in its layout, one copy where the other is rotated."""
    (a_usage, a_layout), (b_usage, b_layout) = formats
    if a.scaling == "nvfp4_rht":
        a = single_copy(a, a_usage)
    if b.scaling == "nvfp4_rht":
        b = single_copy(b, b_usage)
    return with_layout(a, a_layout), with_layout(b, b_layout)


def fprop(
    casts: GemmCasts,
    x: Quantized,
    weight: Quantized,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    leaves: Leaves | None = None,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + bias in `dtype`, and quantized where it `leaves` so."""
    x, weight = _laid_out(casts.fprop, x, weight)
    bias, split = as_dtype(bias, dtype), casts.fprop_split
    if leaves is not None:
        assert after is not None
        return leaving_product(x, weight, leaves, after, dtype, False, layout="NT", bias=bias, split_accumulator=split)
    return ops.gemm(  # type: ignore[return-value]
        x, weight, layout="NT", bias=bias, out_dtype=dtype, split_accumulator=split
    ).out


def dgrad(
    casts: GemmCasts,
    dy: Quantized,
    weight: Quantized,
    dtype: torch.dtype,
    leaves: Leaves | None = None,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """dy W in `dtype`, and quantized where it `leaves` so."""
    dy, weight = _laid_out(casts.dgrad, dy, weight)
    if leaves is not None:
        assert after is not None
        return leaving_product(dy, weight, leaves, after, dtype, True, layout="NN", split_accumulator=casts.dgrad_split)
    return ops.gemm(  # type: ignore[return-value]
        dy, weight, layout="NN", out_dtype=dtype, split_accumulator=casts.dgrad_split
    ).out


def wgrad(
    casts: GemmCasts, dy: Quantized, x: Quantized, dtype: torch.dtype, into: WeightSink | None = None
) -> torch.Tensor | None:
    """dy^T x in `dtype`; None where it goes `into` buffers."""
    dy, x = _laid_out(casts.wgrad, dy, x)
    if into is not None:
        into.take(functools.partial(ops.gemm, dy, x, layout="TN", split_accumulator=casts.wgrad_split))
        return None
    return ops.gemm(  # type: ignore[return-value]
        dy, x, layout="TN", out_dtype=dtype, split_accumulator=casts.wgrad_split
    ).out


def quantize_gradient(
    casts: GemmCasts, usage: str, dy: torch.Tensor, bias_dtype: torch.dtype | None
) -> tuple[Quantized, torch.Tensor | None]:
    """The gradient cast, and its column sums where `bias_dtype` asks for them."""
    assert casts.grad is not None
    if dy.__class__ is QuantizedTensor or casts.stochastic:  # the cast that sums takes no random numbers
        dyq = operand(dy, casts.grad, usage, True, casts.stochastic)
        return dyq, None if bias_dtype is None else column_sums(dy, bias_dtype)
    quantizer = snapshot(casts.grad, dy, in_backward=True)
    if bias_dtype is None:
        return ops.quantize(dy, quantizer, usage=usage), None
    both = ops.quantize_dbias(dy, quantizer, usage=usage, bias_dtype=bias_dtype)
    return both.quantized, both.dbias


def column_sums(dy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bias gradient by itself: (N,), summed in float32."""
    dy = detached(dy, torch.float32)
    return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(dtype)


def plain_weight_grads(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    into: WeightSink | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(weight gradient, bias gradient) in high precision; each only where its dtype is given, and the former only
    where it does not go `into` buffers."""
    if weight_dtype is None:
        return None, None if bias_dtype is None else column_sums(dy, bias_dtype)
    epilogue = None if bias_dtype is None else "bgrad_a"
    if into is not None:
        if into.postpones:
            epilogue = None
        made = into.take(functools.partial(ops.gemm, dy, x, layout="TN", epilogue=epilogue))
        if bias_dtype is None:
            return None, None
        return None, column_sums(dy, bias_dtype) if made is None else as_dtype(made.dbias, bias_dtype)
    result = ops.gemm(dy, x, layout="TN", epilogue=epilogue, out_dtype=weight_dtype)
    return result.out, result.dbias  # type: ignore[return-value]
