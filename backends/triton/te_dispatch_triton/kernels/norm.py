# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""LayerNorm and RMSNorm, forward, in fp32. x is dense (M, N); mean is None for RMSNorm; None for what is not wanted.

`norm_rows` holds whole rows: x is read once, the variance taken in two passes over registers. `norm_tiles` walks over
rows block by block, once for their statistics and once for y, and so serves rows of any length and copies by columns;
what it reads the second time lies in a cache. Casts whose scales depend on more take y again in `kernels.norm_casts`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from te_dispatch_triton.kernels import delivery, tile
from te_dispatch_triton.kernels.codes import narrow, widen


@triton.jit
def weights(gamma, beta, columns, N, ZERO_CENTERED: tl.constexpr):
    """What the normalized row is multiplied by, and what is added: fp32 of columns' shape, 0 beyond N."""
    inside = columns < N
    factor = widen(tl.load(gamma + columns, mask=inside, other=0.0))
    if ZERO_CENTERED:
        factor = tl.where(inside, factor + 1.0, 0.0)
    if beta is None:
        shift = tl.full(columns.shape, -0.0, tl.float32)  # adding it keeps the sign of a zero
    else:
        shift = widen(tl.load(beta + columns, mask=inside, other=0.0))
    return factor, shift


@triton.jit
def summed(x, residual, residual_out, places, mask, INTERPRETED: tl.constexpr):
    """fp32 values of what is normalized: x, or the sum with the residual, rounded to x's dtype and written."""
    v = widen(tl.load(x + places, mask=mask, other=0.0))
    if residual is not None:
        v += widen(tl.load(residual + places, mask=mask, other=0.0))
        rounded = narrow(v, x.dtype.element_ty, INTERPRETED)
        tl.store(residual_out + places, rounded, mask=mask)
        v = widen(rounded)
    return v


@triton.jit
def mean_of(total, N):
    """total / N, rounded to nearest."""
    return tl.math.div_rn(total, tl.full(total.shape, 0.0, tl.float32) + tl.cast(N, tl.float32))


@triton.jit
def rstd_of(squares, N, eps):
    """1 / sqrt(squares / N + eps)."""
    return tl.math.div_rn(tl.full(squares.shape, 1.0, tl.float32), tl.math.sqrt_rn(mean_of(squares, N) + eps))


@triton.jit
def normalized(v, mean, rstd, factor, shift, CENTERED: tl.constexpr):
    """One statistic per row, one weight per column; all kernels, and both passes of a cast, agree by bits."""
    if CENTERED:
        v = v - mean[:, None]
    return tl.fma(v * rstd[:, None], factor[None, :], shift[None, :])


