# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A product per group, all of them in one native call. Contracts: `te_dispatch.ops.gemm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.memory import contiguous_out
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import Quantized, row_parts
from te_dispatch.ops.checks import gemm as checks
from te_dispatch_cuda.gemm import Operand, allows_tf32, no_copy, scale_flags
from te_dispatch_cuda.gemm_calls import CODES, problem_of
from te_dispatch_cuda.gemm_plans import PLANS, make
from te_dispatch_cuda.memory import dense, dense_aligned, empty, stream_of
from te_dispatch_cuda.native import load

_native = load()


def grouped_gemm(
    a: Sequence[Operand],
    b: Sequence[Operand],
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    layout: str,
    out: Sequence[torch.Tensor] | None = None,
    accumulate: bool = False,
    bias: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    split_accumulator: bool | None = None,
) -> list[torch.Tensor]:
    """Splits in host integers. A plan per shape, launched one after the other on one workspace."""
    rows = checks.groups(a, b, splits)
    count = len(b)
    checks.grouped_options(count, out, bias)
    parts = a if rows is None else row_parts(a[0], rows)
    outs = [None] * count if out is None else out
    biases = [None] * count if bias is None else bias
    # All of them before the first is written.
    shapes = [
        checks.gemm(parts[i], b[i], layout, outs[i], accumulate, biases[i], out_dtype=out_dtype) for i in range(count)
    ]
    fast = not split_accumulator
    groups = [
        _group(parts[i], b[i], layout, shapes[i], outs[i], accumulate, biases[i], out_dtype, fast) for i in range(count)
    ]
    device = groups[0].target.device
    index = groups[0].target.get_device()
    size = max(group.size for group in groups)
    workspace = empty("workspace", (size,), torch.uint8, device) if size else None
    # Columns of addresses: a, b, their scales, outputs, biases.
    columns = [list(column) for column in zip(*(group.addresses for group in groups))]
    _native.gemm_run_grouped(
        [group.plan for group in groups], index, stream_of(index), *columns,
        0 if workspace is None else workspace.data_ptr(),
    )  # fmt: skip
    if out is None:
        return [group.target for group in groups]
    for given, group in zip(out, groups):
        if given is not group.target:
            given.copy_(group.target)
    return list(out)


def grouped_gemm_device_splits(
    a: Sequence[Operand],
    b: Sequence[Operand],
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    layout: str,
    out: Sequence[torch.Tensor] | None = None,
    accumulate: bool = False,
    bias: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    split_accumulator: bool | None = None,
) -> list[torch.Tensor]:
    """`grouped_gemm` with splits on the device, which are read back."""
    return grouped_gemm(
        a, b, splits, layout=layout, out=out, accumulate=accumulate, bias=bias, out_dtype=out_dtype,
        split_accumulator=split_accumulator,
    )  # fmt: skip


class _Group(NamedTuple):
    plan: Any
    size: int
    addresses: tuple[int, ...]
    target: torch.Tensor
    #: Tensors that were made for this call and must outlive the launch.
    held: tuple[Any, ...]


def _group(
    x: Operand,
    y: Operand,
    layout: str,
    shape: tuple[int, ...],
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    fast: bool,
) -> _Group:
    dtype = out_dtype or (x.dtype if out is None else out.dtype)
    kind: Any
    strides = None
    # Of codes with one scale each cuBLASLt reads no operand, and writes no result, at an odd place.
    multiple = CODES if isinstance(x, Quantized) and x.scaling == "tensor" else 1
    if isinstance(x, Quantized):
        left, x_scale = _copy(x, layout[0] == "N", "a", layout, multiple)
        right, y_scale = _copy(y, layout[1] == "T", "b", layout, multiple)
        right = dense_aligned(right, multiple)
        scales = x_scale.data_ptr(), y_scale.data_ptr()
        held: tuple[Any, ...] = (left, right, x_scale, y_scale)
        kind = (x.encoding, y.encoding, fast)
        if x.scaling != "tensor":
            kind = (x.encoding, y.encoding, x.scaling, y.scaling, scale_flags(x, x_scale), scale_flags(y, y_scale))
        layout = layout if x.scaling == "mxfp8" else "NT"
        strides = (left.stride(0) if left.ndim == 2 and left.shape[0] > 1 else left.shape[-1], right.shape[-1])
    else:
        left, right, scales = dense(x), dense(y), (0, 0)
        held = left, right
        kind = (x.dtype, allows_tf32()) if x.dtype is torch.float32 else x.dtype
    target = empty("out", shape, dtype, left.device) if out is None else contiguous_out(out, accumulate, multiple)
    bias = None if bias is None else dense(bias)
    held += (bias,)
    bias_at = 0 if bias is None else bias.data_ptr()
    at = left.data_ptr(), right.data_ptr(), target.data_ptr()
    index, low = target.get_device(), (at[0] | at[1] | at[2]) & 255
    key = (
        "grouped", left.shape, right.shape, strides, layout, kind, dtype, accumulate, index, low,
        None if bias is None else (bias.dtype, bias_at & 15),
    )  # fmt: skip
    plan, size = PLANS.get(key) or make(
        key, problem_of(left, right, layout, kind, index, low, dtype, accumulate, bias, strides=strides)
    )
    return _Group(plan, size, (at[0], at[1], *scales, at[2], bias_at), target, held)


def _copy(x: Quantized, row: bool, name: str, layout: str, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes contracted along their last dimension, rows of which may lie apart, and their scales; each where it lies,
    or copied where it does not start at a multiple of so many bytes."""
    data, scale = (x.row_data, x.row_scale_inv) if row else (x.col_data, x.col_scale_inv)
    if data is None or scale is None:
        raise Declined(no_copy(name, layout))
    apart = data.ndim == 2 and data.stride(1) == 1 and not data.data_ptr() % multiple
    return data if apart else dense_aligned(data, multiple), dense_aligned(scale, multiple)
