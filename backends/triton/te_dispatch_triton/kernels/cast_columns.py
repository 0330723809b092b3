# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts of a matrix in memory by columns, to one scale per tensor or those of blocks of 128, and column sums: four rows
at a time (`kernels.delivery.deliver_four`), for matrices whose rows are a multiple of four."""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels import cast, delivery, tile
from te_dispatch_triton.kernels.codes import widen


@triton.jit
def _line(x, places, rows, columns, rows_left, columns_left):
    """Of a tile at x whose elements lie at `places`."""
    return tl.load(x + places, mask=tile.inside(rows, columns, rows_left, columns_left), other=0.0)


@triton.jit
def _four_lines(
    down, across, x, stride, M, N, row_data, row_scales, column_data, column_scales, factor, epsilon,
    SCALING: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """All of `cast_columns` for a tile: magnitudes, (BM, BN), the largest of four; and sums of four."""
    first_row, first_column = tl.cast(down, tl.int64) * (4 * BM), across * BN
    rows, columns = 4 * tl.arange(0, BM), tl.arange(0, BN)
    rows_left, left = tl.minimum(M - first_row, 4 * BM).to(tl.int32), tl.minimum(N - first_column, BN).to(tl.int32)
    places = (rows.to(tl.int64) * stride)[:, None] + columns[None, :]
    x += first_row * stride + first_column
    # All loads before any arithmetic: they are on their way together.
    a = _line(x, places, rows, columns, rows_left, left)
    b = _line(x + stride, places, rows, columns, rows_left - 1, left)
    c = _line(x + 2 * stride, places, rows, columns, rows_left - 2, left)
    d = _line(x + 3 * stride, places, rows, columns, rows_left - 3, left)
    a, b, c, d = widen(a), widen(b), widen(c), widen(d)
    delivery.deliver_four(
        a, b, c, d, None, row_data, row_scales, column_data, column_scales, factor, epsilon, first_row, first_column,
        M, N, N, SCALING, ENCODING, COMMON, HARD, POWER_OF_TWO, False,
    )  # fmt: skip
    return delivery.largest_of(a, b, c, d), (a + b) + (c + d)


@triton.jit
def cast_columns(
    x, stride, M, N, row_data, row_scales, column_data, column_scales, scale, maxima, epsilon, row_inverse,
    column_inverse, history, noop, sums,
    SCALING: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, COUNT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both copies of an (M, N) matrix with `stride` elements from row to row, 4 BM rows at a time; None for what is not
    asked for. SCALING: tensor, block_1d or block_2d.

    STAGES: programs share columns, as many as the grid has room for, and take their tiles in turns; each loads so many
    ahead, one of which it works on. 0: every tile has a program. sums: fp32 (programs that share columns, N), partial
    column sums.
    """
    if noop is not None:  # noqa: SIM102  (one of these is decided as the kernel is compiled)
        if tl.load(noop) != 0.0:
            return
    program = tl.program_id(0)
    factor = 0.0
    if SCALING == "tensor":
        factor = cast.scale_in_force(scale, maxima, epsilon, ENCODING, COMMON, POWER_OF_TWO, COUNT)
        if row_inverse is not None:
            tile.put_inverse(row_inverse, factor, program == 0)
        if column_inverse is not None:
            tile.put_inverse(column_inverse, factor, program == 0)
    tiles_across = tl.maximum(tl.cdiv(N, BN), 1)  # one program serves an empty matrix
    # What the pass for the maxima read last is still in the cache: start there.
    place = program if maxima is None else tl.num_programs(0) - 1 - program
    share = place // tiles_across
    across = place - share * tiles_across
    if STAGES == 0:
        found, total = _four_lines(
            share, across, x, stride, M, N, row_data, row_scales, column_data, column_scales, factor, epsilon,
            SCALING, ENCODING, COMMON, HARD, POWER_OF_TWO, BM, BN,
        )  # fmt: skip
    else:
        found, total = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        tiles_down, step = tl.cdiv(M, 4 * BM), tl.maximum(tl.num_programs(0) // tiles_across, 1)
        for turn in tl.range(share, tiles_down, step, num_stages=STAGES):
            seen, four = _four_lines(
                turn if maxima is None else tiles_down - 1 - turn, across, x, stride, M, N, row_data, row_scales,
                column_data, column_scales, factor, epsilon, SCALING, ENCODING, COMMON, HARD, POWER_OF_TWO, BM, BN,
            )  # fmt: skip
            if history is not None:
                found = tl.maximum(found, seen)
            if sums is not None:
                total += four
    if sums is not None:
        delivery.put_total(total, sums, share, across * BN, N, N)
    if history is not None:
        tile.record_amax(history, tile.amax_of(found))
