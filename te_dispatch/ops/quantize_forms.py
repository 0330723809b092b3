# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantized tensors in another form: with the other copy, with scales in another layout, in another encoding.

Part of the quantize family, exported by `te_dispatch.ops.quantize`. Bytes move; values stay what they are wherever the
new form can hold them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_dispatch.core.operator import Fact, operator

if TYPE_CHECKING:
    import torch

    from te_dispatch.numerics.quantized import Quantized


def _transpose_shape(x: Any) -> Quantized:
    import torch

    from te_dispatch.numerics.quantized import FakeQuantized
    from te_dispatch.ops.shapes import data_shapes, scale_shapes

    data = torch.empty(data_shapes(x.shape, x.scaling)[1], dtype=torch.uint8, device=x.device)
    scale = x.row_scale_inv
    if x.scaling == "block_2d":
        scale = torch.empty(scale_shapes(x.shape, x.scaling)[1], dtype=scale.dtype, device=x.device)
    return FakeQuantized(
        x.row_data, data, x.row_scale_inv, scale, x.encoding, x.scaling, x.scale_layout, x.shape, x.dtype, x.device
    )


@operator(family="quantize", version=1, shape=_transpose_shape, device="x.device")
def transpose_quantized(x: Quantized) -> Quantized:
    """Add the column-wise copy to a row-wise one by moving bytes: exact for ``tensor`` and ``block_2d`` scaling.

    Args:
        x: with row_data, canonical scales.

    Returns:
        A record that shares x's row-wise tensors and has col_data (K, M).

    Raises:
        ValueError: for ``block_1d``, ``mxfp8`` and ``nvfp4``, whose column-wise copy has other scales and must come
            from the high-precision input.
    """
    raise NotImplementedError


def _relayout_shape(x: Any, *, scale_layout: str) -> Quantized:
    import torch

    from te_dispatch.numerics.quantized import FakeQuantized
    from te_dispatch.ops.shapes import laid_out_shapes

    if scale_layout == x.scale_layout:
        row, column = x.row_scale_inv, x.col_scale_inv
    else:
        shapes = laid_out_shapes(x.shape, x.scaling, scale_layout)
        row, column = (
            None if scale is None else torch.empty(shape, dtype=scale.dtype, device=x.device)
            for scale, shape in zip((x.row_scale_inv, x.col_scale_inv), shapes)
        )
    return FakeQuantized(
        x.row_data, x.col_data, row, column, x.encoding, x.scaling, scale_layout, x.shape, x.dtype, x.device,
        x.global_scale_inv,
    )  # fmt: skip


#: Where the scales of blocks may lie.
SCALE_LAYOUTS = ("canonical", "gemm_1d", "gemm_2d", "swizzled_32x4x4")


@operator(
    family="quantize",
    version=1,
    shape=_relayout_shape,
    device="x.device",
    facts=(Fact("x.scale_layout", "x.scale_layout", doc="scale layout of `x`"),),
    words={"scale_layout": SCALE_LAYOUTS, "x.scale_layout": SCALE_LAYOUTS},
)
def relayout_scales(x: Quantized, *, scale_layout: str) -> Quantized:
    """The same values with scales in another layout.

    Args:
        x: any scale layout.
        scale_layout: ``canonical`` or one of

            ``gemm_1d``: block_1d scales transposed and padded for block-scaled GEMM libraries: row-wise
            (ceil(K/128), roundup(M, 4)), column-wise (ceil(M/128), roundup(K, 4)); padding is zero.
            ``gemm_2d``: block_2d scales, rows padded: row-wise (ceil(M/128), roundup(ceil(K/128), 4)), column-wise
            (ceil(K/128), roundup(ceil(M/128), 4)); padding is zero.
            ``swizzled_32x4x4``: mxfp8 and nvfp4 scales as cuBLASLt tiles them: 128x4 tiles of scales, each stored as
            32x4x4 (scale (r, c) of a tile at ((r % 32) * 4 + r // 32) * 4 + c), tiles row-major, padding zero.

    Returns:
        A record that shares x's data. Scales that are in that layout already may be x's own, too.
    """
    raise NotImplementedError


def _convert_shape(x: Any, *, encoding: str, **_: Any) -> Quantized:
    import torch

    from te_dispatch.numerics.quantized import FakeQuantized

    def like(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else torch.empty_like(t)

    row_scale = like(x.row_scale_inv)
    col_scale = row_scale if x.col_scale_inv is x.row_scale_inv else like(x.col_scale_inv)
    return FakeQuantized(
        like(x.row_data), like(x.col_data), row_scale, col_scale, encoding, x.scaling, x.scale_layout, x.shape,
        x.dtype, x.device,
    )  # fmt: skip


@operator(
    family="quantize",
    version=1,
    shape=_convert_shape,
    device="x.device",
    words={"overflow": ("saturate", "error")},
    dtypes=("encoding",),
    mutates=("count",),
)
def convert_encoding(
    x: Quantized, *, encoding: str, overflow: str = "saturate", count: torch.Tensor | None = None
) -> Quantized:
    """Re-tag and, where codes differ, rewrite FP8 data between the OCP and FNUZ forms of one format.

    The same byte reads half as much in FNUZ, so scale_inv doubles (OCP to FNUZ) or halves. OCP to FNUZ is exact for
    finite codes; -0 becomes +0; NaN (and e5m2's Inf) becomes 80. FNUZ to OCP is exact below the common maximum, and 80
    (NaN) becomes 7F; the codes beyond the maximum (e4m3fnuz 7F and FF, +-240) have no OCP counterpart: ``saturate``
    gives the largest finite value and adds to `count`, ``error`` raises.

    Args:
        x: ``tensor`` or block scaling with fp32 scales.
        encoding: the other form of x's format.
        overflow: ``saturate`` or ``error``.
        count: int64 (1,), incremented by the number of saturated values (row-wise copy if there is one).

    Raises:
        ValueError: formats differ (e4m3 to e5m2), or ``error`` met a code that does not convert.
    """
    raise NotImplementedError
