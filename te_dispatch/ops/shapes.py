# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Building blocks of shape functions: what memory a quantized result takes.

Shape functions run on meta and fake tensors, and inside compiled graphs, where they allocate the outputs. They only
call `torch.empty` and read shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_dispatch.numerics.quantized import CANONICAL_SCALES, NVFP4_SCALINGS, SCALINGS, FakeQuantized

if TYPE_CHECKING:
    import torch

    from te_dispatch.numerics.quantizers import Quantizer

USAGES = ("row", "column", "both")


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def rows_of(shape: tuple[int, ...]) -> int:
    """The product of all dimensions but the last."""
    m = 1
    for size in shape[:-1]:
        m *= size
    return m


def data_shapes(shape: tuple[int, ...], scaling: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of row_data and col_data (`Quantized`'s table)."""
    m, k = rows_of(shape), shape[-1]
    if scaling in NVFP4_SCALINGS:
        return (*shape[:-1], ceil_div(k, 2)), (k, ceil_div(m, 2))
    if scaling == "mxfp8":
        return tuple(shape), (m, k)
    return tuple(shape), (k, m)


def scale_shapes(shape: tuple[int, ...], scaling: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of canonical row_scale_inv and col_scale_inv (`Quantized`'s table)."""
    m, k = rows_of(shape), shape[-1]
    if scaling == "tensor":
        return (1,), (1,)
    if scaling == "block_1d":
        return (m, ceil_div(k, 128)), (k, ceil_div(m, 128))
    if scaling == "block_2d":
        return (ceil_div(m, 128), ceil_div(k, 128)), (ceil_div(k, 128), ceil_div(m, 128))
    if scaling == "mxfp8":
        return (m, ceil_div(k, 32)), (ceil_div(m, 32), k)
    if scaling in NVFP4_SCALINGS:
        return (m, ceil_div(k, 16)), (k, ceil_div(m, 16))
    raise ValueError(f"scaling must be one of {', '.join(SCALINGS)}, got {scaling!r}")


_GLOBAL_SCALES = {"nvfp4": (1,), "nvfp4_rht": (2,)}


def global_scale_shape(scaling: str) -> tuple[int, ...] | None:
    """Shape of global_scale_inv; None where there is none."""
    return _GLOBAL_SCALES.get(scaling)


def laid_out_shapes(shape: tuple[int, ...], scaling: str, layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of row_scale_inv and col_scale_inv in a scale layout (`te_dispatch.ops.relayout_scales`)."""
    row, column = scale_shapes(shape, scaling)
    if layout == CANONICAL_SCALES:
        return row, column
    if layout == "gemm_1d":
        return (row[1], _up(row[0], 4)), (column[1], _up(column[0], 4))
    if layout == "gemm_2d":
        return (row[0], _up(row[1], 4)), (column[0], _up(column[1], 4))
    if scaling == "mxfp8":  # swizzled with the contracted dimension's blocks last
        column = (column[1], column[0])
    return (_up(row[0], 128), _up(row[1], 4)), (_up(column[0], 128), _up(column[1], 4))


def _up(size: int, multiple: int) -> int:
    return ceil_div(size, multiple) * multiple


def empty_quantized(
    shape: tuple[int, ...], quantizer: Quantizer, usage: str, dtype: torch.dtype, device: torch.device
) -> FakeQuantized:
    """A `Quantized` of the right shapes, uninitialized."""
    import torch

    scaling = quantizer.scaling
    data, scales = data_shapes(shape, scaling), laid_out_shapes(shape, scaling, quantizer.scale_layout)
    scale_dtype = torch.uint8 if scaling in ("mxfp8", *NVFP4_SCALINGS) else torch.float32
    row = usage in ("row", "both")
    column = usage in ("column", "both")
    whole = global_scale_shape(scaling)
    row_scale = torch.empty(scales[0], dtype=scale_dtype, device=device) if row else None
    if scaling == "tensor" and row:
        col_scale = row_scale  # one tensor, one scale
    else:
        col_scale = torch.empty(scales[1], dtype=scale_dtype, device=device) if column else None
    return FakeQuantized(
        torch.empty(data[0], dtype=torch.uint8, device=device) if row else None,
        torch.empty(data[1], dtype=torch.uint8, device=device) if column else None,
        row_scale,
        col_scale if column else None,
        quantizer.encoding,
        scaling,
        quantizer.scale_layout,
        tuple(shape),
        dtype,
        device,
        torch.empty(whole, dtype=torch.float32, device=device) if whole else None,
    )
