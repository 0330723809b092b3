# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The end of a step of delayed scaling: new scales, histories rolled.

The kernels get few entries by value, so that a launch is all there is, and many in a table. An entry is a run of
columns that share a numerator, by value as five int64 words:

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
def _following(places, first, mine, start, length, stride, BR: tl.constexpr):
    """What a stretch of rows takes: row i of row i + 1, the last one `first`."""
    rows = start + tl.arange(0, BR)
    at = places[None, :] + (rows + 1).to(tl.int64)[:, None] * stride
    following = tl.load(at, mask=mine[None, :] & (rows < length - 1)[:, None], other=0.0)
    return tl.where((rows == length - 1)[:, None], first[None, :], following)


@triton.jit
def _move_up(places, following, moves, start, length, stride, BR: tl.constexpr):
    """Rows take what `_following` read; row 0 is 0."""
    rows = start + tl.arange(0, BR)
    at = places[None, :] + rows.to(tl.int64)[:, None] * stride
    tl.store(at, tl.where((rows == 0)[:, None], 0.0, following), mask=moves[None, :] & (rows < length)[:, None])


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
    length, stride = _high(extent), _low(extent)
    numerator = _high(run).to(tl.float32, bitcast=True)
    _update_run(history, scale_at, amax_at, length, stride, _low(run), numerator, MOST_RECENT, BR, BC)


@triton.jit
def update_scales_of(table, MOST_RECENT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """table: int64 (entries, 7) in device memory: the addresses as above, rows and columns of the history, columns of
    the run, the numerator's bits."""
    entry = table + tl.program_id(1) * 7
    history, scale_at, amax_at = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    length, stride = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    count, numerator = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32).to(tl.float32, bitcast=True)
    _update_run(history, scale_at, amax_at, length, stride, count, numerator, MOST_RECENT, BR, BC)


@triton.jit
def _update_run(
    history, scale_at, amax_at, length, stride, count, numerator,
    MOST_RECENT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """New scales of a run's columns, and their histories rolled."""
    columns = tl.program_id(0) * BC + tl.arange(0, BC)
    mine = columns < count
    places = history.to(_F32) + columns
    first = tl.load(places, mask=mine, other=0.0)
    # All rows but the first are read as what moves up; most histories are one stretch.
    following = _following(places, first, mine, 0, length, stride, BR)
    amax = first
    if not MOST_RECENT:
        # Of NaN and a number the number.
        amax = tl.maximum(amax, tl.max(following, axis=0))
        if length > BR:
            found = tl.zeros((BR, BC), tl.float32)
            for start in range(BR, length, BR):
                rows = start + tl.arange(0, BR)
                at = places[None, :] + rows.to(tl.int64)[:, None] * stride
                found = tl.maximum(found, tl.load(at, mask=mine[None, :] & (rows < length)[:, None], other=0.0))
            amax = tl.maximum(amax, tl.max(found, axis=0))
    moves = mine & (first != 0.0)
    known = moves & (amax > 0.0) & (amax < float("inf"))
    scale = tl.math.div_rn(numerator + tl.zeros_like(amax), tl.where(known, amax, 1.0))
    scale = tl.where(tl.abs(scale) == float("inf"), 3.4028234663852886e38, scale)
    if amax_at != scale_at:
        tl.store(amax_at.to(_F32) + columns, amax, mask=known)
    tl.store(scale_at.to(_F32) + columns, scale, mask=known)
    tl.debug_barrier()  # all have read the stretch, and row 0
    _move_up(places, following, moves, 0, length, stride, BR)
    if length > BR:
        tl.debug_barrier()
        for start in range(BR, length, BR):
            following = _following(places, first, moves, start, length, stride, BR)
            tl.debug_barrier()
            _move_up(places, following, moves, start, length, stride, BR)
            tl.debug_barrier()
