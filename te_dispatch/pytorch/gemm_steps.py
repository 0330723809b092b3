# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The GEMMs of a layer, quantized or not, as steps that the modules' autograd Functions are made of."""

from __future__ import annotations

import torch

from te_dispatch import ops
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.pytorch import scale_update
from te_dispatch.pytorch.casts import GemmCasts, Plan
from te_dispatch.pytorch.compile import snapshot
from te_dispatch.pytorch.saved import with_layout


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


def fprop(
    casts: GemmCasts, x: Quantized, weight: Quantized, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x W^T + bias in `dtype`."""
    (_, a_layout), (_, b_layout) = casts.fprop
    return ops.gemm(  # type: ignore[return-value]
        with_layout(x, a_layout),
        with_layout(weight, b_layout),
        layout="NT",
        bias=as_dtype(bias, dtype),
        out_dtype=dtype,
        split_accumulator=casts.fprop_split,
    ).out


def dgrad(casts: GemmCasts, dy: Quantized, weight: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """dy W in `dtype`."""
    (_, a_layout), (_, b_layout) = casts.dgrad
    return ops.gemm(  # type: ignore[return-value]
        with_layout(dy, a_layout),
        with_layout(weight, b_layout),
        layout="NN",
        out_dtype=dtype,
        split_accumulator=casts.dgrad_split,
    ).out


def wgrad(casts: GemmCasts, dy: Quantized, x: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """dy^T x in `dtype`."""
    (_, a_layout), (_, b_layout) = casts.wgrad
    return ops.gemm(  # type: ignore[return-value]
        with_layout(dy, a_layout),
        with_layout(x, b_layout),
        layout="TN",
        out_dtype=dtype,
        split_accumulator=casts.wgrad_split,
    ).out


def quantize_gradient(
    quantizer: Quantizer, usage: str, dy: torch.Tensor, bias_dtype: torch.dtype | None
) -> tuple[Quantized, torch.Tensor | None]:
    """The gradient cast, and its column sums where `bias_dtype` asks for them."""
    quantizer = snapshot(quantizer, dy)
    if bias_dtype is None:
        return ops.quantize(dy, quantizer, usage=usage), None
    both = ops.quantize_dbias(dy, quantizer, usage=usage, bias_dtype=bias_dtype)
    return both.quantized, both.dbias


def column_sums(dy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bias gradient by itself: (N,), summed in float32."""
    return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(dtype)


def plain_weight_grads(
    dy: torch.Tensor, x: torch.Tensor | None, weight_dtype: torch.dtype | None, bias_dtype: torch.dtype | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(weight gradient, bias gradient) in high precision; each only where its dtype is given."""
    if weight_dtype is None:
        return None, None if bias_dtype is None else column_sums(dy, bias_dtype)
    epilogue = None if bias_dtype is None else "bgrad_a"
    result = ops.gemm(dy, x, layout="TN", epilogue=epilogue, out_dtype=weight_dtype)
    return result.out, result.dbias  # type: ignore[return-value]
