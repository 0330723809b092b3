# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantized data in other forms, and shards of sharded optimizers. Contracts: `te_dispatch.ops.quantize`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.ops.checks import quantize as checks
from te_dispatch.ops.shapes import ceil_div, laid_out_shapes
from te_dispatch_cuda.blocks import SCALINGS
from te_dispatch_cuda.codes import DTYPES, ENCODINGS
from te_dispatch_cuda.memory import address, dense, empty, stream_of
from te_dispatch_cuda.native import load

_native = load()
_F32, _U8, _I64 = torch.float32, torch.uint8, torch.int64
_BLOCK = {"block_1d": 128, "block_2d": 128, "mxfp8": 32, "nvfp4": 16}

#: (row stride, block stride, tiles in a row of tiles or 0), of csrc/quantize/forms.h's ScaleView.
_View = tuple[int, int, int]


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _grid(x: Quantized, row: bool) -> tuple[int, int]:
    """(rows, blocks) of a copy's scales with the contracted dimension's blocks last, by stored rows or tile rows."""
    m, k = x.rows(), x.shape[-1]
    rows, contracted = (m, k) if row else (k, m)
    return (ceil_div(rows, 128) if x.scaling == "block_2d" else rows), ceil_div(contracted, _BLOCK[x.scaling])


def _view(x: Quantized, row: bool, layout: str, rows: int, blocks: int) -> _View:
    if layout == "gemm_1d":
        return 1, _up(rows, 4), 0
    if layout == "gemm_2d":
        return _up(blocks, 4), 1, 0
    if layout == "swizzled_32x4x4":
        return 0, 0, ceil_div(blocks, 4)
    # Canonical; mxfp8 keeps its column-wise scales with the contracted dimension's blocks first.
    return (1, rows, 0) if x.scaling == "mxfp8" and not row else (blocks, 1, 0)


def dequantize(x: Quantized, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """High-precision values of the row-wise copy, or of the other where that is all there is: one launch."""
    checks.dequantize(x, dtype)
    return values(x, dtype or x.dtype, "out")


def values(x: Quantized, dtype: torch.dtype, role: str = "workspace") -> torch.Tensor:
    """`dequantize`, unchecked."""
    row = x.row_data is not None
    scaling = x.scaling
    m, k = x.rows(), x.shape[-1]
    data, scale = (x.row_data, x.row_scale_inv) if row else (x.col_data, x.col_scale_inv)
    assert data is not None and scale is not None
    data, scale = dense(data), dense(scale)
    view = (0, 0, 0) if scaling == "tensor" else _view(x, row, x.scale_layout, *_grid(x, row))
    transposed = not row and scaling != "mxfp8"
    out = empty(role, tuple(x.shape), dtype, data.device)
    index = data.get_device()
    _native.dequantize(
        index,
        stream_of(index),
        data.data_ptr(),
        scale.data_ptr(),
        *view,
        address(x.global_scale_inv),
        SCALINGS[scaling],
        ENCODINGS[x.encoding],
        transposed,
        not row and scaling == "mxfp8",
        k if transposed else m,
        m if transposed else k,
        out.data_ptr(),
        DTYPES[dtype],
    )
    return out


def transpose_quantized(x: Quantized) -> Quantized:
    """Add the column-wise copy: bytes, and block_2d's scales, in one launch."""
    checks.transpose_quantized(x)
    assert x.row_data is not None and x.row_scale_inv is not None  # checked
    data, m, k = dense(x.row_data), x.rows(), x.shape[-1]
    column = empty("col_data", (k, m), _U8, data.device)
    tiled = x.scaling == "block_2d"
    scale = turned = x.row_scale_inv
    if tiled:
        scale = dense(scale)
        turned = empty("col_scale_inv", (scale.shape[1], scale.shape[0]), _F32, data.device)
    index = data.get_device()
    _native.transpose_bytes(
        index,
        stream_of(index),
        data.data_ptr(),
        column.data_ptr(),
        m,
        k,
        scale.data_ptr() if tiled else 0,
        turned.data_ptr() if tiled else 0,
    )
    return Quantized(
        x.row_data, column, x.row_scale_inv, turned, x.encoding, x.scaling, x.scale_layout, x.shape, x.dtype, x.device
    )


def relayout_scales(x: Quantized, *, scale_layout: str) -> Quantized:
    """The same values with scales in another layout: one launch for both copies."""
    checks.relayout_scales(x, scale_layout)
    if scale_layout == x.scale_layout:
        return x
    size = 1 if x.scaling in ("mxfp8", "nvfp4") else 4
    shapes = laid_out_shapes(x.shape, x.scaling, scale_layout)
    arguments: list[tuple[int, ...]] = []
    scales: list[torch.Tensor | None] = []
    kept = []  # until the launch
    for row, scale in ((True, x.row_scale_inv), (False, x.col_scale_inv)):
        if scale is None:
            arguments.append((0,) * 12)
            scales.append(None)
            continue
        role = "row_scale_inv" if row else "col_scale_inv"
        target = empty(role, shapes[0 if row else 1], scale.dtype, scale.device)
        source = dense(scale)
        rows, blocks = _grid(x, row)
        padded = _PADDED[scale_layout](rows, blocks)
        before = _view(x, row, x.scale_layout, rows, blocks)
        after = _view(x, row, scale_layout, rows, blocks)
        arguments.append((source.data_ptr(), target.data_ptr(), rows, blocks, *padded, *before, *after))
        scales.append(target)
        kept.append(source)
    index = kept[0].get_device()
    _native.relayout_scales(index, stream_of(index), size, *arguments)
    return Quantized(
        x.row_data, x.col_data, scales[0], scales[1], x.encoding, x.scaling, scale_layout, x.shape, x.dtype, x.device,
        x.global_scale_inv,
    )  # fmt: skip


#: Layout -> (rows, blocks) -> both with their padding.
_PADDED = {
    CANONICAL_SCALES: lambda rows, blocks: (rows, blocks),
    "gemm_1d": lambda rows, blocks: (_up(rows, 4), blocks),
    "gemm_2d": lambda rows, blocks: (rows, _up(blocks, 4)),
    "swizzled_32x4x4": lambda rows, blocks: (_up(rows, 128), _up(blocks, 4)),
}


def convert_encoding(
    x: Quantized, *, encoding: str, overflow: str = "saturate", count: torch.Tensor | None = None
) -> Quantized:
    """Rewrite codes between the OCP and FNUZ forms, saturating: one launch for codes, scales and count."""
    checks.convert_encoding(x, encoding, overflow, count)
    return _converted(x, encoding, count)


def convert_encoding_checked(
    x: Quantized, *, encoding: str, overflow: str = "saturate", count: torch.Tensor | None = None
) -> Quantized:
    """`convert_encoding` that also serves ``error``, by reading back how many codes are beyond the target's range."""
    checks.convert_encoding(x, encoding, overflow, count)
    counted = x.row_data if x.row_data is not None else x.col_data
    assert counted is not None  # checked
    if overflow == "error" and not encoding.endswith("fnuz"):
        counted = dense(counted)
        beyond = empty("workspace", (1,), _I64, counted.device)
        index = counted.get_device()
        _native.count_beyond(
            index, stream_of(index), counted.data_ptr(), counted.numel(), ENCODINGS[x.encoding], beyond.data_ptr()
        )
        found = int(beyond.item())
        if found:
            raise ValueError(f"x has {found} codes in {x.encoding} that {encoding} cannot represent (overflow='error')")
    return _converted(x, encoding, count)


def _converted(x: Quantized, encoding: str, count: torch.Tensor | None) -> Quantized:
    device = (x.row_data if x.row_data is not None else x.col_data).device  # type: ignore[union-attr]
    shared = x.row_scale_inv is not None and x.col_scale_inv is x.row_scale_inv
    arguments: list[int] = []
    made: list[torch.Tensor | None] = []
    kept = []  # until the launch
    for role in ("row_data", "col_data", "row_scale_inv", "col_scale_inv"):
        source = getattr(x, role)
        if source is None or (shared and role == "col_scale_inv"):
            arguments += (0, 0, 0)
            made.append(None if source is None else made[2])
            continue
        target = empty(role, tuple(source.shape), source.dtype, device)
        source = dense(source)
        arguments += (source.data_ptr(), target.data_ptr(), source.numel())
        made.append(target)
        kept.append(source)
    index = kept[0].get_device()
    _native.convert_encoding(index, stream_of(index), ENCODINGS[x.encoding], *arguments, address(count))
    row, column, row_scale, column_scale = made
    return Quantized(
        row, column, row_scale, column_scale, encoding, x.scaling, x.scale_layout, x.shape, x.dtype, x.device
    )


def pad_rows(x: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]) -> torch.Tensor:
    """Append zero rows to every part: one launch for up to 100 parts."""
    checks.pad_rows(x, splits, padded_splits, False)
    return _copied_parts(x, sum(padded_splits), splits, splits, padded_splits)


