# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products of matrices: sums over K of one tile of the output, and the persistent kernel around them.

A matrix is given with the distance between its stored rows, and whether those run along K (``*_ALONG_K``: a stored as
(M, K), b as (N, K)) or along the output (a as (K, M), b as (K, N)). Plain operands and codes for matrix units that read
them come through pointers or descriptors; codes that no unit reads are decoded to bf16, which is exact.

SCALING says where scales are applied, all in fp32:

``none``    nowhere.
``tensor``  one per operand: to each partial sum of BLOCK_K products if PROMOTE, else to the whole sum.
``block``   one per 128 along K, of each row (``*_TILES`` False) or of 128 rows: to each partial sum.
``mx``      E8M0 exponents, one per 32 along K: by UNITS that know them, else to decoded values, where they are exact.
``nv``      e4m3fn codes, one per 16 along K, likewise; and one per operand to the whole sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels import tile
from te_dispatch_triton.kernels.codes import decode
from te_dispatch_triton.kernels.gemm_epilogue import finish


@triton.jit
def typed(x, ENCODING: tl.constexpr):
    """A pointer to codes as one to the numbers that they are."""
    if ENCODING == "e4m3fn":
        return x.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    elif ENCODING == "e5m2":
        return x.to(tl.pointer_type(tl.float8e5), bitcast=True)
    elif ENCODING == "e4m3fnuz":
        return x.to(tl.pointer_type(tl.float8e4b8), bitcast=True)
    elif ENCODING == "e5m2fnuz":
        return x.to(tl.pointer_type(tl.float8e5b16), bitcast=True)
    else:
        return x


