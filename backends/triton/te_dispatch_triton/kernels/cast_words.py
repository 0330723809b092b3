# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""block_1d's two copies at once of a matrix of 16-bit elements, two of them a word: half the registers that they take
widened, so that more programs are at work."""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels import blocks, delivery, tile
from te_dispatch_triton.kernels.codes import encode, of_common_range, widen

#: PTX for two values, the first in %1.
_PAIR = """{{
    .reg .b16 codes;
    cvt.rn.satfinite.{type}x2.f32 codes, $2, $1;
    mov.b32 $0, {{codes, 0}};
}}"""
_PAIR_E4M3, _PAIR_E5M2 = (tl.constexpr(_PAIR.format(type=name)) for name in ("e4m3", "e5m2"))


@triton.jit
def _first(words, BF16: tl.constexpr):
    if BF16:
        return (words << 16).to(tl.float32, bitcast=True)
    else:
        return widen((words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True))


@triton.jit
def _second(words, BF16: tl.constexpr):
    if BF16:
        return (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return widen((words >> 16).to(tl.uint16).to(tl.float16, bitcast=True))


@triton.jit
def _larger_bf16(a, b):
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1)


@triton.jit
def _larger_fp16(a, b):
    return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1)


@triton.jit
def _larger(a, b, BF16: tl.constexpr):
    return _larger_bf16(a, b) if BF16 else _larger_fp16(a, b)


@triton.jit
def _amaxes(words, AXIS: tl.constexpr, BF16: tl.constexpr, PTX: tl.constexpr):
    """max |x| along an axis, of the words' first elements and of their second ones."""
    if PTX:
        found = tl.reduce(words & 0x7FFF7FFF, AXIS, _larger_bf16 if BF16 else _larger_fp16)
        return _first(found, BF16), _second(found, BF16)
    else:
        return tl.max(tile.magnitudes(_first(words, BF16)), AXIS), tl.max(tile.magnitudes(_second(words, BF16)), AXIS)


@triton.jit
def _column_amaxes(a, b, c, d, BF16: tl.constexpr, PTX: tl.constexpr):
    if PTX:
        a, b, c, d = a & 0x7FFF7FFF, b & 0x7FFF7FFF, c & 0x7FFF7FFF, d & 0x7FFF7FFF
        return _amaxes(_larger(_larger(a, b, BF16), _larger(c, d, BF16), BF16), 0, BF16, PTX)
    else:
        first = delivery.largest_of(_first(a, BF16), _first(b, BF16), _first(c, BF16), _first(d, BF16))
        second = delivery.largest_of(_second(a, BF16), _second(b, BF16), _second(c, BF16), _second(d, BF16))
        return tl.max(first, 0), tl.max(second, 0)


