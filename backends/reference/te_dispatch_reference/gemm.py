# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products in float64. A `Quantized` stands for its values, so block scales apply within the sum over k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from te_dispatch.numerics.encodings import encoding
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.gemm import EPILOGUES, LAYOUTS, gemm_sizes, operand_format, out_shape
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


def _check_operands(a: Any, b: Any, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, expected one of {', '.join(LAYOUTS)}")
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Quantized):
            host.check_float(name, x)
        elif x.row_data is None and x.col_data is None:
            raise ValueError(f"{name}: has neither a row-wise nor a column-wise copy")
        if len(x.shape) < 2:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected at least two dimensions")
    if isinstance(a, Quantized) != isinstance(b, Quantized):
        raise ValueError("b: expected both operands quantized or neither")
    if isinstance(a, Quantized):
        if encoding(a.encoding).fnuz != encoding(b.encoding).fnuz:
            raise ValueError(f"b: got encoding {b.encoding}, expected the flavour of a's {a.encoding}")
    elif a.dtype != b.dtype:
        raise ValueError(f"b: got dtype {b.dtype}, expected a's, {a.dtype}")
    k = gemm_sizes(a, b, layout)[2]
    k_b = b.shape[-1] if layout == "NT" else rows_of(tuple(b.shape))
    if k != k_b:
        raise ValueError(
            f"b: got {tuple(b.shape)} for a {tuple(a.shape)} in layout {layout}, expected k = {k}, not {k_b}"
        )


def _check_options(
    a: Any,
    b: Any,
    layout: str,
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> None:
    if accumulate and out is None:
        raise ValueError("accumulate: given without out, expected out to add to")
    host.check_out_dtype(out_dtype)
    if out is not None:
        host.check_float("out", out)
        host.check_shape("out", out, out_shape(a, b, layout))
        if out_dtype is not None and out_dtype != out.dtype:
            raise ValueError(f"out_dtype: got {out_dtype}, expected out's, {out.dtype}")
    if bias is not None:
        host.check_float("bias", bias)
        host.check_shape("bias", bias, (gemm_sizes(a, b, layout)[1],))


def _check_epilogue(
    a: Any, b: Any, layout: str, epilogue: str | None, aux: Any, aux_quantizer: Quantizer | None
) -> None:
    if epilogue is not None and epilogue not in EPILOGUES:
        raise ValueError(f"epilogue: got {epilogue!r}, expected one of {', '.join(EPILOGUES)} or None")
    if (aux is not None) != (epilogue == "dgelu"):
        raise ValueError(
            f"aux: {'given' if aux is not None else 'not given'} with epilogue {epilogue}, expected for dgelu"
        )
    if aux is not None and math.prod(aux.shape) != math.prod(out_shape(a, b, layout)):
        raise ValueError(f"aux: got shape {tuple(aux.shape)}, expected {out_shape(a, b, layout)}")
    if aux_quantizer is not None and epilogue != "gelu":
        raise ValueError(f"aux_quantizer: given with epilogue {epilogue}, expected gelu, whose aux it quantizes")


def gemm(
    a: torch.Tensor | Quantized,
    b: torch.Tensor | Quantized,
    *,
    layout: str,
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    aux: torch.Tensor | Quantized | None = None,
    aux_quantizer: Quantizer | None = None,
    out_dtype: torch.dtype | None = None,
    out_quantizer: Quantizer | None = None,
    split_accumulator: bool | None = None,
) -> Gemm:
    """`split_accumulator` has nothing to choose: sums are float64 either way."""
    _check_operands(a, b, layout)
    _check_options(a, b, layout, out, accumulate, bias, out_dtype)
    dtype = out_dtype or (out.dtype if out is not None else a.dtype)
    _check_epilogue(a, b, layout, epilogue, aux, aux_quantizer)
    if out is not None and out_quantizer is not None:
        raise ValueError("out_quantizer: given with out, expected one or the other")

    left, right = _rows(a, "a", layout), _rows(b, "b", layout)
    z = alpha * product(left, right, layout)
    if bias is not None:
        z = z + host.double(bias)
    shape, device = out_shape(a, b, layout), a.device
    aux_out: torch.Tensor | Quantized | None = None
    dbias = None
    if epilogue == "gelu":
        aux_out = _rounded("aux", z, shape, dtype, device, aux_quantizer)
        z = FUNCTIONS["gelu"](z)
    elif epilogue == "dgelu":
        assert aux is not None
        z = z * DERIVATIVES["gelu"](casts.values_of(aux, "aux").reshape(z.shape))
        dbias = z.sum(0)
    elif epilogue == "bgrad_a":
        dbias = left.sum(0 if layout[0] == "T" else 1)
    elif epilogue == "bgrad_b":
        dbias = right.sum(1 if layout[1] == "T" else 0)
    dbias_out = None if dbias is None else host.result("dbias", dbias, dtype, device)
    if out is None:
        return Gemm(_rounded("out", z, shape, dtype, device, out_quantizer), aux_out, dbias_out)
    host.write(out, host.double(out).reshape(z.shape) + z if accumulate else z)
    return Gemm(out, aux_out, dbias_out)


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
    groups = _groups(a, b, splits)
    for name, items in (("b", b), ("out", out), ("bias", bias)):
        if items is not None and len(items) != len(groups):
            raise ValueError(f"{name}: got {len(items)}, expected {len(groups)}, one per group")
    outs: Sequence[torch.Tensor | None] = out if out is not None else [None] * len(groups)
    biases: Sequence[torch.Tensor | None] = bias if bias is not None else [None] * len(groups)
    for x, y, target, shift in zip(groups, b, outs, biases, strict=True):
        _check_operands(x, y, layout)
        _check_options(x, y, layout, target, accumulate, shift, out_dtype)
    results = [
        gemm(x, y, layout=layout, out=target, accumulate=accumulate, bias=shift, out_dtype=out_dtype)
        for x, y, target, shift in zip(groups, b, outs, biases, strict=True)
    ]
    return [cast(torch.Tensor, r.out) for r in results]


def _groups(
    a: Sequence[torch.Tensor | Quantized], b: Sequence[Any], splits: Sequence[int] | torch.Tensor | None
) -> Sequence[torch.Tensor | Quantized]:
    if splits is None:
        return a
    if len(a) != 1:
        raise ValueError(f"a: got {len(a)} tensors with splits, expected one whose rows are dealt to the groups")
    rows = [int(n) for n in (splits.tolist() if isinstance(splits, torch.Tensor) else splits)]
    whole = a[0]
    if len(whole.shape) != 2:
        raise ValueError(f"a: got shape {tuple(whole.shape)}, expected (M, K) to split")
    if any(n < 0 for n in rows) or sum(rows) != whole.shape[0]:
        raise ValueError(f"splits: got {rows}, expected non-negative numbers that add up to {whole.shape[0]} rows")
    ends = np.cumsum(rows).tolist()
    return [_row_slice(whole, end - n, end) for n, end in zip(rows, ends, strict=True)]


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
