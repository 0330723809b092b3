# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products in float64. A `Quantized` stands for its values, so block scales apply within the sum over k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from te_dispatch.backend_kit.gemm import gemm_with_epilogue
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import gemm as checks
from te_dispatch.ops.gemm import Epilogue, operand_format
from te_dispatch.ops.results import Gemm
from te_dispatch.ops.shapes import rows_of
from te_dispatch_reference import casts, host
from te_dispatch_reference.activation import DERIVATIVES, FUNCTIONS
from te_dispatch_reference.host import F64


def _rows(x: torch.Tensor | Quantized, name: str, layout: str) -> F64:
    """An operand as a matrix, leading dimensions flattened, from the copy that the default `operand_format` names."""
    if isinstance(x, Quantized):
        return casts.matrix(x, prefer_column=operand_format(layout, name, x.scaling)[0] == "column")
    return host.double(x).reshape(rows_of(tuple(x.shape)), x.shape[-1])


def product(a: F64, b: F64, layout: str) -> F64:
    left = a.T if layout[0] == "T" else a
    right = b.T if layout[1] == "T" else b
    # An Inf or NaN operand is the caller's business; NumPy would warn.
    with np.errstate(all="ignore"):
        return left @ right


@gemm_with_epilogue
def gemm(
    a: torch.Tensor | Quantized,
    b: torch.Tensor | Quantized,
    layout: str,
    e: Epilogue,
    split_accumulator: bool | None,
) -> Gemm:
    """`split_accumulator` has nothing to choose: sums are float64 either way."""
    left, right = _rows(a, "a", layout), _rows(b, "b", layout)
    with np.errstate(invalid="ignore"):  # 0 times Inf is NaN
        z = e.alpha * product(left, right, layout)
    if e.bias is not None:
        z = z + host.double(e.bias)
    device = a.device
    aux_out: torch.Tensor | Quantized | None = None
    dbias = None
    with np.errstate(invalid="ignore", over="ignore"):  # of NaN and Inf, which operands may hold
        if e.kind == "gelu":
            aux_out = _rounded("aux", z, e.shape, e.dtype, device, e.aux_quantizer)
            z = FUNCTIONS["gelu"](z)
        elif e.kind == "dgelu":
            assert e.aux is not None
            z = z * DERIVATIVES["gelu"](casts.values_of(e.aux, "aux").reshape(z.shape))
            dbias = z.sum(0)
        elif e.kind == "bgrad_a":
            dbias = left.sum(0 if layout[0] == "T" else 1)
        elif e.kind == "bgrad_b":
            dbias = right.sum(1 if layout[1] == "T" else 0)
    dbias_out = None if dbias is None else host.result("dbias", dbias, e.dtype, device)
    if e.out is None:
        return Gemm(_rounded("out", z, e.shape, e.dtype, device, e.out_quantizer), aux_out, dbias_out)
    host.write(e.out, host.double(e.out).reshape(z.shape) + z if e.accumulate else z)
    return Gemm(e.out, aux_out, dbias_out)


def _rounded(
    role: str, z: F64, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, quantizer: Quantizer | None
) -> torch.Tensor | Quantized:
    """One rounding to `dtype`, or to float32 and then the cast."""
    if quantizer is None:
        return host.result(role, z.reshape(shape), dtype, device)
    with np.errstate(over="ignore"):
        return casts.quantized(z.astype(np.float32), shape, quantizer, "row", dtype, device)


def grouped_gemm(
    a: Sequence[torch.Tensor | Quantized],
    b: Sequence[torch.Tensor | Quantized],
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    layout: str,
    out: Sequence[torch.Tensor] | None = None,
    accumulate: bool = False,
    bias: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    split_accumulator: bool | None = None,
) -> list[torch.Tensor]:
    """Splits on the device are read back. Everything is checked before the first group is computed."""
    rows = checks.groups(a, b, splits)
    groups = a if rows is None else _dealt(a[0], rows)
    checks.grouped_options(len(groups), out, bias)
    outs: Sequence[torch.Tensor | None] = out if out is not None else [None] * len(groups)
    biases: Sequence[torch.Tensor | None] = bias if bias is not None else [None] * len(groups)
    for x, y, target, shift in zip(groups, b, outs, biases, strict=True):
        checks.gemm(x, y, layout, target, accumulate, shift, out_dtype=out_dtype)
    results = [
        gemm(x, y, layout=layout, out=target, accumulate=accumulate, bias=shift, out_dtype=out_dtype)
        for x, y, target, shift in zip(groups, b, outs, biases, strict=True)
    ]
    return [cast(torch.Tensor, r.out) for r in results]


def _dealt(x: torch.Tensor | Quantized, rows: list[int]) -> list[torch.Tensor | Quantized]:
    ends = np.cumsum(rows).tolist()
    return [_row_slice(x, end - n, end) for n, end in zip(rows, ends, strict=True)]


def _row_slice(x: torch.Tensor | Quantized, start: int, end: int) -> torch.Tensor | Quantized:
    if not isinstance(x, Quantized):
        return x[start:end]
    if x.scaling != "tensor":
        raise ValueError(
            f"a: got one tensor with {x.scaling} scaling to split, expected tensor scaling, or one per group"
        )
    return Quantized(
        None if x.row_data is None else x.row_data[start:end],
        None if x.col_data is None else x.col_data[:, start:end],
        x.row_scale_inv,
        x.col_scale_inv,
        x.encoding,
        x.scaling,
        x.scale_layout,
        (end - start, x.shape[1]),
        x.dtype,
        x.device,
    )
