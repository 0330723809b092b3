# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Layouts of block scales other than the canonical one (`te_dispatch.ops.quantize.relayout_scales` defines them)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.ops.shapes import ceil_div, scale_shapes

Scales = NDArray[Any]

_SCALINGS = {
    "gemm_1d": ("block_1d",),
    "gemm_2d": ("block_2d",),
    "swizzled_32x4x4": ("mxfp8", "nvfp4"),
}
LAYOUTS = (CANONICAL_SCALES, *_SCALINGS)


def _padded(scales: Scales, rows: int, columns: int) -> Scales:
    """Zero-padded up to multiples of (rows, columns)."""
    extra = [(0, -size % multiple) for size, multiple in zip(scales.shape, (rows, columns), strict=True)]
    return np.pad(scales, extra)


def _per_line(scales: Scales, scaling: str, column: bool) -> Scales:
    """(lines that are not contracted, blocks along the contracted dimension); its own inverse.

    Only the column-wise scales of mxfp8 are stored the other way round, as their data is.
    """
    return scales.T if scaling == "mxfp8" and column else scales


def to_layout(scales: Scales, layout: str, scaling: str, column: bool) -> Scales:
    """Canonical scales of one copy in another layout."""
    if layout == "gemm_1d":
        return _padded(scales.T, 1, 4)
    if layout == "gemm_2d":
        return _padded(scales, 1, 4)
    if layout == "swizzled_32x4x4":
        padded = _padded(_per_line(scales, scaling, column), 128, 4)
        # (tile row, 4, 32, tile column, 4): row r of a tile is 32 * (r // 32) + r % 32.
        tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
        return tiles.transpose(0, 3, 2, 1, 4).reshape(padded.shape)
    return scales


def canonical_scales(scales: Scales, x: Quantized, column: bool) -> Scales:
    """The canonical scales of one copy of x, whose scales lie in `x.scale_layout`."""
    rows, columns = scale_shapes(x.shape, x.scaling)[1 if column else 0]
    if x.scale_layout == "gemm_1d":
        return scales.T[:rows, :columns]
    if x.scale_layout == "gemm_2d":
        return scales[:rows, :columns]
    if x.scale_layout == "swizzled_32x4x4":
        per_line = (columns, rows) if x.scaling == "mxfp8" and column else (rows, columns)
        tile_rows, tile_columns = ceil_div(per_line[0], 128), ceil_div(per_line[1], 4)
        tiles = scales.reshape(tile_rows, tile_columns, 32, 4, 4).transpose(0, 3, 2, 1, 4)
        lines = tiles.reshape(tile_rows * 128, tile_columns * 4)[: per_line[0], : per_line[1]]
        return _per_line(lines, x.scaling, column)
    if x.scale_layout != CANONICAL_SCALES:
        raise ValueError(f"x: got scale layout {x.scale_layout!r}, expected one of {', '.join(LAYOUTS)}")
    return scales