@triton.jit
def _row_block(
    block, x, residual, residual_out, gamma, beta, factor, shift, mean, rstd, M, N, eps, y, row_data, row_scales,
    of_tensor, epsilon,
    CENTERED: tl.constexpr, ZERO_CENTERED: tl.constexpr, WANTS_Y: tl.constexpr, KEEPS: tl.constexpr,
    SCALING: tl.constexpr, TWO_D: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """All of `norm_rows` for BM rows; magnitudes of y, 0 beyond the matrix."""
    first_row = tl.cast(block, tl.int64) * BM
    rows, columns = tile.span(first_row, BM), tl.arange(0, BN)
    present = rows < M
    mask = present[:, None] & (columns < N)[None, :]
    v = summed(x, residual, residual_out, rows[:, None] * N + columns[None, :], mask, INTERPRETED)
    average = tl.zeros((BM,), tl.float32)
    deviation = v
    if CENTERED:
        average = mean_of(tl.sum(v, axis=1), N)
        tl.store(mean + rows, average, mask=present)
        deviation = tl.where(mask, v - average[:, None], 0.0)
    inverse_deviation = rstd_of(tl.sum(deviation * deviation, axis=1), N, eps)
    tl.store(rstd + rows, inverse_deviation, mask=present)
    out = v
    if WANTS_Y:
        if not KEEPS:
            factor, shift = weights(gamma, beta, columns, N, ZERO_CENTERED)
        out = normalized(v, average, inverse_deviation, factor, shift, CENTERED)
        delivery.deliver(
            out, y, row_data, row_scales, None, None, None, of_tensor, epsilon, first_row, tl.zeros_like(first_row),
            M, N, N, SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO, INTERPRETED,
        )  # fmt: skip
    return tl.where(mask, tl.abs(out), 0.0)


@triton.jit
def norm_rows(
    x, residual, residual_out, gamma, beta, mean, rstd, M, N, eps, y, row_data, row_scales, scale, maxima, epsilon,
    inverse, history,
    ZERO_CENTERED: tl.constexpr, SCALING: tl.constexpr, TWO_D: tl.constexpr, ENCODING: tl.constexpr,
    COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, TURNS: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """BM rows at a time, N <= BN. A row's result does not depend on other rows.

    maxima: takes one partial maximum of |y| a program; history: of a delayed cast. TURNS: programs take blocks of rows
    in turns, and keep gamma and beta; else every program has one. FOLLOWED: by a kernel that may start before this one
    ends, and waits for it by itself.
    """
    if FOLLOWED:
        gdc_launch_dependents()
    program = tl.program_id(0)
    of_tensor = delivery.begin(scale, None, epsilon, inverse, program, SCALING, ENCODING, COMMON, POWER_OF_TWO, 1)
    LOOKS: tl.constexpr = history is not None or maxima is not None
    WANTS_Y: tl.constexpr = y is not None or SCALING != "" or maxima is not None
    CENTERED: tl.constexpr = mean is not None
    if TURNS:
        factor, shift = weights(gamma, beta, tl.arange(0, BN), N, ZERO_CENTERED)
        found = tl.zeros((BM, BN), tl.float32)
        for block in tl.range(program, tl.cdiv(M, BM), tl.num_programs(0), num_stages=STAGES):
            seen = _row_block(
                block, x, residual, residual_out, gamma, beta, factor, shift, mean, rstd, M, N, eps, y, row_data,
                row_scales, of_tensor, epsilon, CENTERED, ZERO_CENTERED, WANTS_Y, True, SCALING, TWO_D, ENCODING,
                COMMON, HARD, POWER_OF_TWO, INTERPRETED, BM, BN,
            )  # fmt: skip
            if LOOKS:
                found = tl.maximum(found, seen)  # of NaN and a number the number
    else:
        found = _row_block(
            program, x, residual, residual_out, gamma, beta, 0.0, 0.0, mean, rstd, M, N, eps, y, row_data, row_scales,
            of_tensor, epsilon, CENTERED, ZERO_CENTERED, WANTS_Y, False, SCALING, TWO_D, ENCODING, COMMON, HARD,
            POWER_OF_TWO, INTERPRETED, BM, BN,
        )  # fmt: skip
    if LOOKS:
        delivery.record(found, program, maxima, history)


@triton.jit
def _statistics(
    x, residual, residual_out, rows, present, N, eps, CENTERED: tl.constexpr, INTERPRETED: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """mean (zeros for RMSNorm) and rstd of rows. Every column of blocks has its own running mean and sum of squared
    deviations (Welford, 1962), which are merged at the end (Chan, Golub and LeVeque, 1983)."""
    BM: tl.constexpr = rows.shape[0]
    averages = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM, BN), tl.float32)
    turn = 0.0
    for first in tl.range(0, N, BN, num_stages=STAGES):
        columns = first + tl.arange(0, BN)
        mask = present[:, None] & (columns < N)[None, :]
        v = summed(x, residual, residual_out, rows[:, None] * N + columns[None, :], mask, INTERPRETED)
        if CENTERED:
            turn += 1.0
            deviation = tl.where(mask, v - averages, 0.0)
            averages = tl.fma(deviation, 1.0 / turn, averages)
            squares = tl.fma(deviation, v - averages, squares)
        else:
            squares = tl.fma(v, v, squares)
    average = tl.zeros((BM,), tl.float32)
    total = tl.sum(squares, axis=1)
    if CENTERED:
        places = tl.arange(0, BN)
        counts = tl.where(places < N, (N - places + BN - 1) // BN, 0).to(tl.float32)[None, :]
        average = mean_of(tl.sum(averages * counts, axis=1), N)
        apart = averages - average[:, None]
        total += tl.sum(apart * apart * counts, axis=1)
    return average, rstd_of(total, N, eps)


@triton.jit
def norm_tiles(
    x, residual, residual_out, gamma, beta, mean, rstd, M, N, eps, y, row_data, row_scales, column_data, column_scales,
    scale, maxima, epsilon, inverse, history,
    ZERO_CENTERED: tl.constexpr, SCALING: tl.constexpr, TWO_D: tl.constexpr, ENCODING: tl.constexpr,
    COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BM rows at a time, BN of their columns at a time, twice; programs take turns.

    maxima: takes one partial maximum of |y| a program.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    of_tensor = delivery.begin(scale, None, epsilon, inverse, program, SCALING, ENCODING, COMMON, POWER_OF_TWO, 1)
    LOOKS: tl.constexpr = history is not None or maxima is not None
    WANTS_Y: tl.constexpr = y is not None or SCALING != "" or LOOKS
    CENTERED: tl.constexpr = mean is not None
    found = tl.zeros((BM, BN), tl.float32)
    for block in range(program, tl.cdiv(M, BM), programs):
        first_row = tl.cast(block, tl.int64) * BM
        rows = tile.span(first_row, BM)
        present = rows < M
        average, deviation = _statistics(
            x, residual, residual_out, rows, present, N, eps, CENTERED, INTERPRETED, BN, STAGES
        )
        if CENTERED:
            tl.store(mean + rows, average, mask=present)
        tl.store(rstd + rows, deviation, mask=present)
        source = x
        if residual is not None:
            source = residual_out
            tl.debug_barrier()  # threads read what others of the program wrote
        if WANTS_Y:
            for first in tl.range(0, N, BN, num_stages=STAGES):
                columns = first + tl.arange(0, BN)
                factor, shift = weights(gamma, beta, columns, N, ZERO_CENTERED)
                mask = present[:, None] & (columns < N)[None, :]
                v = widen(tl.load(source + rows[:, None] * N + columns[None, :], mask=mask, other=0.0))
                out = tl.where(mask, normalized(v, average, deviation, factor, shift, CENTERED), 0.0)
                delivery.deliver(
                    out, y, row_data, row_scales, column_data, column_scales, None, of_tensor, epsilon, first_row,
                    tl.cast(first, tl.int64), M, N, N, SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO,
                    INTERPRETED,
                )  # fmt: skip
                if LOOKS:
                    found = tl.maximum(found, tile.magnitudes(out))
    if LOOKS:
        delivery.record(found, program, maxima, history)
