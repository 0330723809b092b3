# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts with a scale per block, of anything that `sources` describes: block_1d, block_2d, mxfp8, nvfp4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer, Quantizer
from te_dispatch.ops.shapes import laid_out_shapes
from te_dispatch_cuda.codes import DTYPES, cast_code
from te_dispatch_cuda.memory import empty
from te_dispatch_cuda.native import load
from te_dispatch_cuda.prepared import Given, Made, Record
from te_dispatch_cuda.sources import Source

_native = load()
_F32, _U8 = torch.float32, torch.uint8
#: As csrc/cast/blocks.h numbers them.
SCALINGS = {"tensor": 0, "block_1d": 1, "block_2d": 2, "mxfp8": 3, "nvfp4": 4}
_FOR_PRODUCTS = 8
#: Scalings that activations and their gradients are cast to as they are computed, where no operand is a record.
_FUSED = ("block_1d", "mxfp8")
_MAXIMA: int = _native.MAXIMA
_TILE_ROWS: int = _native.TILE_ROWS

BlockScaled = BlockQuantizer | MXFP8Quantizer | NVFP4Quantizer


def scaling_code(quantizer: Quantizer) -> int:
    """A quantizer's scaling, and whether its scales lie in gemm_1d or gemm_2d."""
    code = SCALINGS[quantizer.scaling]
    return code if quantizer.scale_layout == CANONICAL_SCALES else code + _FOR_PRODUCTS


def block_cast(
    source: Source,
    record: Record,
    quantizer: BlockScaled,
    usage: str,
    amax: Given | None,
    noop: Given | None,
    dbias: Made | None,
    out: Made | None,
) -> list[Any]:
    """Arguments of the native call that casts a source. One launch of the engine; before it one more where an nvfp4
    cast has to find its amax, or where an activation's values have to lie in memory (what is not in `_FUSED`), after it
    one for dbias.

    Args:
        record: where the copies that `usage` names are written.
        noop: float32 (1,): nonzero writes nothing.
        amax: float32 (1,), nvfp4: the tensor's.
        dbias: (columns,): receives the sums over rows, accumulated in fp32.
        out: fp32, bf16 or fp16: receives the values themselves, rounded once.
    """
    scaling = quantizer.scaling
    rows, columns = source[2], source[3]
    wants_row, wants_column = usage != "column", usage != "row"
    whole: Any = 0
    size = 0
    epsilon, power_of_two, two_d = 0.0, False, False
    if scaling == "nvfp4":
        two_d = quantizer.two_d  # type: ignore[union-attr]
        whole = record.global_scale_inv
        if amax is None:
            size = _MAXIMA + 4
    elif scaling != "mxfp8":
        epsilon, power_of_two = quantizer.epsilon, quantizer.power_of_two  # type: ignore[union-attr]
    # Pieces of whole 16 bytes: the native call cuts them.
    if dbias is not None:
        size += -(-rows // _TILE_ROWS) * columns + 4
    if source[0] != 0 and (scaling not in _FUSED or source[10] >= 0):
        size += rows * columns + 4
    return [
        *source,
        scaling_code(quantizer),
        cast_code(quantizer),
        record.row_data if wants_row else 0,
        record.row_scale_inv if wants_row else 0,
        record.col_data if wants_column else 0,
        record.col_scale_inv if wants_column else 0,
        whole,
        0 if amax is None else amax,
        0 if noop is None else noop,
        0 if out is None else out,
        0 if out is None else DTYPES[out.dtype],
        epsilon,
        power_of_two,
        two_d,
        0 if dbias is None else dbias,
        0 if dbias is None else DTYPES[dbias.dtype],
        Made("workspace", (size,), _F32) if size else 0,
        size,
    ]


def block_record(
    shape: tuple[int, ...],
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    quantizer: BlockScaled,
    usage: str,
) -> Record:
    """A block-scaled record that a call makes; `rows` by `columns` is the matrix of `shape`."""
    *copies, whole = _copies(Made, shape, rows, columns, quantizer, usage)
    return Record(*copies, quantizer.encoding, quantizer.scaling, shape, dtype, device, whole, quantizer.scale_layout)


def empty_record(
    shape: tuple[int, ...],
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    quantizer: BlockScaled,
    usage: str,
) -> Quantized:
    """The same at once, uninitialized."""

    def make(role: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return empty(role, shape, dtype, device)

    *copies, whole = _copies(make, shape, rows, columns, quantizer, usage)
    return Quantized(
        *copies, quantizer.encoding, quantizer.scaling, quantizer.scale_layout, shape, dtype, device, whole
    )


def _copies(
    make: Callable[[str, tuple[int, ...], torch.dtype], Any],
    shape: tuple[int, ...],
    rows: int,
    columns: int,
    quantizer: BlockScaled,
    usage: str,
) -> list[Any]:
    """row_data, col_data, row_scale_inv, col_scale_inv, global_scale_inv; None for what there is none of."""
    scaling = quantizer.scaling
    scale_dtype = _F32 if scaling in ("block_1d", "block_2d") else _U8
    data, scales = _SHAPES[scaling](shape, rows, columns)
    if quantizer.scale_layout != CANONICAL_SCALES:
        scales = laid_out_shapes((rows, columns), scaling, quantizer.scale_layout)
    row = column = row_scale = column_scale = whole = None
    if usage != "column":
        row, row_scale = make("row_data", data[0], _U8), make("row_scale_inv", scales[0], scale_dtype)
    if usage != "row":
        column, column_scale = make("col_data", data[1], _U8), make("col_scale_inv", scales[1], scale_dtype)
    if scaling == "nvfp4":
        whole = make("global_scale_inv", (1,), _F32)
    return [row, column, row_scale, column_scale, whole]


#: (shape, rows, columns) -> shapes of the two copies' data, of their scales (`Quantized`'s table).
_SHAPES = {
    "block_1d": lambda s, m, k: ((s, (k, m)), ((m, -(-k // 128)), (k, -(-m // 128)))),
    "block_2d": lambda s, m, k: ((s, (k, m)), ((-(-m // 128), -(-k // 128)), (-(-k // 128), -(-m // 128)))),
    "mxfp8": lambda s, m, k: ((s, (m, k)), ((m, -(-k // 32)), (-(-m // 32), k))),
    "nvfp4": lambda s, m, k: (((*s[:-1], -(-k // 2)), (k, -(-m // 2))), ((m, -(-k // 16)), (k, -(-m // 16)))),
}
