# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts of a norm whose statistics are there: y again, from x, tile by tile, with the same bits as in `kernels.norm`.

x is dense (M, N): what was normalized, the sum with a residual included; mean is None for RMSNorm.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from te_dispatch_triton.kernels import delivery, tile
from te_dispatch_triton.kernels.codes import widen
from te_dispatch_triton.kernels.norm import normalized, weights


@triton.jit
def _statistics_of(mean, rstd, rows, M, CENTERED: tl.constexpr):
    present = rows < M
    deviation = tl.load(rstd + rows, mask=present, other=0.0)
    average = deviation
    if CENTERED:
        average = tl.load(mean + rows, mask=present, other=0.0)
    return average, deviation


@triton.jit
def norm_cast(
    x, gamma, beta, mean, rstd, M, N, y, row_data, row_scales, column_data, column_scales, scale, maxima, epsilon,
    inverse, history,
    ZERO_CENTERED: tl.constexpr, SCALING: tl.constexpr, TWO_D: tl.constexpr, ENCODING: tl.constexpr,
    COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, COUNT: tl.constexpr,
    INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile. maxima: COUNT partial maxima that the cast needs."""
    program = tl.program_id(0)
    of_tensor = delivery.begin(scale, maxima, epsilon, inverse, program, SCALING, ENCODING, COMMON, POWER_OF_TWO, COUNT)
    CENTERED: tl.constexpr = mean is not None
    # What the pass before this one read last is still in the cache: start there.
    place = tl.num_programs(0) - 1 - program
    across = tl.cdiv(N, BN)
    down = (place // across).to(tl.int64)
    first_row, first_column = down * BM, (place - down * across) * BN
    rows, columns = tile.span(first_row, BM), tile.span(first_column, BN)
    mask = tile.inside(rows, columns, M, N)
    v = widen(tl.load(x + rows[:, None] * N + columns[None, :], mask=mask, other=0.0))
    average, deviation = _statistics_of(mean, rstd, rows, M, CENTERED)
    factor, shift = weights(gamma, beta, columns, N, ZERO_CENTERED)
    out = tl.where(mask, normalized(v, average, deviation, factor, shift, CENTERED), 0.0)
    delivery.deliver(
        out, y, row_data, row_scales, column_data, column_scales, None, of_tensor, epsilon, first_row, first_column, M,
        N, N, SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO, INTERPRETED,
    )  # fmt: skip
    if history is not None:
        delivery.record(tl.abs(out), program, None, history)


@triton.jit
def _line(x, mean, rstd, factor, shift, rows, columns, M, N, CENTERED: tl.constexpr, BOUNDED: tl.constexpr):
    """y of rows; BOUNDED: 0 beyond the matrix, else the shift may be there."""
    mask = tile.inside(rows, columns, M, N)
    v = widen(tl.load(x + rows[:, None] * N + columns[None, :], mask=mask, other=0.0))
    average, deviation = _statistics_of(mean, rstd, rows, M, CENTERED)
    found = normalized(v, average, deviation, factor, shift, CENTERED)
    if BOUNDED:
        found = tl.where(mask, found, 0.0)
    return found


@triton.jit
def _four_lines(
    down, across, x, gamma, beta, mean, rstd, M, N, y, row_data, row_scales, column_data, column_scales, of_tensor,
    epsilon,
    ZERO_CENTERED: tl.constexpr, SCALING: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr,
    HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """All of `norm_columns` for a tile; magnitudes of y, (BM, BN), the largest of four."""
    CENTERED: tl.constexpr = mean is not None
    # Blocks have an amax for all of them; without mean and shift 0 stays 0.
    BOUNDED: tl.constexpr = SCALING != "tensor" and (CENTERED or beta is not None)
    first_row, first_column = tl.cast(down, tl.int64) * (4 * BM), across * BN
    rows, columns = tile.fours(first_row, BM, M), tile.span(first_column, BN)
    factor, shift = weights(gamma, beta, columns, N, ZERO_CENTERED)
    a = _line(x, mean, rstd, factor, shift, rows, columns, M, N, CENTERED, BOUNDED)
    b = _line(x, mean, rstd, factor, shift, rows + 1, columns, M, N, CENTERED, BOUNDED)
    c = _line(x, mean, rstd, factor, shift, rows + 2, columns, M, N, CENTERED, BOUNDED)
    d = _line(x, mean, rstd, factor, shift, rows + 3, columns, M, N, CENTERED, BOUNDED)
    delivery.deliver_four(
        a, b, c, d, y, row_data, row_scales, column_data, column_scales, of_tensor, epsilon, first_row, first_column,
        M, N, N, SCALING, ENCODING, COMMON, HARD, POWER_OF_TWO, INTERPRETED,
    )  # fmt: skip
    # Rows beyond the matrix hold the shift.
    return tl.where((rows < M)[:, None], delivery.largest_of(a, b, c, d), 0.0)


@triton.jit
def norm_columns(
    x, gamma, beta, mean, rstd, M, N, y, row_data, row_scales, column_data, column_scales, scale, maxima, epsilon,
    inverse, history,
    ZERO_CENTERED: tl.constexpr, SCALING: tl.constexpr, TWO_D: tl.constexpr, ENCODING: tl.constexpr,
    COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, COUNT: tl.constexpr,
    INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`norm_cast` by columns, to one scale per tensor or those of blocks of 128: 4 BM rows, four of them at a time
    (`delivery.deliver_four`). M is a multiple of 4.

    STAGES: as in `kernels.cast_columns`. EARLY: started before the kernel of the statistics ended.
    """
    if EARLY:
        gdc_wait()
    program = tl.program_id(0)
    of_tensor = delivery.begin(scale, maxima, epsilon, inverse, program, SCALING, ENCODING, COMMON, POWER_OF_TWO, COUNT)
    known = delivery.known_of(history)
    tiles_across = tl.maximum(tl.cdiv(N, BN), 1)
    # What the pass before this one read last is still in the cache: start there.
    place = tl.num_programs(0) - 1 - program
    share = place // tiles_across
    across = place - share * tiles_across
    if STAGES == 0:
        found = _four_lines(
            share, across, x, gamma, beta, mean, rstd, M, N, y, row_data, row_scales, column_data, column_scales,
            of_tensor, epsilon, ZERO_CENTERED, SCALING, ENCODING, COMMON, HARD, POWER_OF_TWO, INTERPRETED, BM, BN,
        )  # fmt: skip
    else:
        found = tl.zeros((BM, BN), tl.float32)
        tiles_down, step = tl.cdiv(M, 4 * BM), tl.maximum(tl.num_programs(0) // tiles_across, 1)
        for turn in tl.range(share, tiles_down, step, num_stages=STAGES):
            seen = _four_lines(
                tiles_down - 1 - turn, across, x, gamma, beta, mean, rstd, M, N, y, row_data, row_scales, column_data,
                column_scales, of_tensor, epsilon, ZERO_CENTERED, SCALING, ENCODING, COMMON, HARD, POWER_OF_TWO,
                INTERPRETED, BM, BN,
            )  # fmt: skip
            if history is not None:
                found = tl.maximum(found, seen)
    if history is not None:
        delivery.record_above(found, known, history)