@triton.jit
def _row_factors(
    words, epsilon, BF16: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    first, second = _amaxes(words, 1, BF16, PTX)
    return blocks.factor_of(tl.maximum(first, second), epsilon, ENCODING, COMMON, POWER_OF_TWO)


@triton.jit
def _again(words, PTX: tl.constexpr):
    """The words, as values that compilers did not see before: they widen them once more, and do not keep in registers
    what the first time came to."""
    return tl.inline_asm_elementwise("", "=r,0", [words], tl.uint32, False, 1) if PTX else words


@triton.jit
def _pairs(first, second, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr, PTX: tl.constexpr):
    """Codes of two values in 16 bits."""
    if PTX:
        first, second = of_common_range(first, ENCODING, COMMON), of_common_range(second, ENCODING, COMMON)
        asm: tl.constexpr = _PAIR_E4M3 if ENCODING == "e4m3fn" else _PAIR_E5M2
        return tl.inline_asm_elementwise(asm, "=r,f,f", [first, second], tl.uint32, True, 1).to(tl.uint16)
    else:
        high = encode(second, ENCODING, COMMON, HARD).to(tl.uint16) << 8
        return encode(first, ENCODING, COMMON, HARD).to(tl.uint16) | high


@triton.jit
def _line(x, places, rows, columns, rows_left, words_left):
    return tl.load(x + places, mask=tile.inside(rows, columns, rows_left, words_left), other=0)


@triton.jit
def _put_line(
    words, factor, target, rows, pitch, rows_left, words_left, BF16: tl.constexpr, ENCODING: tl.constexpr,
    COMMON: tl.constexpr, HARD: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Codes of every fourth row, four pairs a store, as they are made: Triton does not exchange them between threads
    for wider ones. pitch: of rows, in pairs."""
    BM: tl.constexpr = words.shape[0]
    wide = factor[:, None]
    pairs = _pairs(_first(words, BF16) * wide, _second(words, BF16) * wide, ENCODING, COMMON, HARD, PTX)
    columns = (4 * tl.arange(0, 16))[:, None, None] + tl.arange(0, 4)[None, None, :]
    mask = (rows < rows_left)[None, :, None] & (columns < words_left)
    places = target + (rows.to(tl.int64) * pitch)[None, :, None] + columns
    tl.store(places, tl.permute(tl.reshape(pairs, (BM, 16, 4)), (1, 0, 2)), mask=mask)


@triton.jit
def cast_words(
    x, stride, M, N, row_data, row_scales, column_data, column_scales, epsilon, noop, sums,
    ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """A tile of 128x128 of an (M, N) matrix with `stride` elements from row to row, four rows at a time as in
    `delivery.deliver_four`. M is a multiple of 4, N and stride are even; all are aligned to what is read or written.

    sums: fp32 (ceil(M / 128), N), partial column sums.
    """
    if noop is not None:  # noqa: SIM102  (one of these is decided as the kernel is compiled)
        if tl.load(noop) != 0.0:
            return
    BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    PTX: tl.constexpr = delivery.packs(ENCODING, HARD)
    across, high = tl.cdiv(N, 128), tl.cdiv(M, 128)
    down = tl.program_id(0) // across
    side = tl.program_id(0) - down * across
    first_row, first_column = down.to(tl.int64) * 128, side.to(tl.int64) * 128
    rows, columns, all_of = 4 * tl.arange(0, 32), tl.arange(0, 64), tl.arange(0, 128)
    rows_left, left = tl.minimum(M - first_row, 128).to(tl.int32), tl.minimum(N - first_column, 128).to(tl.int32)
    words_left = tl.minimum(N // 2 - first_column // 2, 64).to(tl.int32)
    pitch = stride // 2
    source = (x + first_row * stride + first_column).to(tl.pointer_type(tl.uint32), bitcast=True)
    places = (rows.to(tl.int64) * pitch)[:, None] + columns[None, :]
    a = _line(source, places, rows, columns, rows_left, words_left)
    b = _line(source + pitch, places, rows, columns, rows_left - 1, words_left)
    c = _line(source + 2 * pitch, places, rows, columns, rows_left - 2, words_left)
    d = _line(source + 3 * pitch, places, rows, columns, rows_left - 3, words_left)
    first, second = _column_amaxes(a, b, c, d, BF16, PTX)
    first = blocks.factor_of(first, epsilon, ENCODING, COMMON, POWER_OF_TWO)
    second = blocks.factor_of(second, epsilon, ENCODING, COMMON, POWER_OF_TWO)
    e = _row_factors(a, epsilon, BF16, ENCODING, COMMON, POWER_OF_TWO, PTX)
    f = _row_factors(b, epsilon, BF16, ENCODING, COMMON, POWER_OF_TWO, PTX)
    g = _row_factors(c, epsilon, BF16, ENCODING, COMMON, POWER_OF_TWO, PTX)
    h = _row_factors(d, epsilon, BF16, ENCODING, COMMON, POWER_OF_TWO, PTX)
    a, b, c, d = _again(a, PTX), _again(b, PTX), _again(c, PTX), _again(d, PTX)
    target = (row_data + first_row * N + first_column).to(tl.pointer_type(tl.uint16), bitcast=True)
    half = N // 2
    _put_line(a, e, target, rows, half, rows_left, words_left, BF16, ENCODING, COMMON, HARD, PTX)
    _put_line(b, f, target + half, rows, half, rows_left - 1, words_left, BF16, ENCODING, COMMON, HARD, PTX)
    _put_line(c, g, target + 2 * half, rows, half, rows_left - 2, words_left, BF16, ENCODING, COMMON, HARD, PTX)
    _put_line(d, h, target + 3 * half, rows, half, rows_left - 3, words_left, BF16, ENCODING, COMMON, HARD, PTX)
    scales = blocks.inverse_of(tl.reshape(tl.join(tl.join(e, g), tl.join(f, h)), (128,)), POWER_OF_TWO)
    tl.store(row_scales + first_row * across + side + all_of.to(tl.int64) * across, scales, mask=all_of < rows_left)
    scales = blocks.inverse_of(tl.reshape(tl.join(first, second), (128,)), POWER_OF_TWO)
    tl.store(column_scales + first_column * high + down + all_of.to(tl.int64) * high, scales, mask=all_of < left)
    a, b, c, d = _again(a, PTX), _again(b, PTX), _again(c, PTX), _again(d, PTX)
    i, j, k, o = _first(a, BF16), _first(b, BF16), _first(c, BF16), _first(d, BF16)
    words = delivery.words_of(i * first, j * first, k * first, o * first, ENCODING, COMMON, HARD)
    m, n, p, q = _second(a, BF16), _second(b, BF16), _second(c, BF16), _second(d, BF16)
    others = delivery.words_of(m * second, n * second, p * second, q * second, ENCODING, COMMON, HARD)
    if sums is not None:
        total = tl.join(tl.sum((i + j) + (k + o), axis=0), tl.sum((m + n) + (p + q), axis=0))
        tl.store(sums + down.to(tl.int64) * N + first_column + all_of, tl.reshape(total, (128,)), mask=all_of < left)
    words = tl.reshape(tl.join(words, others), (32, 128))
    delivery.put_words(words, column_data, first_row // 4, tile.span(first_column, 128), M // 4, N)
