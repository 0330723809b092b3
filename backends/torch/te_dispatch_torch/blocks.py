# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Block-scaled casts: 1x128 and 128x128 FP8 blocks, MXFP8, NVFP4. Contracts: `te_dispatch.numerics.quantizers`.

Every function takes the input as it is and works on its (M, K) view. Edge blocks are partial: the input is padded with
zeros, which no amax sees, and the padding is cut off again.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from te_dispatch.numerics.encodings import ENCODINGS
from te_dispatch.numerics.hadamard import SIGNS, SIZE
from te_dispatch.numerics.quantized import NVFP4_SCALINGS, Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    MXFP8Quantizer,
    MXFP8TileQuantizer,
    NVFP4HadamardQuantizer,
    NVFP4Quantizer,
)
from te_dispatch.ops.shapes import ceil_div, rows_of
from te_dispatch_torch.encodings import decode, decode_e2m1, decode_e8m0, encode_, pack_e2m1
from te_dispatch_torch.scales_layout import pad_matrix
from te_dispatch_torch.scaling import amax_of, block_amax, e8m0_from_amax, e8m0_inverse, scale_from_amax
from te_dispatch_torch.stochastic import Draws

#: A bit for each place of a block that the Hadamard transform negates.
_NEGATIVE = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)

#: row_data, col_data, row_scale_inv, col_scale_inv.
Parts = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """The (M, K) view."""
    return x.reshape(rows_of(tuple(x.shape)), x.shape[-1])


