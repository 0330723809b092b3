# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts of many matrices at once: programs find their matrix in a table (`kernels.optimizer_table`).

An entry's words, of which a table holds only those that its casts need, in this order:

====================================  ================================================================================
x                                     address of the matrix
stride, columns                       where they differ between entries (UNIFORM says that they do not)
row_data, row_scales                  of a row-wise copy; scales with a scale per block
column_data, column_scales            of a column-wise copy, likewise
whole                                 where the matrix's fp32 scalar goes: scale_inv with one scale per tensor, nvfp4's
                                      global_scale_inv
scale, history                        a delayed scale, and the amax that the cast accumulates into, or 0
found                                 the matrix's amax, which `find_maxima` accumulates here; 0 before
rows, first program, epsilon's bits   `COUNT`, `FIRST` and `CODES` of the table
====================================  ================================================================================

Programs take the tiles of a matrix row by row; an empty matrix has one where something has to be written for it all
the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels import tile
from te_dispatch_triton.kernels.blocks import put_column_copy, put_row_copy, scales_of
from te_dispatch_triton.kernels.codes import encode, max_value, scale_from_amax, widen
from te_dispatch_triton.kernels.optimizer_table import CODES, COUNT, FIRST, entry_of


@triton.jit
def _tensor(entry, WORD: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a word, as a pointer. The hint stands on the cast: on a call's result it would be lost."""
    found = tl.load(entry + WORD).to(tl.pointer_type(dtype))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def _matrix(entry, columns, stride, LISTS: tl.constexpr, UNIFORM: tl.constexpr, ALIGNED: tl.constexpr):
    """(M, N, elements between rows), int64."""
    M = tl.load(entry + LISTS + COUNT)
    if UNIFORM:
        # 64 bits; a parameter that is 1 is no tensor.
        N = M * 0 + columns
        stride = M * 0 + stride
    else:
        stride, N = tl.load(entry + 1), tl.load(entry + 2)
    if ALIGNED:
        M = tl.multiple_of(M, 16)
        if not UNIFORM:
            N, stride = tl.multiple_of(N, 16), tl.multiple_of(stride, 16)
    return M, N, stride


@triton.jit
def _place(entry, N, LISTS: tl.constexpr, BN: tl.constexpr):
    """Of the program's tile among the matrix's: down and across."""
    place = tl.program_id(0) - tl.load(entry + LISTS + FIRST).to(tl.int32)
    across = tl.maximum(tl.cdiv(N, BN), 1).to(tl.int32)
    down = place // across
    return down, place - down * across


@triton.jit
def _read(x, rows, columns, M, N, stride):
    mask = tile.inside(rows, columns, M, N)
    return widen(tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0))


@triton.jit
def _values(
    entry, columns, stride, dtype: tl.constexpr, LISTS: tl.constexpr, UNIFORM: tl.constexpr, ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The program's tile, fp32: (values, rows, columns, its place among the matrix's tiles down and across, M, N)."""
    M, N, stride = _matrix(entry, columns, stride, LISTS, UNIFORM, ALIGNED)
    down, side = _place(entry, N, LISTS, BN)
    rows, columns = tile.span(down.to(tl.int64) * BM, BM), tile.span(side.to(tl.int64) * BN, BN)
    v = _read(_tensor(entry, 0, dtype, ALIGNED), rows, columns, M, N, stride)
    return v, rows, columns, down, side, M, N


@triton.jit
def find_maxima(
    table, entries, columns, stride,
    dtype: tl.constexpr, LISTS: tl.constexpr, UNIFORM: tl.constexpr, ALIGNED: tl.constexpr, MOST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The amax of every entry, into its word `found`. LISTS: words before the rows."""
    entry = entry_of(table, entries, LISTS, MOST)
    v, _, _, _, _, _, _ = _values(entry, columns, stride, dtype, LISTS, UNIFORM, ALIGNED, BM, BN)
    tile.record_amax((entry + (LISTS - 1)).to(tl.pointer_type(tl.float32), bitcast=True), tile.amax_of(v))