@triton.jit
def load_tile(
    x, places, steps, size, k, stride, ALONG_K: tl.constexpr, EVEN_K: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """(places, steps) of a matrix, 0 beyond it. PAIRS: bytes hold two codes each along K; steps then counts bytes."""
    bound = tl.cdiv(k, 2) if PAIRS else k
    if ALONG_K:
        # Rows beyond the matrix repeat row 0: nothing that is stored depends on them.
        rows = tl.where(places < size, places, 0).to(tl.int64)
        pointers = x + rows[:, None] * stride + steps[None, :]
        found = tl.load(pointers) if EVEN_K else tl.load(pointers, mask=(steps < bound)[None, :], other=0.0)
    else:
        pointers = x + steps.to(tl.int64)[None, :] * stride + places[:, None]
        mask = (places < size)[:, None]
        found = tl.load(pointers, mask=mask if EVEN_K else mask & (steps < bound)[None, :], other=0.0)
    return found


@triton.jit
def exponent_scale(code):
    """2^(code - 127) in fp32, NaN for 0xFF."""
    wide = code.to(tl.uint32)
    value = tl.where(wide == 0, 0x00400000, wide << 23).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(wide == 0xFF, float("nan"), value)


@triton.jit
def decoded(
    codes, scale, places, first, size, k,
    BLOCK_K: tl.constexpr, ALONG_K: tl.constexpr, ENCODING: tl.constexpr, SCALING: tl.constexpr,
):  # fmt: skip
    """Codes of one operand's tile (places, steps) as bf16, exact: with the scales of microscaling, else without."""
    if SCALING == "nv":
        value = tl.join(decode(codes & 15, "e2m1"), decode(codes >> 4, "e2m1"))
        value = tl.reshape(value, (codes.shape[0], BLOCK_K))
    else:
        value = decode(codes, ENCODING)
    if SCALING == "mx" or SCALING == "nv":
        PER: tl.constexpr = 32 if SCALING == "mx" else 16
        blocks = first // PER + tl.arange(0, BLOCK_K // PER)
        count = tl.cdiv(k, PER)
        found = load_scales(scale, places, blocks, size, count, ALONG_K)
        factor = exponent_scale(found) if SCALING == "mx" else decode(found, "e4m3fn")
        wide = tl.reshape(value, (value.shape[0], BLOCK_K // PER, PER)) * factor[:, :, None]
        value = tl.reshape(wide, (value.shape[0], BLOCK_K))
        # The last block's scale also meets what lies beyond K, as 0 times a NaN.
        steps = first + tl.arange(0, BLOCK_K)
        value = tl.where((steps < k)[None, :], value, 0.0)
    return value.to(tl.bfloat16)


@triton.jit
def load_scales(scale, places, blocks, size, count, ALONG_K: tl.constexpr):
    """Canonical scales (places, blocks) of a microscaled copy, (size, count) or (count, size) in memory."""
    mask = (places < size)[:, None] & (blocks < count)[None, :]
    if ALONG_K:
        pointers = scale + places.to(tl.int64)[:, None] * count + blocks[None, :]
    else:
        pointers = scale + blocks.to(tl.int64)[None, :] * size + places[:, None]
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def block_scale(scale, places, first_place, block, size, k, TILES: tl.constexpr, SIZE: tl.constexpr):
    """Scales of one operand for the block-th 128 of K: (SIZE,), or one number for a tile of at most 128."""
    count = tl.cdiv(k, 128)
    if TILES and SIZE <= 128:
        rows = first_place // 128
    else:
        rows = tl.where(places < size, places, 0)
        rows = rows // 128 if TILES else rows
    return tl.load(scale + rows.to(tl.int64) * count + block)


@triton.jit
def times(part, x, y, X_ONE: tl.constexpr, Y_ONE: tl.constexpr):
    """part (M, N) times x (M,) or a number, times y (N,) or a number; numbers are multiplied first."""
    if X_ONE and Y_ONE:
        return part * (x * y)
    elif X_ONE:
        return part * (y * x)[None, :]
    elif Y_ONE:
        return part * (x * y)[:, None]
    else:
        return part * (x[:, None] * y[None, :])


@triton.jit
def dot(x, y, acc, UNITS: tl.constexpr, PRECISION: tl.constexpr, PROMOTED: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + x y. x: (M, K), y: (N, K)."""
    if INTERPRETED:  # whose bf16 are bit patterns
        acc += tl.dot(x.to(tl.float32), tl.trans(y.to(tl.float32)), input_precision="ieee")
    elif UNITS and PROMOTED > 0:
        acc = tl.dot(x, tl.trans(y), acc, max_num_imprecise_acc=PROMOTED)
    else:
        acc = tl.dot(x, tl.trans(y), acc, input_precision=PRECISION)
    return acc


@triton.jit
def scaled_dot(
    x, y, x_scale, y_scale, rows, columns, first, m, n, k, acc, A_ALONG_K: tl.constexpr, B_ALONG_K: tl.constexpr,
    A_CODE: tl.constexpr, B_CODE: tl.constexpr, SCALING: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + x y on units that apply microscaling. x: codes (M, K) or pairs of them (M, K / 2), y: (N, ...)."""
    PER: tl.constexpr = 32 if SCALING == "mx" else 16
    blocks = first // PER + tl.arange(0, BLOCK_K // PER)
    left = load_scales(x_scale, rows, blocks, m, tl.cdiv(k, PER), A_ALONG_K)
    right = load_scales(y_scale, columns, blocks, n, tl.cdiv(k, PER), B_ALONG_K)
    if SCALING == "nv":
        left, right = left.to(tl.float8e4nv, bitcast=True), right.to(tl.float8e4nv, bitcast=True)
    a_form: tl.constexpr = "e4m3" if A_CODE == "e4m3fn" else A_CODE
    b_form: tl.constexpr = "e4m3" if B_CODE == "e4m3fn" else B_CODE
    return tl.dot_scaled(x, left, a_form, tl.trans(y), right, b_form, acc)


@triton.jit
def product_tile(
    a, b, a_scale, b_scale, m, n, k, a_stride, b_stride, first_m, first_n,
    A_ALONG_K: tl.constexpr, B_ALONG_K: tl.constexpr, A_CODE: tl.constexpr, B_CODE: tl.constexpr,
    A_TILES: tl.constexpr, B_TILES: tl.constexpr, SCALING: tl.constexpr, UNITS: tl.constexpr, PROMOTE: tl.constexpr,
    PROMOTED: tl.constexpr, PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, EVEN_K: tl.constexpr,
    INTERPRETED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sums (fp32) of one tile of the output, before scales of whole operands that were not applied on the way."""
    PAIRS: tl.constexpr = SCALING == "nv"
    STEP: tl.constexpr = BLOCK_K // 2 if PAIRS else BLOCK_K
    rows, columns = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    MICRO: tl.constexpr = SCALING == "mx" or SCALING == "nv"
    if SCALING == "tensor" and PROMOTE:
        whole = tl.load(a_scale) * tl.load(b_scale)
    for step in range(tl.cdiv(k, BLOCK_K)):
        first = step * BLOCK_K
        if DESCRIBED:
            x = a.load([first_m, first]) if A_ALONG_K else tl.trans(a.load([first, first_m]))
            y = b.load([first_n, first]) if B_ALONG_K else tl.trans(b.load([first, first_n]))
        else:
            steps = step * STEP + tl.arange(0, STEP)
            x = load_tile(a, rows, steps, m, k, a_stride, A_ALONG_K, EVEN_K, PAIRS)
            y = load_tile(b, columns, steps, n, k, b_stride, B_ALONG_K, EVEN_K, PAIRS)
        if A_CODE != "none" and not UNITS:
            x = decoded(x, a_scale, rows, first, m, k, BLOCK_K, A_ALONG_K, A_CODE, SCALING)
            y = decoded(y, b_scale, columns, first, n, k, BLOCK_K, B_ALONG_K, B_CODE, SCALING)
        if SCALING == "block" or PROMOTE:
            part = dot(x, y, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), UNITS, PRECISION, 0, INTERPRETED)
            if SCALING == "block":
                block = first // 128
                left = block_scale(a_scale, rows, first_m, block, m, k, A_TILES, BLOCK_M)
                right = block_scale(b_scale, columns, first_n, block, n, k, B_TILES, BLOCK_N)
                acc += times(part, left, right, A_TILES and BLOCK_M <= 128, B_TILES and BLOCK_N <= 128)
            else:
                acc += part * whole
        elif MICRO and UNITS:
            acc = scaled_dot(
                x, y, a_scale, b_scale, rows, columns, first, m, n, k, acc, A_ALONG_K, B_ALONG_K, A_CODE, B_CODE,
                SCALING, BLOCK_K,
            )  # fmt: skip
        else:
            acc = dot(x, y, acc, UNITS, PRECISION, PROMOTED, INTERPRETED)
    return acc


@triton.jit
def place(index, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(tile row, tile column): GROUP tile rows are walked together column by column, so that they share what they read
    while it is in the cache."""
    in_group = GROUP * tiles_n
    first = (index // in_group) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    within = index % in_group
    return first + within % height, within // height


@triton.jit
def gemm(
    a, b, out, a_scale, b_scale, a_whole, b_whole, bias, aux, aux_scale, aux_scale_inv, aux_amax, out_scale,
    out_scale_inv, out_amax, sums, alpha, m, n, k, a_stride, b_stride,
    A_ALONG_K: tl.constexpr, B_ALONG_K: tl.constexpr, A_CODE: tl.constexpr, B_CODE: tl.constexpr,
    A_TILES: tl.constexpr, B_TILES: tl.constexpr, SCALING: tl.constexpr, UNITS: tl.constexpr, PROMOTE: tl.constexpr,
    PRECISION: tl.constexpr, DESCRIBED: tl.constexpr, EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr,
    EPILOGUE: tl.constexpr, ACCUMULATE: tl.constexpr, OUT_CODE: tl.constexpr, OUT_COMMON: tl.constexpr,
    OUT_HARD: tl.constexpr, AUX_CODE: tl.constexpr, AUX_COMMON: tl.constexpr, AUX_HARD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    PROMOTED: tl.constexpr, FLATTEN: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Persistent: program p computes the tiles p, p + programs, ... of the output (m, n), and finishes them.

    a, b: pointers or (DESCRIBED) descriptors; the other operands pointers or None. STORE: out is a descriptor.
    PARTS: the columns of a tile are finished in so many parts, which take turns in shared memory.
    """
    if UNITS and not DESCRIBED and (SCALING == "tensor" or SCALING == "block"):
        a, b = typed(a, A_CODE), typed(b, B_CODE)
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        row, column = place(index, tiles_m, tiles_n, GROUP)
        acc = product_tile(
            a, b, a_scale, b_scale, m, n, k, a_stride, b_stride, row * BLOCK_M, column * BLOCK_N,
            A_ALONG_K, B_ALONG_K, A_CODE, B_CODE, A_TILES, B_TILES, SCALING, UNITS, PROMOTE, PROMOTED, PRECISION,
            DESCRIBED, EVEN_K, INTERPRETED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        factor = alpha
        if SCALING == "tensor" and not PROMOTE:
            factor = alpha * (tl.load(a_scale) * tl.load(b_scale))
        if SCALING == "nv":
            factor = alpha * (tl.load(a_whole) * tl.load(b_whole))
        if PARTS == 1:
            finish(
                acc * factor, out, bias, aux, aux_scale, aux_scale_inv, aux_amax, out_scale, out_scale_inv, out_amax,
                sums, m, n, row * BLOCK_M, column * BLOCK_N, row, index == 0, EPILOGUE, ACCUMULATE, OUT_CODE,
                OUT_COMMON, OUT_HARD, AUX_CODE, AUX_COMMON, AUX_HARD, INTERPRETED, STORE,
            )  # fmt: skip
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
            finish(
                left * factor, out, bias, aux, aux_scale, aux_scale_inv, aux_amax, out_scale, out_scale_inv, out_amax,
                sums, m, n, row * BLOCK_M, column * BLOCK_N, row, index == 0, EPILOGUE, ACCUMULATE, OUT_CODE,
                OUT_COMMON, OUT_HARD, AUX_CODE, AUX_COMMON, AUX_HARD, INTERPRETED, STORE,
            )  # fmt: skip
            finish(
                right * factor, out, bias, aux, aux_scale, aux_scale_inv, aux_amax, out_scale, out_scale_inv, out_amax,
                sums, m, n, row * BLOCK_M, column * BLOCK_N + HALF, row, index < 0, EPILOGUE, ACCUMULATE, OUT_CODE,
                OUT_COMMON, OUT_HARD, AUX_CODE, AUX_COMMON, AUX_HARD, INTERPRETED, STORE,
            )  # fmt: skip


@triton.jit
def operand_sums(
    x, scale, sums, rows, columns, stride, CODE: tl.constexpr, SCALING: tl.constexpr, TILES: tl.constexpr,
    ROW_COPY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Column sums (fp32) of the logical matrix (rows, columns) over SPAN rows: row program_id(1) of `sums`.

    ROW_COPY: x is stored as (rows, columns), as block scales are for mxfp8 only; else as (columns, rows).
    """
    cols = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    base = tl.program_id(1) * SPAN
    acc = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for offset in range(0, SPAN, BLOCK_R):
        lines = base + offset + tl.arange(0, BLOCK_R)
        acc += operand_values(x, scale, lines, cols, rows, columns, stride, CODE, SCALING, TILES, ROW_COPY)
    tile.put_sums(acc, sums, tl.program_id(1), cols.to(tl.int64), columns)


@triton.jit
def operand_values(
    x, scale, lines, cols, rows, columns, stride,
    CODE: tl.constexpr, SCALING: tl.constexpr, TILES: tl.constexpr, ROW_COPY: tl.constexpr,
):  # fmt: skip
    """fp32 values (lines, cols) of a matrix or a record, 0 beyond it."""
    mask = (lines < rows)[:, None] & (cols < columns)[None, :]
    wide_lines, wide_cols = lines.to(tl.int64)[:, None], cols.to(tl.int64)[None, :]
    at = x + (wide_lines * stride + wide_cols if ROW_COPY else wide_cols * stride + wide_lines)
    found = tl.load(at, mask=mask, other=0.0)
    value = found.to(tl.float32) if CODE == "none" else decode(found, CODE)
    if SCALING == "tensor":
        value = value * tl.load(scale)
    elif SCALING != "none":
        # Blocks lie along the rows that are summed.
        PER: tl.constexpr = 32 if SCALING == "mx" else 128
        if ROW_COPY:
            places = wide_lines // PER * columns + wide_cols
        else:
            lane = wide_cols // 128 if TILES else wide_cols
            places = lane * tl.cdiv(rows, PER) + wide_lines // PER
        factor = tl.load(scale + places, mask=mask, other=0)
        value = value * (exponent_scale(factor) if SCALING == "mx" else factor)
    return tl.where(mask, value, 0.0)