def _blocked(x: torch.Tensor, block: int) -> torch.Tensor:
    """(R, C) -> (R, ceil(C / block), block)."""
    columns = x.shape[1]
    missing = -columns % block
    if missing:
        x = pad(x, (0, missing))
    return x.view(x.shape[0], (columns + missing) // block, block)


def tiled(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(R, C) -> (ceil(R / height), height, ceil(C / width), width)."""
    rows, columns = -x.shape[0] % height, -x.shape[1] % width
    if rows or columns:
        x = pad_matrix(x, rows, columns)
    return x.view(x.shape[0] // height, height, x.shape[1] // width, width)


def cast_blocks_1d(x: torch.Tensor, quantizer: BlockQuantizer, usage: str, draws: Draws | None) -> Parts:
    """One scale per 128 elements of the contracted dimension, for each copy its own."""
    row, column, row_scale, col_scale = None, None, None, None
    matrix = as_matrix(x)
    if usage != "column":
        row, row_scale = _blocks_1d(matrix, quantizer, draws)
        row = row.view(x.shape)
    if usage != "row":
        column, col_scale = _blocks_1d(matrix.t().contiguous(), quantizer, draws)
    return row, column, row_scale, col_scale


def _blocks_1d(x: torch.Tensor, quantizer: BlockQuantizer, draws: Draws | None) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = _blocked(x, 128)
    scale = scale_from_amax(block_amax(blocks, -1), quantizer.max_value, quantizer.epsilon, quantizer.power_of_two)
    codes = encode_(blocks * scale, quantizer.encoding, quantizer.max_value, quantizer.keeps_negative_zero, draws)
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), scale.reciprocal().squeeze(-1).contiguous()


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The transpose of a matrix as a contiguous copy; ``.t().contiguous()`` is a view for one row or column."""
    return x.t().clone(memory_format=torch.contiguous_format)


def cast_blocks_2d(x: torch.Tensor, quantizer: BlockQuantizer, draws: Draws | None) -> Parts:
    """One scale per 128x128 tile, so that both copies hold the same codes."""
    matrix = as_matrix(x)
    tiles = tiled(matrix, 128, 128)
    amax = block_amax(tiles, (1, 3))
    scale = scale_from_amax(amax, quantizer.max_value, quantizer.epsilon, quantizer.power_of_two)
    codes = encode_(tiles * scale, quantizer.encoding, quantizer.max_value, quantizer.keeps_negative_zero, draws)
    codes = codes.flatten(2).flatten(0, 1)[: matrix.shape[0], : matrix.shape[1]].contiguous()
    scale_inv = scale.reciprocal().squeeze(3).squeeze(1).contiguous()
    return codes.view(x.shape), transposed(codes), scale_inv, transposed(scale_inv)


def cast_mxfp8(x: torch.Tensor, quantizer: MXFP8Quantizer, usage: str, draws: Draws | None) -> Parts:
    """32 elements share an E8M0 scale; the column-wise copy stays untransposed, with blocks down the rows."""
    row, column, row_scale, col_scale = None, None, None, None
    matrix = as_matrix(x)
    if usage != "column":
        row, row_scale = _mxfp8(matrix, quantizer, draws)
        row = row.view(x.shape)
    if usage != "row":
        column, col_scale = _mxfp8(matrix.t(), quantizer, draws)
        column, col_scale = column.t().contiguous(), col_scale.t().contiguous()
    return row, column, row_scale, col_scale


def _mxfp8(x: torch.Tensor, quantizer: MXFP8Quantizer, draws: Draws | None) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = _blocked(x.contiguous(), 32)
    exponent = e8m0_from_amax(block_amax(blocks, -1), quantizer.max_value)
    scaled = blocks * e8m0_inverse(exponent)
    codes = encode_(scaled, quantizer.encoding, quantizer.max_value, quantizer.keeps_negative_zero, draws)
    return codes.flatten(1)[:, : x.shape[1]].contiguous(), exponent.squeeze(-1)


def cast_mxfp8_2d(x: torch.Tensor, quantizer: MXFP8TileQuantizer, draws: Draws | None) -> Parts:
    """One E8M0 scale per 32x32 tile: both copies hold the same codes, and the tile's scale for each of its lines."""
    matrix = as_matrix(x)
    rows, columns = matrix.shape
    tiles = tiled(matrix, 32, 32)
    exponent = e8m0_from_amax(block_amax(tiles, (1, 3)), quantizer.max_value)
    scaled = tiles * e8m0_inverse(exponent)
    codes = encode_(scaled, quantizer.encoding, quantizer.max_value, quantizer.keeps_negative_zero, draws)
    codes = codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
    exponent = exponent.squeeze(3).squeeze(1)
    of_rows, of_columns = exponent.repeat_interleave(32, 0)[:rows], exponent.repeat_interleave(32, 1)[:, :columns]
    return codes.view(x.shape), codes.clone(), of_rows.contiguous(), of_columns.contiguous()


def cast_nvfp4(
    x: torch.Tensor, quantizer: NVFP4Quantizer, usage: str, amax: torch.Tensor | None, draws: Draws | None
) -> tuple[Parts, torch.Tensor]:
    """E2M1 values, an e4m3fn scale per 16, one fp32 scale; returns the parts and global_scale_inv."""
    matrix = as_matrix(x)
    found = amax_of(x) if amax is None else amax
    scale = nvfp4_scale(found)
    row, column, row_scale, col_scale = None, None, None, None
    if usage != "column":
        row, row_scale = _nvfp4(matrix, scale, quantizer, draws)
        row = row.view(*x.shape[:-1], row.shape[-1])
    if usage != "row":
        column, col_scale = _nvfp4(matrix.t().contiguous(), scale, quantizer, draws)
    return (row, column, row_scale, col_scale), scale.reciprocal()


def nvfp4_scale(amax: torch.Tensor, scale_max: float = ENCODINGS["e4m3fn"].max) -> torch.Tensor:
    """S of the quantizers' docstrings."""
    return scale_from_amax(amax, scale_max * ENCODINGS["e2m1"].max, 0.0, False)


def cast_nvfp4_rotated(
    x: torch.Tensor, quantizer: NVFP4HadamardQuantizer, usage: str, draws: Draws | None
) -> tuple[Parts, torch.Tensor]:
    """As `cast_nvfp4` of each copy by itself, the column-wise one of rotated values."""
    matrix = as_matrix(x)
    row, column, row_scale, col_scale = None, None, None, None
    whole = [x.new_zeros((1,), dtype=torch.float32)] * 2
    if usage != "column":
        scale = nvfp4_scale(amax_of(matrix))
        row, row_scale = _nvfp4(matrix, scale, quantizer, draws)
        row = row.view(*x.shape[:-1], row.shape[-1])
        whole[0] = scale.reciprocal()
    if usage != "row":
        rotated = _rotated(matrix.t())
        scale = nvfp4_scale(amax_of(rotated))
        column, col_scale = _nvfp4(rotated, scale, quantizer, draws)
        whole[1] = scale.reciprocal()
    return (row, column, row_scale, col_scale), torch.cat(whole)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """float32 (R, C): every 16 elements of a row times the random Hadamard matrix, rounded to bfloat16 if x is.

    Sylvester's matrix is a product of four sparse ones, that add and subtract elements 1, 2, 4 and 8 apart. Sums of
    two elements at a time are the same bits on every device and in compiled programs, where a product with the matrix
    would be the library's, in TF32 perhaps.
    """
    place = torch.arange(SIZE, dtype=torch.int32, device=x.device)
    signs = 0.25 - 0.5 * ((torch.full_like(place, _NEGATIVE) >> place) & 1).to(torch.float32)
    y = x.to(torch.float32).reshape(x.shape[0], x.shape[1] // SIZE, SIZE) * signs
    for apart in (1, 2, 4, 8):
        first, second = y.unflatten(-1, (SIZE // (2 * apart), 2, apart)).unbind(-2)
        y = torch.stack((first + second, first - second), -2).flatten(-3)
    y = y.reshape(x.shape)
    return y.to(torch.bfloat16).to(torch.float32) if x.dtype == torch.bfloat16 else y


def _nvfp4(
    x: torch.Tensor, scale: torch.Tensor, quantizer: NVFP4Quantizer | NVFP4HadamardQuantizer, draws: Draws | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    blocks = _blocked(x, 16)
    amax = block_amax(blocks, -1)
    if isinstance(quantizer, NVFP4Quantizer) and quantizer.two_d:
        tiles = block_amax(tiled(x, 16, 16), (1, 3)).squeeze(3).squeeze(1)
        amax = tiles.repeat_interleave(16, 0)[:rows].unsqueeze(-1)
    six = torch.full_like(amax, ENCODINGS["e2m1"].max)
    block_codes = encode_(amax * scale / six, "e4m3fn", ENCODINGS["e4m3fn"].max, True)
    block_scale = decode(block_codes, "e4m3fn")
    # A block whose scale underflows to 0 holds nothing that it could represent.
    scaled = torch.where(block_scale == 0, 0.0, blocks * scale / block_scale)
    codes = encode_(scaled, quantizer.encoding, quantizer.max_value, quantizer.keeps_negative_zero, draws)
    return pack_e2m1(codes.flatten(1)[:, :columns]), block_codes.squeeze(-1)


def block_values(x: Quantized, data: torch.Tensor, scale: torch.Tensor, row: bool) -> torch.Tensor:
    """float32 (R, C) values of one copy as it is stored, R and C being those of `data` once unpacked."""
    m, k = x.rows(), x.shape[-1]
    if x.scaling == "mxfp8":
        data = data.reshape(m, k)
        scales = decode_e8m0(scale)
        wide = scales.repeat_interleave(32, 1)[:, :k] if row else scales.repeat_interleave(32, 0)[:m]
        return decode(data, x.encoding) * wide
    rows, columns = (m, k) if row else (k, m)
    if x.scaling in NVFP4_SCALINGS:
        if x.global_scale_inv is None:
            raise ValueError(f"x has {x.scaling} scaling but no global_scale_inv")
        whole = x.global_scale_inv[:1] if row else x.global_scale_inv[-1:]
        wide = (decode(scale, "e4m3fn") * whole).repeat_interleave(16, 1)[:, :columns]
        return decode_e2m1(data.reshape(rows, ceil_div(columns, 2)), columns) * wide
    found = decode(data.reshape(rows, columns), x.encoding)
    # Block by block, rather than with a scale per element: indices that divide by 128, beside the cast's blocks, are
    # more than PyTorch 2.13's compiler for CPUs generates loops for.
    if x.scaling == "block_2d":
        return (tiled(found, 128, 128) * scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return (_blocked(found, 128) * scale.unsqueeze(-1)).flatten(1)[:, :columns]
