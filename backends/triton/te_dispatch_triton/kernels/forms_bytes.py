# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Codes and scales that move or are rewritten, without their values being formed: transposes, layouts of scales, other
encodings, rows of parts."""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.forms import place_of


@triton.jit
def _turn(a, b, c, d):
    """Four words of four bytes as a 4x4 matrix, transposed."""
    low, high = 0x00FF00FF, 0xFF00FF00
    ab_even = (a & low) | ((b & low) << 8)  # a0 b0 a2 b2, from the lowest byte on
    ab_odd = ((a & high) >> 8) | (b & high)
    cd_even = (c & low) | ((d & low) << 8)
    cd_odd = ((c & high) >> 8) | (d & high)
    first = (ab_even & 0xFFFF) | (cd_even << 16)
    second = (ab_odd & 0xFFFF) | (cd_odd << 16)
    third = (ab_even >> 16) | (cd_even & 0xFFFF0000)
    fourth = (ab_odd >> 16) | (cd_odd & 0xFFFF0000)
    return first, second, third, fourth


@triton.jit
def _turn_scale(scale, turned, rows, columns, M, K, mine):
    """One program's scale of a 128x128 tile, from (ceil(M / 128), ceil(K / 128)) to its transpose."""
    i, j = rows // 128, columns // 128
    tl.store(turned + j * tl.cdiv(M, 128) + i, tl.load(scale + i * tl.cdiv(K, 128) + j), mask=mine)


