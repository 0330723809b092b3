# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts of a matrix in memory with a scale per block. Pieces: `kernels.blocks`."""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels import tile
from te_dispatch_triton.kernels.blocks import put_column_copy, put_row_copy, scales_of
from te_dispatch_triton.kernels.codes import encode, scale_from_amax, widen


@triton.jit
def cast_squares(
    x, stride, M, N, row_data, row_scales, column_data, column_scales, epsilon, noop, sums,
    ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """block_2d: a program takes a block in pieces of BM rows, twice. After the first time it knows the scale; the
    second finds the elements in the cache. None for what is not asked for.

    sums: fp32 (ceil(M / 128), N), partial column sums.
    """
    if noop is not None:  # noqa: SIM102  (one of these is decided as the kernel is compiled)
        if tl.load(noop) != 0.0:
            return
    across = tl.cdiv(N, 128)
    down = tl.program_id(0) // across
    side = tl.program_id(0) - down * across
    first_row = down.to(tl.int64) * 128
    columns = tile.span(side.to(tl.int64) * 128, 128)
    found = tl.zeros((BM, 128), tl.float32)
    total = tl.zeros((BM, 128), tl.float32)
    for i in tl.static_range(128 // BM):
        rows = tile.span(first_row + i * BM, BM)
        mask = tile.inside(rows, columns, M, N)
        v = widen(tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0))
        found = tl.maximum(found, tile.magnitudes(v))
        if sums is not None:
            total += v
    if sums is not None:
        tile.put_sums(total, sums, down, columns, N)
    factor, stored = scales_of(tile.amax_of(found), 1.0, epsilon, "block_2d", ENCODING, COMMON, POWER_OF_TWO)
    if row_data is not None:
        tl.store(row_scales + down.to(tl.int64) * across + side, stored)
    if column_data is not None:
        tl.store(column_scales + side.to(tl.int64) * tl.cdiv(M, 128) + down, stored)
    for i in tl.static_range(128 // BM):
        rows = tile.span(first_row + i * BM, BM)
        mask = tile.inside(rows, columns, M, N)
        v = widen(tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0))
        if row_data is not None:
            tile.put_rows(encode(v * factor, ENCODING, COMMON, HARD), row_data, rows, columns, M, N)
        if column_data is not None:
            codes = encode(v * tile.apart(factor), ENCODING, COMMON, HARD)
            tile.put_transposed(codes, column_data, rows, columns, M, N)


@triton.jit
def _part(x, stride, M, N, first_row, first_column, BM: tl.constexpr, BN: tl.constexpr):
    """(rows, columns, fp32 values) of a tile."""
    rows, columns = tile.span(first_row, BM), tile.span(first_column, BN)
    mask = tile.inside(rows, columns, M, N)
    return rows, columns, widen(tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0))


@triton.jit
def cast_crossed(
    x, stride, M, N, row_data, row_scales, column_data, column_scales, epsilon, noop, sums,
    ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """block_1d, both copies. Of every tile of 128x128, one program after the other takes SPAN rows, then SPAN columns:
    each holds whole blocks of one copy and little else, and all but the first find the elements in the cache.

    sums: fp32 (ceil(M / 128), N), partial column sums.
    """
    if noop is not None:  # noqa: SIM102  (one of these is decided as the kernel is compiled)
        if tl.load(noop) != 0.0:
            return
    parts: tl.constexpr = 128 // SPAN
    place = tl.program_id(0) // (2 * parts)
    part = tl.program_id(0) % (2 * parts)
    across = tl.cdiv(N, 128)
    down = place // across
    first_row, first_column = down.to(tl.int64) * 128, (place - down * across).to(tl.int64) * 128
    if part < parts:
        flat_rows, flat_columns, flat = _part(x, stride, M, N, first_row + part * SPAN, first_column, SPAN, 128)
        put_row_copy(
            flat, row_data, row_scales, flat_rows, flat_columns, first_column, M, N, 1.0, epsilon,
            "block_1d", False, ENCODING, COMMON, HARD, POWER_OF_TWO,
        )  # fmt: skip
    else:
        rows, columns, v = _part(x, stride, M, N, first_row, first_column + (part - parts) * SPAN, 128, SPAN)
        if sums is not None:
            tile.put_sums(v, sums, down, columns, N)
        put_column_copy(
            v, column_data, column_scales, rows, columns, first_row, M, N, 1.0, epsilon,
            "block_1d", False, ENCODING, COMMON, HARD, POWER_OF_TWO,
        )  # fmt: skip


@triton.jit
def cast_blocks(
    x, stride, M, N, row_data, row_scales, column_data, column_scales, global_inverse, maxima, epsilon, noop, sums,
    SCALING: tl.constexpr, TWO_D: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, COUNT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Copies of an (M, N) matrix with `stride` elements from row to row; None for what is not asked for. Any scaling
    but block_2d; block_1d's two copies at once are faster by `cast_crossed` or `cast_words`.

    global_inverse, maxima: nvfp4's scale of the tensor, made of COUNT partial maxima; a program that serves no tile
    writes it. sums: fp32 (tiles down, N), partial column sums.
    """
    if noop is not None:  # noqa: SIM102  (one of these is decided as the kernel is compiled)
        if tl.load(noop) != 0.0:
            return
    program = tl.program_id(0)
    place = program if maxima is None else tl.num_programs(0) - 1 - program
    across = tl.maximum(tl.cdiv(N, BN), 1)  # one program serves an empty matrix
    down = place // across
    side = place - down * across
    first_row, first_column = down.to(tl.int64) * BM, side.to(tl.int64) * BN
    rows, columns = tile.span(first_row, BM), tile.span(first_column, BN)
    mask = tile.inside(rows, columns, M, N)
    v = widen(tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0))
    whole = 1.0
    if SCALING == "nvfp4":
        whole = scale_from_amax(tile.maximum_of(maxima, COUNT), 2688.0, 0.0, False)  # 448 * 6
        tile.put_inverse(global_inverse, whole, program == 0)
    if sums is not None:
        tile.put_sums(v, sums, down, columns, N)
    if row_data is not None:
        put_row_copy(
            v, row_data, row_scales, rows, columns, first_column, M, N, whole, epsilon,
            SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO,
        )  # fmt: skip
    if column_data is not None:
        put_column_copy(
            v, column_data, column_scales, rows, columns, first_row, M, N, whole, epsilon,
            SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO,
        )  # fmt: skip
