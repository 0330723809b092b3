# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations and their gradients, tile by tile, with what is made of them in the same pass: values, codes, sums. Casts
that need the largest magnitude first have a pass for it.

x is (M, H), or (M, 2 H) with u and v side by side where the activation is gated.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels import activation, delivery, tile
from te_dispatch_triton.kernels.codes import decode, widen


@triton.jit
def _values(found, inverse, X_ENCODING: tl.constexpr, X_HARD: tl.constexpr):
    """fp32 values of what was read; of a record's codes times the inverse of their scale."""
    if X_ENCODING == "":
        return widen(found)
    else:
        if X_HARD:
            if X_ENCODING == "e4m3fn":
                value = found.to(tl.float8e4nv, bitcast=True).to(tl.float32)
            elif X_ENCODING == "e5m2":
                value = found.to(tl.float8e5, bitcast=True).to(tl.float32)
            elif X_ENCODING == "e4m3fnuz":
                value = found.to(tl.float8e4b8, bitcast=True).to(tl.float32)
            else:
                value = found.to(tl.float8e5b16, bitcast=True).to(tl.float32)
        else:
            value = decode(found, X_ENCODING)
        return value * inverse


@triton.jit
def _read(x, places, mask, inverse, X_ENCODING: tl.constexpr, X_HARD: tl.constexpr):
    return _values(tl.load(x + places, mask=mask, other=0), inverse, X_ENCODING, X_HARD)


@triton.jit
def _sources(x, x_factor, rows, columns, M, H, GATED: tl.constexpr, X_ENCODING: tl.constexpr, X_HARD: tl.constexpr):
    """u, and v where the activation is gated (else u again), of a tile; and where the tile's elements lie in (M, H)."""
    mask = tile.inside(rows, columns, M, H)
    places = rows[:, None] * H + columns[None, :]
    if GATED:
        u_places = rows[:, None] * (2 * H) + columns[None, :]
        u = _read(x, u_places, mask, x_factor, X_ENCODING, X_HARD)
        v = _read(x, u_places + H, mask, x_factor, X_ENCODING, X_HARD)
    else:
        u = _read(x, places, mask, x_factor, X_ENCODING, X_HARD)
        v = u
    return u, v, places, mask


