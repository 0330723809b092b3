# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts with a scale per block: block_1d, block_2d, mxfp8, nvfp4 (te_dispatch.numerics.quantizers has the formulas).

A tile of fp32 values (kernels.tile: ``v``, ``rows``, ``columns``, zeros beyond the matrix) holds whole blocks: BM and
BN are multiples of the block wherever the copy's blocks run that way, and the tile starts on one. `put_row_copy` and
`put_column_copy` do a tile's part of one copy, codes and scales; `put_tile` does both of block_2d, whose tiles are its
blocks. They serve fused operators too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels import tile
from te_dispatch_triton.kernels.codes import decode, encode, max_value, scale_from_amax
from te_dispatch_triton.kernels.tile import INTERPRETED


@triton.jit
def row_amaxes(v, BLOCK: tl.constexpr):
    """(BM, BN) -> (BM, BN / BLOCK)."""
    if v.shape[1] == BLOCK:
        return tile.number(tl.max(tile.magnitudes(v), axis=1, keep_dims=True))
    blocks = tl.reshape(tile.magnitudes(v), (v.shape[0], v.shape[1] // BLOCK, BLOCK))
    return tile.number(tl.max(blocks, axis=2))


@triton.jit
def column_amaxes(v, BLOCK: tl.constexpr):
    """(BM, BN) -> (BM / BLOCK, BN)."""
    if v.shape[0] == BLOCK:
        return tile.number(tl.max(tile.magnitudes(v), axis=0, keep_dims=True))
    blocks = tl.reshape(tile.magnitudes(v), (v.shape[0] // BLOCK, BLOCK, v.shape[1]))
    return tile.number(tl.max(blocks, axis=1))


@triton.jit
def shared_down(amax, BLOCK: tl.constexpr):
    """(R, C) -> (R, C): every BLOCK rows share their largest."""
    groups = tl.max(tl.reshape(amax, (amax.shape[0] // BLOCK, BLOCK, amax.shape[1])), axis=1)
    wide = tl.broadcast_to(groups[:, None, :], (amax.shape[0] // BLOCK, BLOCK, amax.shape[1]))
    return tl.reshape(wide, (amax.shape[0], amax.shape[1]))


@triton.jit
def shared_across(amax, BLOCK: tl.constexpr):
    """(R, C) -> (R, C): every BLOCK columns share their largest."""
    groups = tl.max(tl.reshape(amax, (amax.shape[0], amax.shape[1] // BLOCK, BLOCK)), axis=2)
    wide = tl.broadcast_to(groups[:, :, None], (amax.shape[0], amax.shape[1] // BLOCK, BLOCK))
    return tl.reshape(wide, (amax.shape[0], amax.shape[1]))


@triton.constexpr_function
def exponent_of(value):
    """e of a normal fp32 constant that is m * 2^e, m in [1, 2)."""
    e = 0
    while value >= 2.0:
        value, e = value / 2.0, e + 1
    return e


@triton.constexpr_function
def mantissa_of(value):
    """The mantissa's bits of a constant that is at least 1."""
    while value >= 2.0:
        value = value / 2.0
    return int((value - 1.0) * 8388608.0)


@triton.jit
def e8m0_of(amax, LIMIT: tl.constexpr):
    """Codes (int32) of ceil(log2(RN32(amax / LIMIT))), clamped to [00, FE]; amax is no NaN.

    Without the quotient: it is above a power of two exactly if amax's mantissa is above LIMIT's. For the code 01 by two
    units, because below fp32's normal numbers one unit rounds away.
    """
    mantissa: tl.constexpr = mantissa_of(LIMIT)
    bits = amax.to(tl.int32, bitcast=True)
    base = (bits >> 23) - exponent_of(LIMIT)
    up = (bits & 0x7FFFFF) > (mantissa + (base == 0).to(tl.int32))
    code = tl.minimum(tl.maximum(base + up.to(tl.int32), 0), 254)
    return tl.where(bits == 0x7F800000, 254, code)


@triton.jit
def e8m0_inverse(code):
    """2^(127 - code), what values are multiplied by."""
    return tl.where(code == 254, 0x00400000, (254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def power_scale(amax, epsilon, LIMIT: tl.constexpr):
    """`codes.scale_from_amax` rounded down to a power of two, without the quotient, which is below a power of two
    exactly if amax's mantissa is above LIMIT's: the sum carries into the exponent."""
    carry: tl.constexpr = 0x7FFFFF - mantissa_of(LIMIT)
    biased: tl.constexpr = 254 + exponent_of(LIMIT)
    bits = tl.maximum(amax, epsilon).to(tl.int32, bitcast=True)
    scale = tl.minimum(biased - ((bits + carry) >> 23), 254) << 23
    usable = (bits > 0) & (bits < 0x7F800000)
    return tl.where(usable, scale, 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def factor_of(amax, epsilon, ENCODING: tl.constexpr, COMMON: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """block_1d, block_2d: what values are scaled by. amax: a maximum of `magnitudes`, NaN where all were."""
    limit: tl.constexpr = max_value(ENCODING, COMMON)
    if POWER_OF_TWO:  # a chip's maximum of NaN and a number is the number
        return power_scale(amax, epsilon, limit)
    else:
        return scale_from_amax(tile.number(amax), limit, epsilon, False)


@triton.jit
def inverse_of(factor, POWER_OF_TWO: tl.constexpr):
    """RN32(1 / factor), of a power of two without the quotient."""
    if POWER_OF_TWO:
        biased = factor.to(tl.int32, bitcast=True) >> 23
        inverse = tl.where(biased == 254, 0x00400000, (254 - biased) << 23).to(tl.float32, bitcast=True)
    else:
        inverse = tl.math.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor)
    return inverse


@triton.jit
def scales_of(
    amax, whole, epsilon, SCALING: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, HARD: tl.constexpr = 0,
):  # fmt: skip
    """(what values are scaled by, what is stored) of blocks with these amaxes. whole: nvfp4's scale of the tensor;
    HARD: whether the chip converts to its scales."""
    limit: tl.constexpr = max_value(ENCODING, COMMON)
    if SCALING == "mxfp8":
        code = e8m0_of(amax, limit)
        factor = e8m0_inverse(code)
        stored = code.to(tl.uint8)
    elif SCALING == "nvfp4":
        sixth = tl.math.div_rn(amax * whole, tl.full(amax.shape, limit, tl.float32))
        stored = encode(sixth, "e4m3fn", False, HARD)
        if HARD:
            factor = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            factor = decode(stored, "e4m3fn")
    else:
        factor = factor_of(amax, epsilon, ENCODING, COMMON, POWER_OF_TWO)
        stored = inverse_of(factor, POWER_OF_TWO)
    return factor, stored


@triton.jit
def _e2m1_by_ties(a, divisor):
    """e2m1's codes of a / divisor, a >= 0 or NaN, whatever that gives for NaN and a divisor of 0.

    Without the quotient: where it is a tie t between two codes, or on which side of one, a says by itself. t * divisor
    is exact, and the fp32 numbers next to it make quotients that are more than half a unit off t.
    """
    code = (a > 0.25 * divisor).to(tl.int32) + (a >= 0.75 * divisor).to(tl.int32) + (a > 1.25 * divisor).to(tl.int32)
    code += (a >= 1.75 * divisor).to(tl.int32) + (a > 2.5 * divisor).to(tl.int32) + (a >= 3.5 * divisor).to(tl.int32)
    return code + (a > 5.0 * divisor).to(tl.int32)


@triton.jit
def _e2m1_by_quotient(a, divisor):
    """The same in fewer steps, where `tl.fma` rounds once: a product with about 1 / divisor, corrected by its
    remainder, is off the quotient by far less than ties are apart from the quotients next to them."""
    inverse = 1.0 / divisor
    a = tl.minimum(a, 1.2676506e30)
    quotient = a * inverse
    quotient = tl.minimum(tl.fma(tl.fma(-quotient, divisor, a), inverse, quotient), 6.0)
    # Codes count steps of 2^(e - 1), e the quotient's exponent but at least 0: a sum with 2^(e + 22) rounds to them,
    # and two codes are passed with every exponent.
    magic = (tl.maximum(quotient, 1.0).to(tl.int32, bitcast=True) & 0x7F800000) + (22 << 23)
    counted = (quotient + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return (counted & 7) + (counted >> 22) - 2 * 149


@triton.jit
def e2m1_of(x, divisor, COMMON: tl.constexpr):
    """Codes of RN32(x / divisor), all 0 where the divisor is: a block whose scale underflowed holds nothing that it
    could represent. divisor: values of e4m3fn that broadcast to x."""
    a = tl.abs(x)
    code = _e2m1_by_ties(a, divisor) if INTERPRETED else _e2m1_by_quotient(a, divisor)
    negative = x.to(tl.int32, bitcast=True) < 0
    if COMMON:
        negative = negative & (code != 0)
    code = tl.where(a == a, tl.where(negative, code | 8, code), 7)
    return tl.where(divisor == 0.0, 0, code).to(tl.uint8)


@triton.jit
def block_codes(
    v, factor, whole, SCALING: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr
):
    """Codes of blocks; factor broadcasts to v."""
    if SCALING == "nvfp4":
        return e2m1_of(v * whole, factor, COMMON)
    else:
        return encode(v * factor, ENCODING, COMMON, HARD)


@triton.jit
def put_row_copy(
    v, data, scales, rows, columns, first_column, M, N, whole, epsilon,
    SCALING: tl.constexpr, TWO_D: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """A tile's part of the row-wise copy: data (M, N), or nvfp4's (M, ceil(N / 2)); scales (M, ceil(N / block)).

    first_column: columns[0], a scalar. whole: nvfp4's scale of the tensor. TWO_D: nvfp4 blocks of 16x16.
    """
    block: tl.constexpr = 32 if SCALING == "mxfp8" else (16 if SCALING == "nvfp4" else 128)
    BM: tl.constexpr = v.shape[0]
    BN: tl.constexpr = v.shape[1]
    amax = row_amaxes(v, block)
    if TWO_D:
        amax = shared_down(amax, block)
    factor, stored = scales_of(amax, whole, epsilon, SCALING, ENCODING, COMMON, POWER_OF_TWO, HARD)
    places = tile.span(first_column // block, BN // block)
    tile.put_rows(stored, scales, rows, places, M, tl.cdiv(N, block))
    if block == BN:
        codes = block_codes(v, factor, whole, SCALING, ENCODING, COMMON, HARD)
    else:
        wide = tl.reshape(v, (BM, BN // block, block))
        codes = tl.reshape(block_codes(wide, factor[:, :, None], whole, SCALING, ENCODING, COMMON, HARD), (BM, BN))
    if SCALING == "nvfp4":
        low, high = tl.split(tl.reshape(codes, (BM, BN // 2, 2)))
        # N - N // 2: of a rounded quotient Triton does not know what it is a multiple of, and stores single bytes.
        tile.put_rows(low | (high << 4), data, rows, tile.span(first_column // 2, BN // 2), M, N - N // 2)
    else:
        tile.put_rows(codes, data, rows, columns, M, N)


@triton.jit
def put_column_copy(
    v, data, scales, rows, columns, first_row, M, N, whole, epsilon,
    SCALING: tl.constexpr, TWO_D: tl.constexpr, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """A tile's part of the column-wise copy: data (N, M), or nvfp4's (N, ceil(M / 2)), scales (N, ceil(M / block)); of
    mxfp8, which is not transposed, data (M, N), scales (ceil(M / block), N).

    first_row: rows[0], a scalar. whole: nvfp4's scale of the tensor. TWO_D: nvfp4 blocks of 16x16.
    """
    block: tl.constexpr = 32 if SCALING == "mxfp8" else (16 if SCALING == "nvfp4" else 128)
    BM: tl.constexpr = v.shape[0]
    BN: tl.constexpr = v.shape[1]
    amax = column_amaxes(v, block)
    if TWO_D:
        amax = shared_across(amax, block)
    factor, stored = scales_of(amax, whole, epsilon, SCALING, ENCODING, COMMON, POWER_OF_TWO, HARD)
    places = tile.span(first_row // block, BM // block)
    if block == BM:
        codes = block_codes(v, factor, whole, SCALING, ENCODING, COMMON, HARD)
    else:
        wide = tl.reshape(v, (BM // block, block, BN))
        codes = tl.reshape(block_codes(wide, factor[:, None, :], whole, SCALING, ENCODING, COMMON, HARD), (BM, BN))
    if SCALING == "mxfp8":
        tile.put_rows(stored, scales, places, columns, tl.cdiv(M, block), N)
        tile.put_rows(codes, data, rows, columns, M, N)
    else:
        tile.put_transposed(stored, scales, places, columns, tl.cdiv(M, block), N)
        if SCALING == "nvfp4":
            low, high = tl.split(tl.permute(tl.reshape(codes, (BM // 2, 2, BN)), (0, 2, 1)))
            pairs = tile.span(first_row // 2, BM // 2)
            tile.put_transposed(low | (high << 4), data, pairs, columns, M - M // 2, N)
        else:
            tile.put_transposed(codes, data, rows, columns, M, N)


@triton.jit
def put_tile(
    v, row_data, row_scales, column_data, column_scales, rows, columns, down, side, M, N, epsilon,
    ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """block_2d: both copies of the 128x128 tile that is the (down, side)-th; None for what is not asked for."""
    amax = tile.amax_of(v)
    scale = scale_from_amax(amax, max_value(ENCODING, COMMON), epsilon, POWER_OF_TWO)
    inverse = tl.math.div_rn(1.0, scale)
    if row_data is not None:
        tl.store(row_scales + down.to(tl.int64) * tl.cdiv(N, 128) + side, inverse)
        tile.put_rows(encode(v * scale, ENCODING, COMMON, HARD), row_data, rows, columns, M, N)
    if column_data is not None:
        tl.store(column_scales + side.to(tl.int64) * tl.cdiv(M, 128) + down, inverse)
        codes = encode(v * tile.apart(scale), ENCODING, COMMON, HARD)
        tile.put_transposed(codes, column_data, rows, columns, M, N)
