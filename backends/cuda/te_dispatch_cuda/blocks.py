# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts with a scale per block, of anything that `sources` describes: block_1d, block_2d, mxfp8, nvfp4."""

from __future__ import annotations

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer
from te_dispatch_cuda.codes import DTYPES, cast_code
from te_dispatch_cuda.memory import empty, stream_of
from te_dispatch_cuda.native import load
from te_dispatch_cuda.sources import Source

_native = load()
_F32, _U8 = torch.float32, torch.uint8
#: As csrc/cast/blocks.h numbers them.
SCALINGS = {"tensor": 0, "block_1d": 1, "block_2d": 2, "mxfp8": 3, "nvfp4": 4}
#: Scalings that activations and their gradients are cast to as they are computed, where no operand is a record.
_FUSED = ("block_1d", "mxfp8")
_MAXIMA: int = _native.MAXIMA
_TILE_ROWS: int = _native.TILE_ROWS

BlockScaled = BlockQuantizer | MXFP8Quantizer | NVFP4Quantizer


def cast_blocks(
    source: Source,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    quantizer: BlockScaled,
    usage: str,
    *,
    into: Quantized | None = None,
    noop_flag: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Quantized:
    """Cast the values of a source. One launch of the engine; before it one more where an nvfp4 cast has to find its
    amax, or where an activation's values have to lie in memory (what is not in `_FUSED`), after it one for dbias.

    Args:
        source: from `sources`.
        shape, dtype: logical shape and nominal dtype of the result.
        into: a record to write into and return, dense, with the copies that `usage` names.
        noop_flag: float32 (1,): nonzero writes nothing.
        amax: float32 (1,), nvfp4: the tensor's.
        dbias: (columns,): receives the sums over rows, accumulated in fp32.
        out: dense, of `shape`, fp32, bf16 or fp16: receives the values themselves, rounded once.
    """
    scaling = quantizer.scaling
    rows, columns = source[2], source[3]
    record = empty_record(shape, rows, columns, dtype, device, quantizer, usage) if into is None else into
    wants_row, wants_column = usage != "column", usage != "row"
    whole, size = 0, 0
    epsilon, power_of_two, two_d = 0.0, False, False
    if scaling == "nvfp4":
        two_d = quantizer.two_d  # type: ignore[union-attr]
        assert record.global_scale_inv is not None
        whole = record.global_scale_inv.data_ptr()
        if amax is None:
            size = _MAXIMA + 4
    elif scaling != "mxfp8":
        epsilon, power_of_two = quantizer.epsilon, quantizer.power_of_two  # type: ignore[union-attr]
    # Pieces of whole 16 bytes: the native call cuts them.
    if dbias is not None:
        size += -(-rows // _TILE_ROWS) * columns + 4
    if source[0] != 0 and (scaling not in _FUSED or source[10] >= 0):
        size += rows * columns + 4
    workspace = empty("workspace", (size,), _F32, device) if size else None
    _native.block_cast(
        device.index,
        stream_of(device.index),
        *source,
        SCALINGS[scaling],
        cast_code(quantizer),
        record.row_data.data_ptr() if wants_row else 0,  # type: ignore[union-attr]
        record.row_scale_inv.data_ptr() if wants_row else 0,  # type: ignore[union-attr]
        record.col_data.data_ptr() if wants_column else 0,  # type: ignore[union-attr]
        record.col_scale_inv.data_ptr() if wants_column else 0,  # type: ignore[union-attr]
        whole,
        0 if amax is None else amax.data_ptr(),
        0 if noop_flag is None else noop_flag.data_ptr(),
        0 if out is None else out.data_ptr(),
        0 if out is None else DTYPES[out.dtype],
        epsilon,
        power_of_two,
        two_d,
        0 if dbias is None else dbias.data_ptr(),
        0 if dbias is None else DTYPES[dbias.dtype],
        0 if workspace is None else workspace.data_ptr(),
        size,
    )
    return record


def empty_record(
    shape: tuple[int, ...],
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    quantizer: BlockScaled,
    usage: str,
) -> Quantized:
    """A block-scaled record with canonical scales, uninitialized; `rows` by `columns` is the matrix of `shape`."""
    scaling = quantizer.scaling
    scale_dtype = _F32 if scaling in ("block_1d", "block_2d") else _U8
    data, scales = _SHAPES[scaling](shape, rows, columns)
    row = column = row_scale = column_scale = whole = None
    if usage != "column":
        row = empty("row_data", data[0], _U8, device)
        row_scale = empty("row_scale_inv", scales[0], scale_dtype, device)
    if usage != "row":
        column = empty("col_data", data[1], _U8, device)
        column_scale = empty("col_scale_inv", scales[1], scale_dtype, device)
    if scaling == "nvfp4":
        whole = empty("global_scale_inv", (1,), _F32, device)
    return Quantized(
        row, column, row_scale, column_scale, quantizer.encoding, scaling, CANONICAL_SCALES, shape, dtype, device, whole
    )


#: (shape, rows, columns) -> shapes of the two copies' data, of their scales (`Quantized`'s table).
_SHAPES = {
    "block_1d": lambda s, m, k: ((s, (k, m)), ((m, -(-k // 128)), (k, -(-m // 128)))),
    "block_2d": lambda s, m, k: ((s, (k, m)), ((-(-m // 128), -(-k // 128)), (-(-k // 128), -(-m // 128)))),
    "mxfp8": lambda s, m, k: ((s, (m, k)), ((m, -(-k // 32)), (-(-m // 32), k))),
    "nvfp4": lambda s, m, k: (((*s[:-1], -(-k // 2)), (k, -(-m // 2))), ((m, -(-k // 16)), (k, -(-m // 16)))),
}