@triton.jit
def activation_tiles(
    dy, x, x_inverse, M, H, limit, alpha, out, row_data, row_scales, column_data, column_scales, sums, scale, maxima,
    epsilon, inverse, history,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, SPLIT: tl.constexpr, X_ENCODING: tl.constexpr, X_HARD: tl.constexpr,
    SCALING: tl.constexpr, TWO_D: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, COUNT: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """A tile of the forward's (M, H) result, or with dy, (M, H), of the gradient, (M, 2 H) where it is gated. None for
    what is not wanted (`delivery`).

    SPLIT: a program delivers one of the gradients, of u or of v, and its neighbour the other: half the registers, and
    what both read comes from a cache the second time. maxima: COUNT partial maxima that the cast needs.
    """
    program = tl.program_id(0)
    factor = delivery.begin(scale, maxima, epsilon, inverse, program, SCALING, ENCODING, COMMON, POWER_OF_TWO, COUNT)
    # What a pass for the maxima read last is still in the cache: start there.
    place = program if maxima is None else tl.num_programs(0) - 1 - program
    second = False
    if SPLIT:
        second = place % 2 == 1
        place = place // 2
    across = tl.cdiv(H, BN)
    down = (place // across).to(tl.int64)
    first_row, first_column = down * BM, (place - down * across) * BN
    x_factor = 0.0
    if X_ENCODING != "":
        x_factor = tl.load(x_inverse)
    u, v, places, mask = _sources(
        x, x_factor, tile.span(first_row, BM), tile.span(first_column, BN), M, H, GATED, X_ENCODING, X_HARD
    )
    if dy is None:
        y = activation.forward(u, v, limit, alpha, FUNCTION, GATED, PTX)
        found = tl.abs(y)
        delivery.deliver(
            y, out, row_data, row_scales, column_data, column_scales, sums, factor, epsilon, first_row, first_column,
            M, H, H, SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO, INTERPRETED,
        )  # fmt: skip
    else:
        d = widen(tl.load(dy + places, mask=mask, other=0.0))
        du, dv = activation.backward(d, u, v, limit, alpha, FUNCTION, GATED, PTX)
        N = 2 * H if GATED else H
        bound = H
        if SPLIT:
            du = tl.where(second, dv, du)
            first_column += tl.where(second, H, 0)
            bound = tl.where(second, N, H)
        found = tl.abs(du)
        delivery.deliver(
            du, out, row_data, row_scales, column_data, column_scales, sums, factor, epsilon, first_row, first_column,
            M, N, bound, SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO, INTERPRETED,
        )  # fmt: skip
        if GATED and not SPLIT:
            found = tl.maximum(found, tile.magnitudes(dv))  # of NaN and a number the number
            delivery.deliver(
                dv, out, row_data, row_scales, column_data, column_scales, sums, factor, epsilon, first_row,
                first_column + H, M, N, N, SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO, INTERPRETED,
            )  # fmt: skip
    if history is not None:
        delivery.record(found, program, None, history)


@triton.jit
def _line(dy, x, rows, columns, M, H, GATED: tl.constexpr):
    """dy, u and v as they lie in memory, dy and v where there are any; and whether they lie in (M, H)."""
    mask = tile.inside(rows, columns, M, H)
    places = rows[:, None] * H + columns[None, :]
    x_places = rows[:, None] * (2 * H) + columns[None, :] if GATED else places
    u = tl.load(x + x_places, mask=mask, other=0)
    v = tl.load(x + x_places + H, mask=mask, other=0) if GATED else u
    d = u if dy is None else tl.load(dy + places, mask=mask, other=0.0)
    return d, u, v


@triton.jit
def _any_bits(a, b, c):
    """Bits that any of three has, known when all three are."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xFE;", "=r,r,r,r", [a, b, c], a.dtype, True, 32 // a.dtype.primitive_bitwidth
    )


@triton.jit
def _after(value, other, M):
    """value; to compilers, which do not know that M >= 0, something that depends on `other` too."""
    BITS: tl.constexpr = value.dtype.primitive_bitwidth
    never = tl.where(M < 0, 1, 0).to(tl.int8 if BITS == 8 else tl.int16 if BITS == 16 else tl.int32)
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xF8;", "=r,r,r,r", [value, other, never], value.dtype, True, 32 // BITS
    )


@triton.jit
def _together(d0, d1, d2, d3, u0, u1, u2, u3, v0, v1, v2, v3, M, GATED: tl.constexpr, FORWARD: tl.constexpr):
    """The four u, not before all of a tile is read. NVIDIA's assembler would put loads behind arithmetic that can do
    without them, which takes fewer registers, and a program would wait for memory several times."""
    last = _any_bits(u1, u2, u3)
    if GATED:
        last = _any_bits(last, _any_bits(v0, v1, v2), v3)
    if not FORWARD and d0.dtype.primitive_bitwidth == u0.dtype.primitive_bitwidth:
        d3 = _any_bits(d1, d2, d3).to(u0.dtype, bitcast=True)
        last = _any_bits(last, d0.to(u0.dtype, bitcast=True), d3)
    return _after(u0, last, M), _after(u1, last, M), _after(u2, last, M), _after(u3, last, M)


@triton.jit
def _both(
    d, u, v, x_factor, limit, alpha, FUNCTION: tl.constexpr, GATED: tl.constexpr, FORWARD: tl.constexpr,
    X_ENCODING: tl.constexpr, X_HARD: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The results' values: the forward's twice, or the gradients of u and of v."""
    u = _values(u, x_factor, X_ENCODING, X_HARD)
    v = _values(v, x_factor, X_ENCODING, X_HARD) if GATED else u
    if FORWARD:
        y = activation.forward(u, v, limit, alpha, FUNCTION, GATED, PTX)
        return y, y
    else:
        return activation.backward(widen(d), u, v, limit, alpha, FUNCTION, GATED, PTX)


@triton.jit
def _four_lines(
    down, across, dy, x, x_factor, M, H, limit, alpha, out, row_data, row_scales, column_data, column_scales, factor,
    epsilon,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, X_ENCODING: tl.constexpr, X_HARD: tl.constexpr, SCALING: tl.constexpr,
    ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr, PTX: tl.constexpr,
    INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TURNS: tl.constexpr, sums=None, place=0,
):  # fmt: skip
    """All of `activation_columns` for a tile: the results' magnitudes, (BM, BN), the largest of four or eight; and sums
    of four of either result. sums: where the first result's are put, as row `place`, before it is delivered."""
    first_row, first_column = tl.cast(down, tl.int64) * (4 * BM), across * BN
    rows, columns = first_row + 4 * tl.arange(0, BM), tile.span(first_column, BN)
    FORWARD: tl.constexpr = dy is None
    # All loads before any arithmetic: they are on their way together.
    d0, u0, v0 = _line(dy, x, rows, columns, M, H, GATED)
    d1, u1, v1 = _line(dy, x, rows + 1, columns, M, H, GATED)
    d2, u2, v2 = _line(dy, x, rows + 2, columns, M, H, GATED)
    d3, u3, v3 = _line(dy, x, rows + 3, columns, M, H, GATED)
    # One operand's loads stay together, blocks need the registers, and what is loaded ahead is there.
    if PTX and not TURNS and (GATED or not FORWARD) and (SCALING == "" or SCALING == "tensor"):
        u0, u1, u2, u3 = _together(d0, d1, d2, d3, u0, u1, u2, u3, v0, v1, v2, v3, M, GATED, FORWARD)
    a, e = _both(d0, u0, v0, x_factor, limit, alpha, FUNCTION, GATED, FORWARD, X_ENCODING, X_HARD, PTX)
    # What blocks are cast from stays in registers: each line waits for the one before, or NVIDIA's assembler has the
    # arithmetic of all four under way at once, for which there are none left.
    WAITS: tl.constexpr = PTX and SCALING == "block_1d" and X_ENCODING == ""
    if WAITS:
        u1 = _after(widen(u1), a, M)
    b, f = _both(d1, u1, v1, x_factor, limit, alpha, FUNCTION, GATED, FORWARD, X_ENCODING, X_HARD, PTX)
    if WAITS:
        u2 = _after(widen(u2), b, M)
    c, g = _both(d2, u2, v2, x_factor, limit, alpha, FUNCTION, GATED, FORWARD, X_ENCODING, X_HARD, PTX)
    if WAITS:
        u3 = _after(widen(u3), c, M)
    d, h = _both(d3, u3, v3, x_factor, limit, alpha, FUNCTION, GATED, FORWARD, X_ENCODING, X_HARD, PTX)
    N = 2 * H if GATED and not FORWARD else H
    if sums is not None:
        delivery.put_total((a + b) + (c + d), sums, place, first_column, N, H)
    delivery.deliver_four(
        a, b, c, d, out, row_data, row_scales, column_data, column_scales, factor, epsilon, first_row, first_column, M,
        N, H, SCALING, ENCODING, COMMON, HARD, POWER_OF_TWO, INTERPRETED,
    )  # fmt: skip
    found = delivery.largest_of(a, b, c, d)
    if GATED and not FORWARD:
        delivery.deliver_four(
            e, f, g, h, out, row_data, row_scales, column_data, column_scales, factor, epsilon, first_row,
            first_column + H, M, N, N, SCALING, ENCODING, COMMON, HARD, POWER_OF_TWO, INTERPRETED,
        )  # fmt: skip
        found = tl.maximum(found, delivery.largest_of(e, f, g, h))
    return found, (a + b) + (c + d), (e + f) + (g + h)


@triton.jit
def activation_columns(
    dy, x, x_inverse, M, H, limit, alpha, out, row_data, row_scales, column_data, column_scales, sums, scale, maxima,
    epsilon, inverse, history,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, X_ENCODING: tl.constexpr, X_HARD: tl.constexpr, SCALING: tl.constexpr,
    TWO_D: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    COUNT: tl.constexpr, PTX: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`activation_tiles` with copies by columns or sums over rows, and no scales of blocks or those of 128: 4 BM rows,
    four of them at a time (`delivery.deliver_four`). M is a multiple of 4.

    STAGES: as in `kernels.cast_columns`. sums: fp32 (programs that share columns, columns of the result).
    """
    program = tl.program_id(0)
    factor = delivery.begin(scale, maxima, epsilon, inverse, program, SCALING, ENCODING, COMMON, POWER_OF_TWO, COUNT)
    x_factor = 0.0
    if X_ENCODING != "":
        x_factor = tl.load(x_inverse)
    # Long before it is compared, so that nobody waits for it.
    known = delivery.known_of(history)
    tiles_across = tl.maximum(tl.cdiv(H, BN), 1)
    place = program if maxima is None else tl.num_programs(0) - 1 - program
    share = place // tiles_across
    across = place - share * tiles_across
    SUMS_FIRST: tl.constexpr = STAGES == 0 and SCALING == "block_1d"  # they take registers
    if STAGES == 0:
        found, total, second = _four_lines(
            share, across, dy, x, x_factor, M, H, limit, alpha, out, row_data, row_scales, column_data, column_scales,
            factor, epsilon, FUNCTION, GATED, X_ENCODING, X_HARD, SCALING, ENCODING, COMMON, HARD, POWER_OF_TWO, PTX,
            INTERPRETED, BM, BN, False, sums if SUMS_FIRST else None, share,
        )  # fmt: skip
    else:
        found = tl.zeros((BM, BN), tl.float32)
        total, second = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        tiles_down, step = tl.cdiv(M, 4 * BM), tl.maximum(tl.num_programs(0) // tiles_across, 1)
        for turn in tl.range(share, tiles_down, step, num_stages=STAGES):
            seen, four, other = _four_lines(
                turn if maxima is None else tiles_down - 1 - turn, across, dy, x, x_factor, M, H, limit, alpha, out,
                row_data, row_scales, column_data, column_scales, factor, epsilon, FUNCTION, GATED, X_ENCODING, X_HARD,
                SCALING, ENCODING, COMMON, HARD, POWER_OF_TWO, PTX, INTERPRETED, BM, BN, True,
            )  # fmt: skip
            if history is not None:
                found = tl.maximum(found, seen)  # of NaN and a number the number
            if sums is not None:
                total += four
                second += other
    if sums is not None and not SUMS_FIRST:
        N = 2 * H if GATED and dy is not None else H
        delivery.put_total(total, sums, share, across * BN, N, H)
        if GATED and dy is not None:
            delivery.put_total(second, sums, share, across * BN + H, N, N)
    if history is not None:
        delivery.record_above(found, known, history)


@triton.jit
def activation_maxima(
    dy, x, x_inverse, M, H, limit, alpha, maxima,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, X_ENCODING: tl.constexpr, X_HARD: tl.constexpr, PTX: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One partial maximum of the result's magnitudes a program; programs take tiles in turns."""
    program = tl.program_id(0)
    across = tl.cdiv(H, BN)
    x_factor = 0.0
    if X_ENCODING != "":
        x_factor = tl.load(x_inverse)
    found = tl.zeros((BM, BN), tl.float32)
    for turn in range(program, tl.cdiv(M, BM) * across, tl.num_programs(0)):
        place = tl.cast(turn, tl.int64)
        down = place // across
        rows, columns = tile.span(down * BM, BM), tile.span((place - down * across) * BN, BN)
        u, v, places, mask = _sources(x, x_factor, rows, columns, M, H, GATED, X_ENCODING, X_HARD)
        if dy is None:
            y = activation.forward(u, v, limit, alpha, FUNCTION, GATED, PTX)
        else:
            d = widen(tl.load(dy + places, mask=mask, other=0.0))
            y, dv = activation.backward(d, u, v, limit, alpha, FUNCTION, GATED, PTX)
            if GATED:
                found = tl.maximum(found, tile.magnitudes(dv))
        found = tl.maximum(found, tile.magnitudes(y))  # of NaN and a number the number
    tile.put_maximum(maxima, program, tile.amax_of(found))
