# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts of a matrix in memory with one scale per tensor, and column sums.

An (M, N) matrix is read as tiles, or as a line of elements where nothing is written that needs its columns. The scale
is the delayed one, or made by every program from partial maxima (`kernels.amax`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels import tile
from te_dispatch_triton.kernels.codes import max_value, narrow, widen


@triton.jit
def scale_in_force(
    scale, maxima, epsilon, ENCODING: tl.constexpr, COMMON: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """The delayed scale, or where that is None the one of COUNT partial maxima."""
    if scale is not None:
        found = tl.load(scale)
    else:
        found = tile.scale_of(maxima, max_value(ENCODING, COMMON), epsilon, POWER_OF_TWO, COUNT)
    return found


@triton.jit
def cast_line(
    x, size, row_data, scale, maxima, epsilon, row_inverse, history, noop,
    ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Row-wise codes of `size` elements that lie one after the other. For none, one program writes the inverse."""
    if noop is not None:  # noqa: SIM102  (one of these is decided as the kernel is compiled)
        if tl.load(noop) != 0.0:
            return
    program = tl.program_id(0)
    # What the pass for the maxima read last is still in the cache: start there.
    block = program if maxima is None else tl.num_programs(0) - 1 - program
    places = tile.span(block.to(tl.int64) * BLOCK, BLOCK)
    mask = places < size
    v = widen(tl.load(x + places, mask=mask, other=0.0))
    factor = scale_in_force(scale, maxima, epsilon, ENCODING, COMMON, POWER_OF_TWO, COUNT)
    tile.put_inverse(row_inverse, factor, program == 0)
    tl.store(row_data + places, tile.scaled_codes(v, factor, ENCODING, COMMON, HARD), mask=mask)
    if history is not None:
        tile.record_amax(history, tile.amax_of(v))


@triton.jit
def cast_tiles(
    x, stride, M, N, row_data, column_data, scale, maxima, epsilon, row_inverse, column_inverse, history, noop, sums,
    ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, COUNT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Both copies of an (M, N) matrix with `stride` elements from row to row; None for what is not asked for.

    sums: fp32 (tiles down, N), partial column sums.
    """
    if noop is not None:  # noqa: SIM102  (one of these is decided as the kernel is compiled)
        if tl.load(noop) != 0.0:
            return
    program = tl.program_id(0)
    place = program if maxima is None else tl.num_programs(0) - 1 - program
    across = tl.maximum(tl.cdiv(N, BN), 1)  # one program serves an empty matrix
    down = place // across
    rows, columns = tile.span(down.to(tl.int64) * BM, BM), tile.span((place - down * across).to(tl.int64) * BN, BN)
    mask = tile.inside(rows, columns, M, N)
    v = widen(tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0))
    factor = scale_in_force(scale, maxima, epsilon, ENCODING, COMMON, POWER_OF_TWO, COUNT)
    if row_inverse is not None:
        tile.put_inverse(row_inverse, factor, program == 0)
    if column_inverse is not None:
        tile.put_inverse(column_inverse, factor, program == 0)
    if row_data is not None:
        tile.put_rows(tile.scaled_codes(v, factor, ENCODING, COMMON, HARD), row_data, rows, columns, M, N)
    if column_data is not None:
        codes = tile.scaled_codes(v, tile.apart(factor), ENCODING, COMMON, HARD)
        tile.put_transposed(codes, column_data, rows, columns, M, N)
    if history is not None:
        tile.record_amax(history, tile.amax_of(v))
    if sums is not None:
        tile.put_sums(v, sums, down, columns, N)


@triton.jit
def sum_columns(partial, count, N, target, INTERPRETED: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """target[n] = the sum of partial[:, n], fp32 (count, N), rounded once. Program p takes columns p * BN on."""
    columns = tile.span(tl.program_id(0).to(tl.int64) * BN, BN)
    sums = tl.zeros((BR, BN), tl.float32)
    for first in range(0, count, BR):
        rows = first + tl.arange(0, BR)
        mask = (rows < count)[:, None] & (columns < N)[None, :]
        sums += tl.load(partial + rows.to(tl.int64)[:, None] * N + columns[None, :], mask=mask, other=0.0)
    total = tl.sum(sums, axis=0)
    tl.store(target + columns, narrow(total, target.dtype.element_ty, INTERPRETED), mask=columns < N)
