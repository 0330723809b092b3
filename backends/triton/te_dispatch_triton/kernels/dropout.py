# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout with residual add. Element i is kept where word i % 4 of Philox 4x32-10(seed; i / 4, offset) is at least
p 2^32: a mask depends on rng_state and the element's place alone, not on dtype, alignment or launch."""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.codes import narrow, widen


@triton.jit
def kept(seed, offset, first, threshold, BLOCK: tl.constexpr):
    """Which of the elements from `first` (a multiple of 4) on are kept, (BLOCK,).

    Source of the words: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Words
    and threshold are compared as signed numbers, so `threshold` is p 2^32 - 2^31, which an int32 holds.
    """
    group = (first // 4).to(tl.uint64) + tl.arange(0, BLOCK // 4).to(tl.uint64)
    low, high = group.to(tl.uint32), (group >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    offset_low = zero + (offset & 0xFFFFFFFF).to(tl.uint32)
    offset_high = zero + ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, offset_low, offset_high)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (BLOCK,))
    return (words ^ 0x80000000).to(tl.int32, bitcast=True) >= threshold


@triton.jit
def dropout_forward(
    x, residual, bias, rng_state, out, mask, n, columns, threshold, factor,
    DROPS: tl.constexpr, WIDE: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """residual + dropout(x + bias) of n elements in rows of `columns`. WIDE: no block spans more than two rows."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = first + tl.arange(0, BLOCK)
    inside = i < n
    value = widen(tl.load(x + i, mask=inside, other=0.0))
    if residual is not None:
        added = widen(tl.load(residual + i, mask=inside, other=0.0))  # on its way while words are made
    if bias is not None:
        column = (first % columns).to(tl.int32) + tl.arange(0, BLOCK)
        column = tl.where(column >= columns, column - columns, column) if WIDE else column % columns
        value += widen(tl.load(bias + column, mask=inside, other=0.0))
    if DROPS:
        keep = kept(tl.load(rng_state), tl.load(rng_state + 1), first, threshold, BLOCK)
        tl.store(mask + i, keep.to(tl.uint8), mask=inside)
        value = tl.where(keep, value * factor, 0.0)
    if residual is not None:
        value += added
    tl.store(out + i, narrow(value, out.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit
def dropout_backward(dy, mask, dx, n, factor, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr):
    """dy * mask * factor of n elements; dy itself without a mask."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    grad = tl.load(dy + i, mask=inside, other=0.0)
    if mask is not None:
        keep = tl.load(mask + i, mask=inside, other=0) != 0
        grad = narrow(tl.where(keep, widen(grad) * factor, 0.0), dx.dtype.element_ty, INTERPRETED)
    tl.store(dx + i, grad, mask=inside)