def unpad_rows(x: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]) -> torch.Tensor:
    """Undo `pad_rows`."""
    checks.pad_rows(x, splits, padded_splits, True)
    return _copied_parts(x, sum(splits), splits, padded_splits, splits)


def _copied_parts(
    x: torch.Tensor, rows: int, copied: Sequence[int], read: Sequence[int], written: Sequence[int]
) -> torch.Tensor:
    x = dense(x)
    out = empty("out", (rows, x.shape[1]), x.dtype, x.device)
    index = x.get_device()
    pitch = x.shape[1] * x.element_size()
    _native.copy_parts(index, stream_of(index), x.data_ptr(), out.data_ptr(), pitch, copied, read, written)
    return out


def partial_amax(
    x: torch.Tensor, amax: torch.Tensor, *, height: int, width: int, start: int, block: int
) -> torch.Tensor:
    """Max-accumulate the block amaxes of a shard: one launch."""
    checks.partial_amax(x, amax, height, width, start, block)
    source, target = dense(x), dense(amax)
    index = source.get_device()
    _native.partial_amax(
        index, stream_of(index), source.data_ptr(), DTYPES[x.dtype], source.numel(), start, height, width, block,
        target.data_ptr(),
    )  # fmt: skip
    return amax if target is amax else amax.copy_(target)


def partial_cast(
    x: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    *,
    height: int,
    width: int,
    start: int,
    block: int,
    encoding: str,
) -> torch.Tensor:
    """Cast a shard with the blocks' scales: one launch."""
    checks.partial_cast(x, out, scale, height, width, start, block, encoding)
    source, scale = dense(x), dense(scale)
    target = out if out.is_contiguous() else empty("workspace", tuple(out.shape), _U8, out.device)
    index = source.get_device()
    _native.partial_cast(
        index, stream_of(index), source.data_ptr(), DTYPES[x.dtype], source.numel(), start, height, width, block,
        scale.data_ptr(), target.data_ptr(), ENCODINGS[encoding],
    )  # fmt: skip
    return out if target is out else out.copy_(target)