@triton.jit
def transpose_bytes(data, turned_data, M, K, scale, turned_scale, BM: tl.constexpr, BN: tl.constexpr):
    """(M, K) bytes to (K, M), and block_2d's scales with them. BM and BN divide 128."""
    across = tl.cdiv(K, BN)
    program = tl.program_id(0)
    first_row, first_column = (program // across).to(tl.int64) * BM, (program % across).to(tl.int64) * BN
    rows, columns = first_row + tl.arange(0, BM), first_column + tl.arange(0, BN)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    codes = tl.load(data + rows[:, None] * K + columns[None, :], mask=mask, other=0)
    tl.store(turned_data + columns[:, None] * M + rows[None, :], tl.trans(codes), mask=tl.trans(mask))
    if scale is not None:
        _turn_scale(
            scale, turned_scale, first_row, first_column, M, K, (first_row % 128 == 0) & (first_column % 128 == 0)
        )


@triton.jit
def transpose_words(data, turned_data, M, K, scale, turned_scale, BM: tl.constexpr, BN: tl.constexpr):
    """`transpose_bytes` of M and K that divide by 4, at addresses that do: four bytes at a time, as a transpose within
    words of what four rows hold, and then one of words."""
    across = tl.cdiv(K, BN)
    program = tl.program_id(0)
    first_row, first_column = (program // across).to(tl.int64) * BM, (program % across).to(tl.int64) * BN
    source = data.to(tl.pointer_type(tl.uint32))
    target = turned_data.to(tl.pointer_type(tl.uint32))
    fours = first_row // 4 + tl.arange(0, BM // 4)
    words = first_column // 4 + tl.arange(0, BN // 4)
    mask = (fours < M // 4)[:, None] & (words < K // 4)[None, :]
    places = source + fours[:, None] * K + words[None, :]
    pitch = K // 4
    a = tl.load(places, mask=mask, other=0)
    b = tl.load(places + pitch, mask=mask, other=0)
    c = tl.load(places + 2 * pitch, mask=mask, other=0)
    d = tl.load(places + 3 * pitch, mask=mask, other=0)
    p, q, r, s = _turn(a, b, c, d)
    there = (words < K // 4)[:, None] & (fours < M // 4)[None, :]
    to = target + words[:, None] * M + fours[None, :]
    down = M // 4
    tl.store(to, tl.trans(p), mask=there)
    tl.store(to + down, tl.trans(q), mask=there)
    tl.store(to + 2 * down, tl.trans(r), mask=there)
    tl.store(to + 3 * down, tl.trans(s), mask=there)
    if scale is not None:
        _turn_scale(
            scale, turned_scale, first_row, first_column, M, K, (first_row % 128 == 0) & (first_column % 128 == 0)
        )


@triton.jit
def _steps(R, B, LAYOUT: tl.constexpr, DOWN: tl.constexpr):
    """A layout's steps, for `place_of`. DOWN: mxfp8's column-wise scales, whose canonical layout has blocks first."""
    if LAYOUT == "gemm_1d":
        return 1, tl.cdiv(R, 4) * 4
    elif LAYOUT == "gemm_2d":
        return tl.cdiv(B, 4) * 4, 1
    elif LAYOUT == "swizzled_32x4x4":
        return tl.cdiv(B, 4), 1
    elif DOWN:
        return 1, R
    else:
        return B, 1


@triton.jit
def _ends(R, B, LAYOUT: tl.constexpr):
    """Rows and blocks of a layout with its padding."""
    if LAYOUT == "gemm_1d":
        return tl.cdiv(R, 4) * 4, B
    elif LAYOUT == "gemm_2d":
        return R, tl.cdiv(B, 4) * 4
    elif LAYOUT == "swizzled_32x4x4":
        return tl.cdiv(R, 128) * 128, tl.cdiv(B, 4) * 4
    else:
        return R, B


@triton.jit
def _move_scales(
    source, target, R, B, program,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, DOWN: tl.constexpr, BR: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    row_end, block_end = _ends(R, B, AFTER)
    across = tl.cdiv(block_end, BB)
    rows = (program // across).to(tl.int64) * BR + tl.arange(0, BR)
    blocks = (program % across).to(tl.int64) * BB + tl.arange(0, BB)
    there = (rows < R)[:, None] & (blocks < B)[None, :]
    row_step, block_step = _steps(R, B, BEFORE, DOWN)
    places = place_of(rows[:, None], blocks[None, :], row_step, block_step, BEFORE == "swizzled_32x4x4")
    found = tl.load(source + places, mask=there, other=0)
    row_step, block_step = _steps(R, B, AFTER, DOWN)
    places = place_of(rows[:, None], blocks[None, :], row_step, block_step, AFTER == "swizzled_32x4x4")
    tl.store(target + places, found, mask=(rows < row_end)[:, None] & (blocks < block_end)[None, :])


@triton.jit
def relayout(
    row, row_target, row_rows, row_blocks, column, column_target, column_rows, column_blocks,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, DOWN: tl.constexpr, BR: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Scales of both copies (None for an absent one) from one layout to another, padding 0: (rows, blocks) each, with
    the contracted dimension's blocks last."""
    program = tl.program_id(0)
    first = 0
    if row is not None:
        row_end, block_end = _ends(row_rows, row_blocks, AFTER)
        first = tl.cdiv(row_end, BR) * tl.cdiv(block_end, BB)
        if program < first:
            _move_scales(row, row_target, row_rows, row_blocks, program, BEFORE, AFTER, False, BR, BB)
    if column is not None:  # noqa: SIM102  (what is None is compiled away)
        if program >= first:
            _move_scales(
                column, column_target, column_rows, column_blocks, program - first, BEFORE, AFTER, DOWN, BR, BB
            )


@triton.jit
def beyond_of(words, LARGEST: tl.constexpr):
    """80 in every byte of a word (uint32) whose magnitude is above LARGEST."""
    return ((words & 0x7F7F7F7F) + (0x7F - LARGEST) * 0x01010101) & 0x80808080


@triton.jit
def convert_words(words, TO_FNUZ: tl.constexpr, LARGEST: tl.constexpr):
    """The four codes of each word (uint32) in the other form of their format; LARGEST: OCP's largest finite magnitude.

    Byte by byte: no sum below carries, because magnitudes have seven bits.
    """
    magnitude = words & 0x7F7F7F7F
    past = beyond_of(words, LARGEST)
    seven = past - (past >> 7)  # 7F in their place
    nonzero = (magnitude + 0x7F7F7F7F) & 0x80808080
    sign = words & nonzero
    if TO_FNUZ:
        return (magnitude & ~seven) | sign | past
    nan = words & 0x80808080 & ~nonzero
    return (magnitude & ~seven) | (seven & (LARGEST * 0x01010101)) | sign | (nan - (nan >> 7))


@triton.jit
def _count(past):
    """How many bytes of words have bit 7, as int64."""
    return tl.sum(((past >> 7) * 0x01010101 >> 24).to(tl.int32)).to(tl.int64)


@triton.jit
def _convert_codes(
    codes, target, size, block, count, TO_FNUZ: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if WORDS:
        codes, target = codes.to(tl.pointer_type(tl.uint32)), target.to(tl.pointer_type(tl.uint32))
    places = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    words = tl.load(codes + places, mask=mask, other=0).to(tl.uint32)
    tl.store(target + places, convert_words(words, TO_FNUZ, LARGEST).to(target.dtype.element_ty), mask=mask)
    if count is not None:
        tl.atomic_add(count, _count(beyond_of(words, LARGEST)), sem="relaxed")


@triton.jit
def _rescale(scale, target, size, block, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    places = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    tl.store(target + places, tl.load(scale + places, mask=mask, other=0.0) * FACTOR, mask=mask)


@triton.jit
def convert(
    row, row_target, row_size, column, column_target, column_size, row_scale, row_scale_target, row_scales,
    column_scale, column_scale_target, column_scales, count,
    TO_FNUZ: tl.constexpr, LARGEST: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes between the OCP and FNUZ forms of a format, and their scales; None for what is absent.

    row_size, column_size: codes, or with WORDS fours of them. count: int64, gains the row-wise copy's codes beyond
    LARGEST (the other copy's where that is all there is).
    """
    FACTOR: tl.constexpr = 2.0 if TO_FNUZ else 0.5
    program = tl.program_id(0)
    first = 0
    if row is not None:
        last = first + tl.cdiv(row_size, BLOCK)
        if program < last:
            _convert_codes(row, row_target, row_size, program, count, TO_FNUZ, LARGEST, WORDS, BLOCK)
        first = last
    if column is not None:
        last = first + tl.cdiv(column_size, BLOCK)
        if (program >= first) & (program < last):
            counted = count if row is None else None
            _convert_codes(column, column_target, column_size, program - first, counted, TO_FNUZ, LARGEST, WORDS, BLOCK)
        first = last
    if row_scale is not None:
        last = first + tl.cdiv(row_scales, BLOCK)
        if (program >= first) & (program < last):
            _rescale(row_scale, row_scale_target, row_scales, program - first, FACTOR, BLOCK)
        first = last
    if column_scale is not None:  # noqa: SIM102
        if program >= first:
            _rescale(column_scale, column_scale_target, column_scales, program - first, FACTOR, BLOCK)


@triton.jit
def count_beyond(codes, size, count, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """count[0] += codes whose magnitude is above LARGEST, and which are not FNUZ's NaN."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(codes + places, mask=places < size, other=0).to(tl.uint32)
    tl.atomic_add(count, _count(beyond_of(words, LARGEST)), sem="relaxed")


@triton.jit
def _written(word):
    return (word >> 31) & 0x3FFFFFFF


@triton.jit
def _read(word):
    return (word >> 1) & 0x3FFFFFFF


@triton.jit
def copy_parts(x, out, columns, starts, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Rows of parts, copied from where they start in x to where they start in out; rows that a part has in out alone
    are 0.

    starts: of every part, and of what comes after the last one: its first row in out from bit 31 on, its first row in x
    from bit 1 on, 30 bits each. Those rows of out are written. Bits 62 and 0 are set, so that Triton, which specializes
    the elements of a tuple whatever one says, finds nothing to tell calls apart by.
    """
    across = tl.cdiv(columns, BN)
    program = tl.program_id(0)
    rows = _written(starts[0]) + (program // across).to(tl.int64) * BM + tl.arange(0, BM)
    c = (program % across).to(tl.int64) * BN + tl.arange(0, BN)
    source = tl.zeros((BM,), tl.int64)
    copied = rows < 0
    for i in tl.static_range(PARTS):
        first, next_first = _written(starts[i]), _written(starts[i + 1])
        mine = (rows >= first) & (rows < next_first)
        place = rows - first + _read(starts[i])
        source = tl.where(mine, place, source)
        copied = copied | (mine & (place < _read(starts[i + 1])))
    inside = (c < columns)[None, :]
    held = tl.load(x + source[:, None] * columns + c[None, :], mask=copied[:, None] & inside, other=0)
    end = _written(starts[PARTS])
    tl.store(out + rows[:, None] * columns + c[None, :], held, mask=(rows < end)[:, None] & inside)
