# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Softmax of rows, and its gradient, in fp32.

Weights are 2^((x - max x) * scale * log2 e): three roundings of the exponent, and no overflow before the difference. A
negative scale turns the sign of x first, so that the largest x has the largest weight.

Rows that one program can hold are read once. Longer ones are read twice, in pieces; forward, the first reading keeps
the maximum so far and the sum of weights relative to it, which a new maximum rescales (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.codes import narrow, widen


@triton.jit
def _read(
    x, mask, mask_rows, rows, row_in, columns, R, C, mask_column, NEGATE: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """x (sign turned with NEGATE) of a tile, -Inf where masked, and where not."""
    present = (rows < R)[:, None] & (columns < C)[None, :]
    if CAUSAL:
        present = present & (columns[None, :] <= row_in.to(tl.int32)[:, None])
    v = widen(tl.load(x + rows[:, None] * C + columns[None, :], mask=present, other=0.0))
    if mask is not None:
        places = mask_rows[:, None] + columns[None, :] * mask_column
        present = present & (tl.load(mask + places, mask=present, other=1) == 0)
    if NEGATE:
        v = -v
    return tl.where(present, v, float("-inf")), present


@triton.jit
def _finite(top):
    """A maximum to subtract: 0 of a row that is masked out whole."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _inverse(total):
    return tl.math.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.where(total == 0.0, 1.0, total))


@triton.jit
def _whole(
    x, mask, y, mask_rows, rows, row_in, R, C, scale, mask_column,
    NEGATE: tl.constexpr, CAUSAL: tl.constexpr, INTERPRETED: tl.constexpr, BN: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    """Rows whose entries from column BN on are all masked, of which BEHIND are to be written."""
    columns = tl.arange(0, BN)
    v, present = _read(x, mask, mask_rows, rows, row_in, columns, R, C, mask_column, NEGATE, CAUSAL)
    top = _finite(tl.max(v, axis=1))
    w = tl.where(present, tl.exp2((v - top[:, None]) * scale), 0.0)
    p = w * _inverse(tl.sum(w, axis=1))[:, None]
    places = y + rows[:, None] * C
    tl.store(
        places + columns[None, :], narrow(p, y.dtype.element_ty, INTERPRETED),
        mask=(rows < R)[:, None] & (columns < C)[None, :],
    )  # fmt: skip
    if BEHIND > 0:
        columns = tl.arange(0, BN + BEHIND)
        behind = (rows < R)[:, None] & ((columns >= BN) & (columns < C))[None, :]
        tl.store(places + columns[None, :], tl.zeros(behind.shape, y.dtype.element_ty), mask=behind)


# How many rows there are changes how Triton would lay out the loads of a mask, and with it the order of a row's sum:
# rows would depend on their number. So nothing that comes with rows is specialized on; MASK_VECTORS says what a mask's
# strides are multiples of.
@triton.jit(do_not_specialize=("R", "heads", "s_q", "mask_batch", "mask_head", "mask_row"))
def forward(
    x, mask, y, R, C, scale, heads, s_q, mask_batch, mask_head, mask_row, mask_column,
    NEGATE: tl.constexpr, CAUSAL: tl.constexpr, MASK_VECTORS: tl.constexpr, INTERPRETED: tl.constexpr,
    WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y (R, C) of x (R, C), rows numbered batch by batch, head by head.

    scale: |scale| * log2 e. mask: bytes that are nonzero where masked out, with elements between batches, heads, rows
    and columns; None for none. MASK_VECTORS: its rows begin at multiples of 16 bytes. WHOLE: BN columns are a row.
    """
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    row_in = rows % s_q
    mask_rows = rows
    if mask is not None:
        head = rows // s_q
        mask_rows = head // heads * mask_batch + head % heads * mask_head + row_in * mask_row
        if MASK_VECTORS:
            mask_rows = tl.multiple_of(mask_rows, 16)
    if WHOLE:
        # Rows of a triangle: what lies behind the diagonal by half of a row or more is not worked out.
        limit = 0
        if CAUSAL:
            limit = tl.max(row_in.to(tl.int32), axis=0) + 1
        if CAUSAL and BN >= 64 and limit <= BN // 4:
            _whole(
                x, mask, y, mask_rows, rows, row_in, R, C, scale, mask_column,
                NEGATE, CAUSAL, INTERPRETED, BN // 4, BN - BN // 4,
            )  # fmt: skip
        elif CAUSAL and BN >= 64 and limit <= BN // 2:
            _whole(
                x, mask, y, mask_rows, rows, row_in, R, C, scale, mask_column,
                NEGATE, CAUSAL, INTERPRETED, BN // 2, BN - BN // 2,
            )  # fmt: skip
        else:
            _whole(
                x, mask, y, mask_rows, rows, row_in, R, C, scale, mask_column,
                NEGATE, CAUSAL, INTERPRETED, BN, 0,
            )  # fmt: skip
    else:
        top = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        for first in range(0, C, BN):
            columns = first + tl.arange(0, BN)
            v, present = _read(x, mask, mask_rows, rows, row_in, columns, R, C, mask_column, NEGATE, CAUSAL)
            higher = tl.maximum(top, tl.max(v, axis=1))
            base = _finite(higher)
            w = tl.where(present, tl.exp2((v - base[:, None]) * scale), 0.0)
            # A row of nothing so far has a total of 0, whatever it is multiplied with.
            kept = tl.where(top == float("-inf"), 0.0, tl.exp2((top - base) * scale))
            total = total * kept + tl.sum(w, axis=1)
            top = higher
        base, inverse = _finite(top), _inverse(total)
        for first in range(0, C, BN):
            columns = first + tl.arange(0, BN)
            v, present = _read(x, mask, mask_rows, rows, row_in, columns, R, C, mask_column, NEGATE, CAUSAL)
            p = tl.where(present, tl.exp2((v - base[:, None]) * scale), 0.0) * inverse[:, None]
            inside = (rows < R)[:, None] & (columns < C)[None, :]
            tl.store(y + rows[:, None] * C + columns[None, :], narrow(p, y.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def backward(
    dy, y, dx, R, C, scale, INTERPRETED: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """dx = scale * y * (dy - sum(dy * y)) of rows of C."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    if WHOLE:
        columns = tl.arange(0, BN)
        places = rows[:, None] * C + columns[None, :]
        inside = (rows < R)[:, None] & (columns < C)[None, :]
        g = widen(tl.load(dy + places, mask=inside, other=0.0))
        p = widen(tl.load(y + places, mask=inside, other=0.0))
        d = scale * (p * (g - tl.sum(g * p, axis=1)[:, None]))
        tl.store(dx + places, narrow(d, dx.dtype.element_ty, INTERPRETED), mask=inside)
    else:
        sums = tl.zeros((BM, BN), tl.float32)
        for first in range(0, C, BN):
            columns = first + tl.arange(0, BN)
            places = rows[:, None] * C + columns[None, :]
            inside = (rows < R)[:, None] & (columns < C)[None, :]
            g = widen(tl.load(dy + places, mask=inside, other=0.0))
            sums += g * widen(tl.load(y + places, mask=inside, other=0.0))
        total = tl.sum(sums, axis=1)
        for first in range(0, C, BN):
            columns = first + tl.arange(0, BN)
            places = rows[:, None] * C + columns[None, :]
            inside = (rows < R)[:, None] & (columns < C)[None, :]
            g = widen(tl.load(dy + places, mask=inside, other=0.0))
            p = widen(tl.load(y + places, mask=inside, other=0.0))
            d = scale * (p * (g - total[:, None]))
            tl.store(dx + places, narrow(d, dx.dtype.element_ty, INTERPRETED), mask=inside)
