# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Codes to values, of every scaling and layout of scales: RN_dtype(RN32(decode(code) * scale_inv)).

A copy is stored as R rows of C values (nvfp4: two to a byte). Its scales are found by (row, block) with two steps, or
in swizzled tiles (`place_of`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.codes import decode, narrow


@triton.jit
def value_of(code, ENCODING: tl.constexpr, HARD: tl.constexpr):
    """`codes.decode`, by the chip's conversion where HARD says that it has one."""
    if ENCODING == "e5m2":  # the upper byte of a half
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif HARD and ENCODING == "e4m3fn":
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif HARD and ENCODING == "e4m3fnuz":
        return code.to(tl.float8e4b8, bitcast=True).to(tl.float32)
    elif HARD and ENCODING == "e5m2fnuz":
        return code.to(tl.float8e5b16, bitcast=True).to(tl.float32)
    else:
        return decode(code, ENCODING)


@triton.jit
def power_of(code):
    """2^(code - 127) of E8M0 codes (uint8), fp32; FF is NaN, and 00 below fp32's normal numbers."""
    wide = code.to(tl.uint32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def place_of(row, block, row_step, block_step, SWIZZLED: tl.constexpr):
    """Where the scale of (row, block) lies. SWIZZLED: in tiles of 128 rows and 4 blocks, `row_step` tiles side by side,
    scale (r, c) of a tile at ((r % 32) * 4 + r // 32) * 4 + c (`te_dispatch.ops.relayout_scales`)."""
    if SWIZZLED:
        tile = row // 128 * row_step + block // 4
        return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    else:
        return row * row_step + block * block_step


@triton.jit
def scale_at(scale, whole, places, mask, SCALING: tl.constexpr):
    """fp32 factors at places of a copy's scales."""
    found = tl.load(scale + places, mask=mask, other=0)
    if SCALING == "mxfp8":
        return power_of(found)
    elif SCALING == "nvfp4":
        return decode(found, "e4m3fn") * tl.load(whole)
    else:
        return found


@triton.jit
def dequantize_line(
    data, scale, out, size,
    ENCODING: tl.constexpr, HARD: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Values of `size` codes that lie one after the other and share one scale."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    v = value_of(tl.load(data + places, mask=mask, other=0), ENCODING, HARD) * tl.load(scale)
    tl.store(out + places, narrow(v, out.dtype.element_ty, INTERPRETED), mask=mask)


@triton.jit
def dequantize_blocks(
    data, scale, whole, out, R, C, row_step, block_step,
    ENCODING: tl.constexpr, HARD: tl.constexpr, SCALING: tl.constexpr, SWIZZLED: tl.constexpr,
    TRANSPOSED: tl.constexpr, INTERPRETED: tl.constexpr, SIDE: tl.constexpr, BM: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Values of stored rows whose blocks of SIDE columns have scales (block_2d: shared by 128 rows).

    A program takes BM rows of BLOCKS blocks. out: (R, C), or with TRANSPOSED (C, R). SCALING "tensor" has one scale.
    """
    across = tl.cdiv(C, BLOCKS * SIDE)
    program = tl.program_id(0)
    rows = (program // across).to(tl.int64) * BM + tl.arange(0, BM)
    blocks = (program % across).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    inside = (rows < R)[:, None, None] & (columns < C)[None, :, :]
    if SCALING == "nvfp4":
        pitch = (C + 1) // 2
        bytes_ = blocks[:, None] * (SIDE // 2) + tl.arange(0, SIDE // 2)[None, :]
        mask = (rows < R)[:, None, None] & (bytes_ < pitch)[None, :, :]
        pairs = tl.load(data + rows[:, None, None] * pitch + bytes_[None, :, :], mask=mask, other=0)
        codes = tl.join(pairs & 15, pairs >> 4).reshape(BM, BLOCKS, SIDE)
    else:
        codes = tl.load(data + rows[:, None, None] * C + columns[None, :, :], mask=inside, other=0)
    v = value_of(codes, ENCODING, HARD)
    if SCALING == "tensor":
        v = v * tl.load(scale)
    else:
        scale_rows = rows // 128 if SCALING == "block_2d" else rows
        places = place_of(scale_rows[:, None], blocks[None, :], row_step, block_step, SWIZZLED)
        there = (rows < R)[:, None] & (blocks * SIDE < C)[None, :]
        v = v * scale_at(scale, whole, places, there, SCALING)[:, :, None]
    v = narrow(v, out.dtype.element_ty, INTERPRETED)
    if TRANSPOSED:
        flat = (program % across).to(tl.int64) * (BLOCKS * SIDE) + tl.arange(0, BLOCKS * SIDE)
        turned = tl.trans(v.reshape(BM, BLOCKS * SIDE))
        places = flat[:, None] * R + rows[None, :]
        tl.store(out + places, turned, mask=(flat < C)[:, None] & (rows < R)[None, :])
    else:
        tl.store(out + rows[:, None, None] * C + columns[None, :, :], v, mask=inside)


@triton.jit
def dequantize_down(
    data, scale, out, R, C, row_step, block_step,
    ENCODING: tl.constexpr, HARD: tl.constexpr, SWIZZLED: tl.constexpr, INTERPRETED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Values of mxfp8's column-wise copy: blocks of 32 rows; scales by (column, row block). A program takes a block of
    BN columns."""
    across = tl.cdiv(C, BN)
    program = tl.program_id(0)
    block = (program // across).to(tl.int64)
    rows = block * 32 + tl.arange(0, 32)
    columns = (program % across).to(tl.int64) * BN + tl.arange(0, BN)
    inside = (rows < R)[:, None] & (columns < C)[None, :]
    places = rows[:, None] * C + columns[None, :]
    v = value_of(tl.load(data + places, mask=inside, other=0), ENCODING, HARD)
    at = place_of(columns, block, row_step, block_step, SWIZZLED)
    v = v * scale_at(scale, None, at, columns < C, "mxfp8")[None, :]
    tl.store(out + places, narrow(v, out.dtype.element_ty, INTERPRETED), mask=inside)
