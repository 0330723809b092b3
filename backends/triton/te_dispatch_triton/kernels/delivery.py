# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What becomes of a tile of a fused operator's values, in any scaling: the values themselves, codes and scales of
either copy, sums over rows.

SCALING is "" for no cast, or a quantizer's: tensor, block_1d, block_2d, mxfp8, nvfp4. `begin` gives the scale of the
whole tensor where there is one, and writes its inverse.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels import blocks, cast, tile
from te_dispatch_triton.kernels.codes import encode, narrow, of_common_range, scale_from_amax

#: PTX for four values, a's in %1: Triton takes apart what the instruction puts together.
_WORD = """{{
    .reg .b16 low, high;
    cvt.rn.satfinite.{type}x2.f32 low, $2, $1;
    cvt.rn.satfinite.{type}x2.f32 high, $4, $3;
    mov.b32 $0, {{low, high}};
}}"""
#: Of four columns of such, a's in $8 to $11: words in $4 to $7, and, transposed, the codes of a to d in $0 to $3.
_COLUMN = """
    cvt.rn.satfinite.{{type}}x2.f32 low, ${b}, ${a};
    cvt.rn.satfinite.{{type}}x2.f32 high, ${d}, ${c};
    mov.b32 ${word}, {{{{low, high}}}};"""
_COLUMNS = "".join(_COLUMN.format(a=8 + i, b=12 + i, c=16 + i, d=20 + i, word=4 + i) for i in range(4))
_FOUR = (
    "{{ .reg .b16 low, high; .reg .b32 p, q, r, s;"
    + _COLUMNS
    + """
    prmt.b32 p, $4, $5, 0x5140;
    prmt.b32 q, $4, $5, 0x7362;
    prmt.b32 r, $6, $7, 0x5140;
    prmt.b32 s, $6, $7, 0x7362;
    prmt.b32 $0, p, r, 0x5410;
    prmt.b32 $1, p, r, 0x7632;
    prmt.b32 $2, q, s, 0x5410;
    prmt.b32 $3, q, s, 0x7632;
}}"""
)
_WORD_E4M3, _WORD_E5M2 = (tl.constexpr(_WORD.format(type=name)) for name in ("e4m3", "e5m2"))
_BLOCK_E4M3, _BLOCK_E5M2 = (tl.constexpr(_FOUR.format(type=name)) for name in ("e4m3", "e5m2"))
_BLOCK = tl.constexpr(",".join(["=&r"] * 8 + ["f"] * 16))


