# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts of many tensors at once. Contracts: `te_dispatch.ops.quantize`.

One launch for every 32 tensors, and one before it where amaxes have to be found (current scaling, nvfp4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import quantize as checks
from te_dispatch_cuda.blocks import SCALINGS, empty_record
from te_dispatch_cuda.codes import DTYPES, cast_code
from te_dispatch_cuda.memory import empty, stream_of
from te_dispatch_cuda.native import load
from te_dispatch_cuda.sources import readable

_native = load()
_F32, _U8 = torch.float32, torch.uint8
_MAXIMA: int = _native.MANY_MAXIMA


def split_quantize(
    x: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Quantizer], *, usage: str
) -> list[Quantized]:
    """Every part of x's rows with its own quantizer."""
    checks.split_quantize(x, splits, quantizers, usage)
    if not splits:
        return []
    x = readable(x)
    k, stride = x.shape[1], x.stride(0)
    address, step = x.data_ptr(), stride * x.element_size()
    parts = []
    for rows in splits:
        parts.append((address, (rows, k), rows, stride))
        address += rows * step
    return _cast_many(parts, x.dtype, x.device, quantizers, usage)


def multi_tensor_quantize(
    xs: Sequence[torch.Tensor], quantizers: Sequence[Quantizer], *, usage: str
) -> list[Quantized]:
    """Every tensor with its own quantizer."""
    checks.multi_tensor_quantize(xs, quantizers, usage)
    held = [readable(x) for x in xs]
    parts = []
    for x in held:
        shape = tuple(x.shape)
        k = shape[-1]
        if x.is_contiguous():
            rows, stride = (x.numel() // k if k else 0), k
        else:  # readable: rows of a matrix, apart
            rows, stride = shape[0], x.stride(0)
        parts.append((x.data_ptr(), shape, rows, stride))
    return _cast_many(parts, held[0].dtype, held[0].device, quantizers, usage)


def _cast_many(
    parts: list[tuple[int, tuple[int, ...], int, int]],
    dtype: torch.dtype,
    device: torch.device,
    quantizers: Sequence[Quantizer],
    usage: str,
) -> list[Quantized]:
    """Cast matrices given as (address, shape, rows, elements between rows)."""
    kind, scaling = quantizers[0].kind, quantizers[0].scaling
    wants_row, wants_column = usage != "column", usage != "row"
    computed = kind in ("current", "block")
    records, entries, epsilons = [], [], []
    for (address, shape, rows, stride), quantizer in zip(parts, quantizers):
        columns = shape[-1]
        q: Any = quantizer
        scale = amax = whole = 0
        if scaling == "tensor":
            record = _empty_tensor_record(shape, rows, dtype, device, quantizer, usage)
            if kind == "delayed":
                scale = q.scale.data_ptr()
                amax = 0 if q.amax is None else q.amax.data_ptr()
        else:
            record = empty_record(shape, rows, columns, dtype, device, q, usage)
            if record.global_scale_inv is not None:
                whole = record.global_scale_inv.data_ptr()
        entries.append(
            (
                address,
                rows,
                columns,
                stride,
                record.row_data.data_ptr() if wants_row else 0,  # type: ignore[union-attr]
                record.row_scale_inv.data_ptr() if wants_row else 0,  # type: ignore[union-attr]
                record.col_data.data_ptr() if wants_column else 0,  # type: ignore[union-attr]
                record.col_scale_inv.data_ptr() if wants_column else 0,  # type: ignore[union-attr]
                whole,
                scale,
                amax,
                cast_code(quantizer),
                computed and q.power_of_two,
                kind == "nvfp4" and q.two_d,
                q.scale_layout != CANONICAL_SCALES,
            )
        )
        epsilons.append(q.epsilon if computed else 0.0)
        records.append(record)
    maxima = None
    if kind in ("current", "nvfp4"):
        maxima = empty("workspace", (len(parts), _MAXIMA), _F32, device)
    index = device.index
    _native.cast_many(
        index, stream_of(index), SCALINGS[scaling], DTYPES[dtype], entries, epsilons,
        0 if maxima is None else maxima.data_ptr(),
    )  # fmt: skip
    return records


def _empty_tensor_record(
    shape: tuple[int, ...], rows: int, dtype: torch.dtype, device: torch.device, quantizer: Quantizer, usage: str
) -> Quantized:
    row = column = row_scale = column_scale = None
    if usage != "column":
        row = empty("row_data", shape, _U8, device)
        row_scale = empty("row_scale_inv", (1,), _F32, device)
    if usage != "row":
        column = empty("col_data", (shape[-1], rows), _U8, device)
        column_scale = row_scale if row_scale is not None else empty("col_scale_inv", (1,), _F32, device)
    return Quantized(
        row, column, row_scale, column_scale, quantizer.encoding, "tensor", CANONICAL_SCALES, shape, dtype, device
    )