@triton.jit
def _amax_at(entry, LISTS: tl.constexpr):
    return tl.load((entry + (LISTS - 1)).to(tl.pointer_type(tl.float32), bitcast=True))


@triton.jit
def _epsilon_at(entry, LISTS: tl.constexpr):
    return tl.load(entry + LISTS + CODES).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def cast_tensors(
    table, entries, columns, stride,
    dtype: tl.constexpr, LISTS: tl.constexpr, UNIFORM: tl.constexpr, ALIGNED: tl.constexpr, MOST: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, DELAYED: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr,
    HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Casts with one scale per tensor, delayed or made of the amax that `find_maxima` found."""
    ROW_AT: tl.constexpr = 1 if UNIFORM else 3
    COLUMN_AT: tl.constexpr = ROW_AT + 1 if ROW else ROW_AT
    WHOLE_AT: tl.constexpr = COLUMN_AT + 1 if COLUMN else COLUMN_AT
    entry = entry_of(table, entries, LISTS, MOST)
    v, rows, columns, down, side, M, N = _values(entry, columns, stride, dtype, LISTS, UNIFORM, ALIGNED, BM, BN)
    if DELAYED:
        scale = tl.load(_tensor(entry, WHOLE_AT + 1, tl.float32, False))
    else:
        limit: tl.constexpr = max_value(ENCODING, COMMON)
        scale = scale_from_amax(_amax_at(entry, LISTS), limit, _epsilon_at(entry, LISTS), POWER_OF_TWO)
    tile.put_inverse(_tensor(entry, WHOLE_AT, tl.float32, False), scale, down + side == 0)
    if ROW:
        codes = tile.scaled_codes(v, scale, ENCODING, COMMON, HARD)
        tile.put_rows(codes, _tensor(entry, ROW_AT, tl.uint8, ALIGNED), rows, columns, M, N)
    if COLUMN:
        codes = tile.scaled_codes(v, tile.apart(scale), ENCODING, COMMON, HARD)
        tile.put_transposed(codes, _tensor(entry, COLUMN_AT, tl.uint8, ALIGNED), rows, columns, M, N)
    if DELAYED:  # noqa: SIM102  (a constant, and a branch)
        if tl.load(entry + (WHOLE_AT + 2)) != 0:
            tile.record_amax(_tensor(entry, WHOLE_AT + 2, tl.float32, False), tile.amax_of(v))


@triton.jit
def cast_blocks(
    table, entries, columns, stride,
    dtype: tl.constexpr, LISTS: tl.constexpr, UNIFORM: tl.constexpr, ALIGNED: tl.constexpr, MOST: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, SCALING: tl.constexpr, TWO_D: tl.constexpr, ENCODING: tl.constexpr,
    COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Casts with a scale per block, other than those of `cast_tiles_of_128`; nvfp4 after `find_maxima`."""
    ROW_AT: tl.constexpr = 1 if UNIFORM else 3
    COLUMN_AT: tl.constexpr = ROW_AT + 2 if ROW else ROW_AT
    WHOLE_AT: tl.constexpr = COLUMN_AT + 2 if COLUMN else COLUMN_AT
    entry = entry_of(table, entries, LISTS, MOST)
    v, rows, columns, down, side, M, N = _values(entry, columns, stride, dtype, LISTS, UNIFORM, ALIGNED, BM, BN)
    first_row, first_column = down.to(tl.int64) * BM, side.to(tl.int64) * BN
    scale_type: tl.constexpr = tl.uint8 if SCALING == "mxfp8" or SCALING == "nvfp4" else tl.float32
    epsilon = _epsilon_at(entry, LISTS)
    whole = 1.0
    if SCALING == "nvfp4":
        whole = scale_from_amax(_amax_at(entry, LISTS), 2688.0, 0.0, False)  # 448 * 6
        tile.put_inverse(_tensor(entry, WHOLE_AT, tl.float32, False), whole, down + side == 0)
    row_data = None
    row_scales = None
    column_data = None
    column_scales = None
    if ROW:
        row_data = _tensor(entry, ROW_AT, tl.uint8, ALIGNED)
        row_scales = _tensor(entry, ROW_AT + 1, scale_type, ALIGNED)
    if COLUMN:
        column_data = _tensor(entry, COLUMN_AT, tl.uint8, ALIGNED)
        column_scales = _tensor(entry, COLUMN_AT + 1, scale_type, ALIGNED)
    if ROW:
        put_row_copy(
            v, row_data, row_scales, rows, columns, first_column, M, N, whole, epsilon,
            SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO,
        )  # fmt: skip
    if COLUMN:
        put_column_copy(
            v, column_data, column_scales, rows, columns, first_row, M, N, whole, epsilon,
            SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO,
        )  # fmt: skip


@triton.jit
def cast_tiles_of_128(
    table, entries, columns, stride,
    dtype: tl.constexpr, LISTS: tl.constexpr, UNIFORM: tl.constexpr, ALIGNED: tl.constexpr, MOST: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, TWO_D: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr,
    HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """block_1d with a column-wise copy, or block_2d: as `blocks_cast.cast_squares`, in pieces of BM rows, twice."""
    scaling: tl.constexpr = "block_2d" if TWO_D else "block_1d"
    ROW_AT: tl.constexpr = 1 if UNIFORM else 3
    COLUMN_AT: tl.constexpr = ROW_AT + 2 if ROW else ROW_AT
    entry = entry_of(table, entries, LISTS, MOST)
    M, N, stride = _matrix(entry, columns, stride, LISTS, UNIFORM, ALIGNED)
    down, side = _place(entry, N, LISTS, 128)
    first_row, first_column = down.to(tl.int64) * 128, side.to(tl.int64) * 128
    epsilon = _epsilon_at(entry, LISTS)
    x = _tensor(entry, 0, dtype, ALIGNED)
    c = tile.span(first_column, 128)
    row_data = _tensor(entry, ROW_AT, tl.uint8, ALIGNED)
    row_scales = _tensor(entry, ROW_AT + 1, tl.float32, ALIGNED)
    found = tl.zeros((BM, 128), tl.float32)
    for i in tl.static_range(128 // BM):
        rows = tile.span(first_row + i * BM, BM)
        v = _read(x, rows, c, M, N, stride)
        found = tl.maximum(found, tile.magnitudes(v))
        if ROW and not TWO_D:
            put_row_copy(
                v, row_data, row_scales, rows, c, first_column, M, N, 1.0, epsilon,
                scaling, False, ENCODING, COMMON, HARD, POWER_OF_TWO,
            )  # fmt: skip
    if TWO_D:
        factor, stored = scales_of(tile.amax_of(found), 1.0, epsilon, scaling, ENCODING, COMMON, POWER_OF_TWO)
        if ROW:
            tl.store(row_scales + down.to(tl.int64) * tl.cdiv(N, 128) + side, stored)
    else:
        largest = tile.number(tl.max(found, axis=0))
        factors, stored = scales_of(largest, 1.0, epsilon, scaling, ENCODING, COMMON, POWER_OF_TWO)
        factor = factors[None, :]
    if COLUMN:
        column_data = _tensor(entry, COLUMN_AT, tl.uint8, ALIGNED)
        column_scales = _tensor(entry, COLUMN_AT + 1, tl.float32, ALIGNED)
        if TWO_D:
            tl.store(column_scales + side.to(tl.int64) * tl.cdiv(M, 128) + down, stored)
        else:
            tl.store(column_scales + c * tl.cdiv(M, 128) + down, stored, mask=c < N)
    for i in tl.static_range(128 // BM):
        rows = tile.span(first_row + i * BM, BM)
        v = _read(x, rows, c, M, N, stride)
        if ROW and TWO_D:
            tile.put_rows(encode(v * factor, ENCODING, COMMON, HARD), row_data, rows, c, M, N)
        if COLUMN:
            codes = encode(v * tile.apart(factor), ENCODING, COMMON, HARD)
            tile.put_transposed(codes, column_data, rows, c, M, N)
