# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Layouts of block scales. Contract: `te_dispatch.ops.relayout_scales`."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.ops.checks import quantize as checks
from te_dispatch.ops.shapes import scale_shapes


def relayout_scales(x: Quantized, *, scale_layout: str) -> Quantized:
    """The same values with scales in another layout."""
    checks.relayout_scales(x, scale_layout)
    return laid_out(canonical(x), scale_layout)


def laid_out(x: Quantized, scale_layout: str) -> Quantized:
    """A record with canonical scales with them in another layout: itself where that is the canonical one, too."""
    if scale_layout == CANONICAL_SCALES:
        return x
    to = _TO[scale_layout]
    row = None if x.row_scale_inv is None else to(x.row_scale_inv)
    column = None if x.col_scale_inv is None else to(_contracted_last(x.col_scale_inv, x.scaling))
    return _with_scales(x, row, column, scale_layout)


def canonical(x: Quantized) -> Quantized:
    """`x` with canonical scales: itself where it has them."""
    if x.scale_layout == CANONICAL_SCALES:
        return x
    shapes = scale_shapes(x.shape, x.scaling)
    back = _FROM[x.scale_layout]
    row = None if x.row_scale_inv is None else back(x.row_scale_inv, shapes[0])
    column = None
    if x.col_scale_inv is not None:
        shape = (shapes[1][1], shapes[1][0]) if x.scaling == "mxfp8" else shapes[1]
        column = _contracted_last(back(x.col_scale_inv, shape), x.scaling).contiguous()
    return _with_scales(x, row, column, CANONICAL_SCALES)


def _contracted_last(scale: torch.Tensor, scaling: str) -> torch.Tensor:
    """Column-wise scales with the contracted dimension's blocks last: only mxfp8 keeps them the other way round."""
    return scale.t() if scaling == "mxfp8" else scale


def _with_scales(x: Quantized, row: torch.Tensor | None, column: torch.Tensor | None, layout: str) -> Quantized:
    return Quantized(
        x.row_data, x.col_data, row, column, x.encoding, x.scaling, layout, x.shape, x.dtype, x.device,
        x.global_scale_inv,
    )  # fmt: skip


def pad_matrix(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A matrix with `rows` and `columns` of zeros added behind."""
    if x.numel():
        return pad(x, (0, columns, 0, rows))
    # PyTorch 2.9 and 2.10 refuse to pad one dimension where another is empty.
    return x.new_zeros(x.shape[0] + rows, x.shape[1] + columns)


def _copied(scale: torch.Tensor) -> torch.Tensor:
    """Contiguous, and memory of its own also where nothing had to move."""
    return scale.clone(memory_format=torch.contiguous_format)


def _to_gemm_1d(scale: torch.Tensor) -> torch.Tensor:
    transposed = scale.t()
    return pad_matrix(transposed, 0, -transposed.shape[1] % 4).contiguous()


def _from_gemm_1d(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return _copied(scale[:, : shape[0]].t())


def _to_gemm_2d(scale: torch.Tensor) -> torch.Tensor:
    return pad_matrix(scale, 0, -scale.shape[1] % 4).contiguous()


def _from_gemm_2d(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return _copied(scale[:, : shape[1]])


def _to_swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Scale (32 i + l, c) of a 128x4 tile goes to (l * 4 + i) * 4 + c."""
    rows, columns = -scale.shape[0] % 128, -scale.shape[1] % 4
    padded = pad_matrix(scale, rows, columns)
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(padded.shape)


def _from_swizzled(scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    rows, columns = shape[0] + -shape[0] % 128, shape[1] + -shape[1] % 4
    tiles = scale.reshape(rows // 128, columns // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(rows, columns)[: shape[0], : shape[1]].contiguous()


_TO = {"gemm_1d": _to_gemm_1d, "gemm_2d": _to_gemm_2d, "swizzled_32x4x4": _to_swizzled}
_FROM = {"gemm_1d": _from_gemm_1d, "gemm_2d": _from_gemm_2d, "swizzled_32x4x4": _from_swizzled}
