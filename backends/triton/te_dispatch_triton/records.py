# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Records that a cast is about to fill: uninitialized, with canonical scales."""

from __future__ import annotations

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import BlockQuantizer, MXFP8Quantizer, NVFP4Quantizer, Quantizer
from te_dispatch.ops.shapes import rows_of
from te_dispatch_triton.memory import empty

_F32, _U8 = torch.float32, torch.uint8

BlockScaled = BlockQuantizer | MXFP8Quantizer | NVFP4Quantizer


def empty_tensor_record(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, quantizer: Quantizer, usage: str
) -> tuple[Quantized, torch.Tensor]:
    """A record scaled as a whole, and the inverse of its scale, float32 (1,), which both copies share."""
    row = column = None
    inverse = empty("col_scale_inv" if usage == "column" else "row_scale_inv", (1,), _F32, device)
    if usage != "column":
        row = empty("row_data", shape, _U8, device)
    if usage != "row":
        column = empty("col_data", (shape[-1], rows_of(shape)), _U8, device)
    record = Quantized(
        row, column, None if row is None else inverse, None if column is None else inverse, quantizer.encoding,
        "tensor", CANONICAL_SCALES, shape, dtype, device,
    )  # fmt: skip
    return record, inverse


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
    seen = quantizer.scale_layout == CANONICAL_SCALES  # others are laid out once more, into the result's memory
    scale_dtype = _F32 if scaling in ("block_1d", "block_2d") else _U8
    data, scales = _SHAPES[scaling](shape, rows, columns)
    row = column = row_scale = column_scale = whole = None
    if usage != "column":
        row = empty("row_data", data[0], _U8, device)
        row_scale = empty("row_scale_inv" if seen else "workspace", scales[0], scale_dtype, device)
    if usage != "row":
        column = empty("col_data", data[1], _U8, device)
        column_scale = empty("col_scale_inv" if seen else "workspace", scales[1], scale_dtype, device)
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
