# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The end of a step of delayed scaling: new scales, histories rolled.

The kernels get their table by value, so that a CUDA graph keeps it and nothing is copied to the device. An entry is a
run of columns that share a numerator, as five int64 words:

HISTORY  address of the run's first element in row 0 of its history, fp32
SCALE    address of its first scale
AMAX     address of where its first amax goes; that of the scale for nowhere
EXTENT   rows of the history, in the high half; its columns, which are the stride from row to row, in the low half
RUN      the numerator (largest value * 2^-margin), fp32 bits in the high half; bit 31; columns of the run below it

Each is beyond 32 bits, which Triton tells apart. Programs (block of columns, entry).
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Words of an entry.
WORDS: tl.constexpr = tl.constexpr(5)
_F32: tl.constexpr = tl.constexpr(tl.pointer_type(tl.float32))


@triton.jit
def _low(word):
    return word & 0x7FFFFFFF


@triton.jit
def _high(word):
    return (word >> 32).to(tl.int32)


@triton.jit
def _roll(places, first, moves, length, stride, BR: tl.constexpr):
    """Row i takes row i + 1, the last takes `first`, then row 0 is 0."""
    for start in range(0, length, BR):
        rows = start + tl.arange(0, BR)
        at = places[None, :] + rows.to(tl.int64)[:, None] * stride
        following = tl.load(at + stride, mask=moves[None, :] & (rows < length - 1)[:, None], other=0.0)
        following = tl.where((rows == length - 1)[:, None], first[None, :], following)
        following = tl.where((rows == 0)[:, None], 0.0, following)
        tl.debug_barrier()  # all have read the stretch, and row 0
        tl.store(at, following, mask=moves[None, :] & (rows < length)[:, None])
        tl.debug_barrier()


@triton.jit(do_not_specialize=["table"])
def update_scales(table, ENTRIES: tl.constexpr, MOST_RECENT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """table: ENTRIES entries, of which those that have a program are served."""
    history, scale_at, amax_at, extent, run = table[0], table[1], table[2], table[3], table[4]
    for i in tl.static_range(1, ENTRIES):
        mine = tl.program_id(1) == i
        history = tl.where(mine, table[WORDS * i], history)
        scale_at = tl.where(mine, table[WORDS * i + 1], scale_at)
        amax_at = tl.where(mine, table[WORDS * i + 2], amax_at)
        extent, run = tl.where(mine, table[WORDS * i + 3], extent), tl.where(mine, table[WORDS * i + 4], run)
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    mine = columns < _low(run)
    length, stride = _high(extent), _low(extent)
    places = history.to(_F32) + columns
    first = tl.load(places, mask=mine, other=0.0)
    amax = first
    if not MOST_RECENT:
        found = tl.zeros((BR, BC), tl.float32)
        for start in range(0, length, BR):
            rows = start + tl.arange(0, BR)
            at = places[None, :] + rows.to(tl.int64)[:, None] * stride
            # Of NaN and a number the number.
            found = tl.maximum(found, tl.load(at, mask=mine[None, :] & (rows < length)[:, None], other=0.0))
        amax = tl.max(found, axis=0)
    moves = mine & (first != 0.0)
    known = moves & (amax > 0.0) & (amax < float("inf"))
    numerator = _high(run).to(tl.float32, bitcast=True)
    scale = tl.math.div_rn(numerator + tl.zeros_like(amax), tl.where(known, amax, 1.0))
    scale = tl.where(tl.abs(scale) == float("inf"), 3.4028234663852886e38, scale)
    if amax_at != scale_at:
        tl.store(amax_at.to(_F32) + columns, amax, mask=known)
    tl.store(scale_at.to(_F32) + columns, scale, mask=known)
    tl.debug_barrier()
    _roll(places, first, moves, length, stride, BR)