@triton.jit
def begin(
    scale, maxima, epsilon, inverse, program, SCALING: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """tensor: the delayed scale, or where that is None the one of COUNT partial maxima; nvfp4: that of the maxima."""
    factor = 0.0
    if SCALING == "tensor":
        factor = cast.scale_in_force(scale, maxima, epsilon, ENCODING, COMMON, POWER_OF_TWO, COUNT)
        tile.put_inverse(inverse, factor, program == 0)
    elif SCALING == "nvfp4":
        factor = scale_from_amax(tile.maximum_of(maxima, COUNT), 2688.0, 0.0, False)  # 448 * 6
        tile.put_inverse(inverse, factor, program == 0)
    return factor


@triton.jit
def deliver(
    v, out, row_data, row_scales, column_data, column_scales, sums, factor, epsilon, first_row, first_column, M, N,
    bound,
    SCALING: tl.constexpr, TWO_D: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """A tile at (first_row, first_column), int64, of an (M, N) result. None for what is not wanted.

    bound: columns from there on are not the tile's to write; blocks need N, or that the tile ends before.
    sums: fp32 (tiles down, N), partial sums over rows.
    """
    BM: tl.constexpr = v.shape[0]
    BN: tl.constexpr = v.shape[1]
    rows, columns = tile.span(first_row, BM), tile.span(first_column, BN)
    places, mask = rows[:, None] * N + columns[None, :], tile.inside(rows, columns, M, bound)
    if out is not None:
        tl.store(out + places, narrow(v, out.dtype.element_ty, INTERPRETED), mask=mask)
    if sums is not None:
        tl.store(sums + first_row // BM * N + columns, tl.sum(v, axis=0), mask=columns < bound)
    if SCALING == "tensor":
        if row_data is not None:
            tl.store(row_data + places, tile.scaled_codes(v, factor, ENCODING, COMMON, HARD), mask=mask)
        if column_data is not None:
            codes = tile.scaled_codes(v, tile.apart(factor), ENCODING, COMMON, HARD)
            tile.put_transposed(codes, column_data, rows, columns, M, bound)
    elif SCALING == "block_2d":
        down, side = first_row // 128, first_column // 128
        blocks.put_tile(
            v, row_data, row_scales, column_data, column_scales, rows, columns, down, side, M, N, epsilon,
            ENCODING, COMMON, HARD, POWER_OF_TWO,
        )  # fmt: skip
    elif SCALING != "":
        if row_data is not None:
            blocks.put_row_copy(
                v, row_data, row_scales, rows, columns, first_column, M, N, factor, epsilon,
                SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO,
            )  # fmt: skip
        if column_data is not None:
            blocks.put_column_copy(
                v, column_data, column_scales, rows, columns, first_row, M, N, factor, epsilon,
                SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO,
            )  # fmt: skip


@triton.constexpr_function
def packs(ENCODING, HARD):
    """Whether the chip puts four codes in a word as they are converted."""
    return HARD == 2 and ENCODING in ("e4m3fn", "e5m2")


@triton.jit
def words_of(a, b, c, d, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr):
    """Codes of four values in a word, a's lowest."""
    if packs(ENCODING, HARD):
        a, b = of_common_range(a, ENCODING, COMMON), of_common_range(b, ENCODING, COMMON)
        c, d = of_common_range(c, ENCODING, COMMON), of_common_range(d, ENCODING, COMMON)
        if ENCODING == "e4m3fn":
            words = tl.inline_asm_elementwise(_WORD_E4M3, "=r,f,f,f,f", [a, b, c, d], tl.uint32, True, 1)
        else:
            words = tl.inline_asm_elementwise(_WORD_E5M2, "=r,f,f,f,f", [a, b, c, d], tl.uint32, True, 1)
    else:
        e, f = encode(a, ENCODING, COMMON, HARD).to(tl.uint32), encode(b, ENCODING, COMMON, HARD).to(tl.uint32)
        g, h = encode(c, ENCODING, COMMON, HARD).to(tl.uint32), encode(d, ENCODING, COMMON, HARD).to(tl.uint32)
        words = (e | (f << 8)) | ((g << 16) | (h << 24))
    return words


@triton.jit
def _codes_and_words(a, b, c, d, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr):
    """Codes of a, b, c and d, uint8, and the same four to a word."""
    if packs(ENCODING, HARD):
        a, b = of_common_range(a, ENCODING, COMMON), of_common_range(b, ENCODING, COMMON)
        c, d = of_common_range(c, ENCODING, COMMON), of_common_range(d, ENCODING, COMMON)
        if ENCODING == "e4m3fn":
            e, f, g, h, words = tl.inline_asm_elementwise(
                _BLOCK_E4M3, _BLOCK, [a, b, c, d], (tl.uint8, tl.uint8, tl.uint8, tl.uint8, tl.uint32), True, 4
            )
        else:
            e, f, g, h, words = tl.inline_asm_elementwise(
                _BLOCK_E5M2, _BLOCK, [a, b, c, d], (tl.uint8, tl.uint8, tl.uint8, tl.uint8, tl.uint32), True, 4
            )
    else:
        words = words_of(a, b, c, d, ENCODING, COMMON, HARD)
        e, f = (words & 0xFF).to(tl.uint8), ((words >> 8) & 0xFF).to(tl.uint8)
        g, h = ((words >> 16) & 0xFF).to(tl.uint8), (words >> 24).to(tl.uint8)
    return e, f, g, h, words


@triton.jit
def put_words(words, target, first_word, columns, words_down, bound):
    """Codes of four rows each to an (N, M) copy, whose M = 4 words_down codes lie one after the other."""
    places = tile.span(first_word, words.shape[0])
    copy = target.to(tl.pointer_type(tl.uint32), bitcast=True)
    mask = (columns < bound)[:, None] & (places < words_down)[None, :]
    tl.store(copy + columns[:, None] * words_down + places[None, :], tl.trans(words), mask=mask)


@triton.jit
def _put_line(v, codes, out, row_data, rows, columns, M, N, bound, INTERPRETED: tl.constexpr):
    places, mask = rows[:, None] * N + columns[None, :], tile.inside(rows, columns, M, bound)
    if out is not None:
        tl.store(out + places, narrow(v, out.dtype.element_ty, INTERPRETED), mask=mask)
    if row_data is not None:
        tl.store(row_data + places, codes, mask=mask)


@triton.jit
def _row_factors(v, epsilon, ENCODING: tl.constexpr, COMMON: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    return blocks.factor_of(tl.max(tile.magnitudes(v), axis=1), epsilon, ENCODING, COMMON, POWER_OF_TWO)


@triton.jit
def _put_eights(codes, target, rows, pitch, rows_left, columns_left):
    """(BM, BN) codes to a tile of rows of `pitch` codes at `target`, eight columns a store, as they are made: Triton
    does not exchange them between threads for wider ones."""
    BM: tl.constexpr = codes.shape[0]
    GROUPS: tl.constexpr = codes.shape[1] // 8
    columns = (8 * tl.arange(0, GROUPS))[:, None, None] + tl.arange(0, 8)[None, None, :]
    mask = (rows < rows_left)[None, :, None] & (columns < columns_left)
    places = target + (rows.to(tl.int64) * pitch)[None, :, None] + columns
    tl.store(places, tl.permute(tl.reshape(codes, (BM, GROUPS, 8)), (1, 0, 2)), mask=mask)


@triton.jit
def _put_four_in_blocks(
    a, b, c, d, out, row_data, row_scales, column_data, column_scales, epsilon, first_row, first_column, M, N, bound,
    ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """block_1d: `deliver_four` of a tile that is 128x128."""
    BM: tl.constexpr = a.shape[0]
    rows, columns = first_row + 4 * tl.arange(0, BM), tile.span(first_column, 128)
    if out is not None:
        _put_line(a, a, out, None, rows, columns, M, N, bound, INTERPRETED)
        _put_line(b, b, out, None, rows + 1, columns, M, N, bound, INTERPRETED)
        _put_line(c, c, out, None, rows + 2, columns, M, N, bound, INTERPRETED)
        _put_line(d, d, out, None, rows + 3, columns, M, N, bound, INTERPRETED)
    left = tl.minimum(bound - first_column, 128).to(tl.int32)
    place = tl.arange(0, 128)
    if column_data is not None:
        factor = blocks.factor_of(tl.max(largest_of(a, b, c, d), axis=0), epsilon, ENCODING, COMMON, POWER_OF_TWO)
    if row_data is not None:
        e = _row_factors(a, epsilon, ENCODING, COMMON, POWER_OF_TWO)
        f = _row_factors(b, epsilon, ENCODING, COMMON, POWER_OF_TWO)
        g = _row_factors(c, epsilon, ENCODING, COMMON, POWER_OF_TWO)
        h = _row_factors(d, epsilon, ENCODING, COMMON, POWER_OF_TWO)
        local, down = 4 * tl.arange(0, BM), tl.minimum(M - first_row, 128).to(tl.int32)
        copy = row_data + first_row * N + first_column
        _put_eights(encode(a * e[:, None], ENCODING, COMMON, HARD), copy, local, N, down, left)
        _put_eights(encode(b * f[:, None], ENCODING, COMMON, HARD), copy + N, local, N, down - 1, left)
        _put_eights(encode(c * g[:, None], ENCODING, COMMON, HARD), copy + 2 * N, local, N, down - 2, left)
        _put_eights(encode(d * h[:, None], ENCODING, COMMON, HARD), copy + 3 * N, local, N, down - 3, left)
        factors, across = tl.reshape(tl.join(tl.join(e, g), tl.join(f, h)), (128,)), tl.cdiv(N, 128)
        scales = row_scales + first_row * across + first_column // 128
        tl.store(scales + place.to(tl.int64) * across, blocks.inverse_of(factors, POWER_OF_TWO), mask=place < down)
    if column_data is not None:
        high = tl.cdiv(M, 128)
        scales = column_scales + first_column * high + first_row // 128
        tl.store(scales + place.to(tl.int64) * high, blocks.inverse_of(factor, POWER_OF_TWO), mask=place < left)
        words = words_of(a * factor, b * factor, c * factor, d * factor, ENCODING, COMMON, HARD)
        put_words(words, column_data, first_row // 4, columns, M // 4, bound)


@triton.jit
def _square_factor(
    a, b, c, d, row_data, row_scales, column_data, column_scales, epsilon, first_row, first_column, M, N,
    ENCODING: tl.constexpr, COMMON: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """block_2d: the scale of a tile that is a block, whose inverse is stored."""
    amax = tile.amax_of(largest_of(a, b, c, d))
    factor, stored = blocks.scales_of(amax, 1.0, epsilon, "block_2d", ENCODING, COMMON, POWER_OF_TWO)
    down, side = first_row // 128, first_column // 128
    if row_data is not None:
        tl.store(row_scales + down * tl.cdiv(N, 128) + side, stored)
    if column_data is not None:
        tl.store(column_scales + side * tl.cdiv(M, 128) + down, stored)
    return factor


@triton.jit
def deliver_four(
    a, b, c, d, out, row_data, row_scales, column_data, column_scales, factor, epsilon, first_row, first_column, M, N,
    bound,
    SCALING: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """`deliver` of rows 0, 4, 8, ... of a tile in a, the ones below them in b, c and d, cast to one scale per tensor,
    or to block_1d or block_2d by a tile of 128x128.

    What meets in a word of the copy by columns is then in one thread's registers, so that words and not codes are
    transposed. M is a multiple of 4, and the copy by columns aligned to it.
    """
    BM: tl.constexpr = a.shape[0]
    BN: tl.constexpr = a.shape[1]
    rows, columns = first_row + 4 * tl.arange(0, BM), tile.span(first_column, BN)
    if SCALING == "block_1d":
        _put_four_in_blocks(
            a, b, c, d, out, row_data, row_scales, column_data, column_scales, epsilon, first_row, first_column, M, N,
            bound, ENCODING, COMMON, HARD, POWER_OF_TWO, INTERPRETED,
        )  # fmt: skip
    else:
        if SCALING == "block_2d":
            factor = _square_factor(
                a, b, c, d, row_data, row_scales, column_data, column_scales, epsilon, first_row, first_column, M, N,
                ENCODING, COMMON, POWER_OF_TWO,
            )  # fmt: skip
        e, f, g, h = a, b, c, d
        if SCALING != "":
            if row_data is None:
                words = words_of(a * factor, b * factor, c * factor, d * factor, ENCODING, COMMON, HARD)
            else:
                e, f, g, h, words = _codes_and_words(
                    a * factor, b * factor, c * factor, d * factor, ENCODING, COMMON, HARD
                )
        _put_line(a, e, out, row_data, rows, columns, M, N, bound, INTERPRETED)
        _put_line(b, f, out, row_data, rows + 1, columns, M, N, bound, INTERPRETED)
        _put_line(c, g, out, row_data, rows + 2, columns, M, N, bound, INTERPRETED)
        _put_line(d, h, out, row_data, rows + 3, columns, M, N, bound, INTERPRETED)
        if column_data is not None:
            put_words(words, column_data, first_row // 4, columns, M // 4, bound)


@triton.jit
def put_total(total, sums, place, first_column, N, bound):
    """The sums over rows of (BM, BN) sums of values, into row `place` of fp32 (places, N). Columns up to `bound`."""
    columns = tile.span(first_column, total.shape[1])
    tl.store(sums + place.to(tl.int64) * N + columns, tl.sum(total, axis=0), mask=columns < bound)


@triton.jit
def largest_of(a, b, c, d):
    """Magnitudes, the largest of four at each place; of NaN and a number the number."""
    two = tl.maximum(tile.magnitudes(a), tile.magnitudes(b))
    return tl.maximum(two, tl.maximum(tile.magnitudes(c), tile.magnitudes(d)))


@triton.jit
def known_of(history):
    """What a delayed cast's history says of this step so far, for `record_above`; 0 where there is none."""
    known = 0.0
    if history is not None:
        known = tl.load(history)
    return known


@triton.jit
def record_above(found, known, history):
    """The largest magnitude of what a program saw into a delayed cast's history, unless `known` was no less: most
    programs have nothing new to say, and atomics on one address wait for each other.

    found: magnitudes, of any shape; NaN not among them.
    """
    amax = tile.amax_of(found)
    if amax > known:
        tile.record_amax(history, amax)


@triton.jit
def record(found, program, maxima, history):
    """The largest magnitude of what a program saw: into a delayed cast's history, or as its partial maximum."""
    if history is None:
        tile.put_maximum(maxima, program, tile.amax_of(found))
    else:
        record_above(found, tl.load(history), history)
