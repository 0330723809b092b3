# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary position embedding: a program turns some heads of a few tokens, by angles whose cosines and sines it finds
once."""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.codes import narrow, widen


@triton.jit
def cosine_sine(t):
    """cos t and sin t of fp32 angles up to 2^50, within 1e-7.

    The remainder of t by pi/2 is formed in fp64 with pi/2 as a sum of two fp64 numbers, so that a large angle is
    reduced in full; the two polynomials are Taylor's, whose next terms are below 1e-8 at pi/4.
    """
    wide = t.to(tl.float64)
    turns = tl.floor(wide * 0.6366197723675814 + 0.5)
    rest = tl.fma(-turns, tl.full(turns.shape, 1.5707963267948966, tl.float64), wide)
    rest = rest - turns * 6.123233995736766e-17
    quarter = (turns - 4.0 * tl.floor(turns * 0.25)).to(tl.int32)
    r = rest.to(tl.float32)
    s = r * r
    sine = r + r * s * (-1.0 / 6.0 + s * (1.0 / 120.0 + s * (-1.0 / 5040.0 + s * (1.0 / 362880.0))))
    cosine = 1.0 - s * (0.5 - s * (1.0 / 24.0 - s * (1.0 / 720.0 - s * (1.0 / 40320.0))))
    swapped = (quarter & 1) != 0
    c = tl.where(swapped, sine, cosine)
    s = tl.where(swapped, cosine, sine)
    c = tl.where((quarter == 1) | (quarter == 2), -c, c)
    return c, tl.where(quarter >= 2, -s, s)


@triton.jit
def _positions(
    tokens, T, batch, cu_seqlens, offsets, sequences, HAS_SEQUENCES: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """Positions of tokens (int64), and which have one: those behind the last sequence do not."""
    if HAS_SEQUENCES:
        ended = tl.zeros(tokens.shape, tl.int32)
        for first in range(0, sequences, BS):
            i = first + tl.arange(0, BS)
            ends = tl.load(cu_seqlens + 1 + i, mask=i < sequences, other=0x7FFFFFFF)
            ended += tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), axis=1)
        some = (ended < sequences) & (tokens < T)
        found = tokens - tl.load(cu_seqlens + ended, mask=some, other=0)
        if offsets is not None:
            found += tl.load(offsets + ended, mask=some, other=0)
        return found, some
    else:
        found = tokens
        if offsets is not None:
            found += tl.load(offsets + batch)
        return found, tokens < T


@triton.jit
def rotate(
    x, y, freqs, cu_seqlens, offsets, T, batches, heads, features, half, x_token, x_batch, x_head, freq_row, available,
    sequences,
    BATCH_FIRST: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr, INTERPRETED: tl.constexpr,
    BT: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """BT tokens by BI items: heads, and with shared positions heads of all of the batch.

    x lies at token * x_token + batch * x_batch + head * x_head + feature; y is dense, (T, batches, heads, features) or
    BATCH_FIRST (batches, T, heads, features). half: pairs of rotated features, at most BH; the features behind them
    pass, BP at a time (0: there are none).
    """
    program = tl.program_id(0).to(tl.int64)
    # Entries of the batch have positions of their own where there are offsets, but for sequences in one line.
    APART: tl.constexpr = offsets is not None and cu_seqlens is None
    items = heads if APART else batches * heads
    chunks = tl.cdiv(items, BI)
    chunk, program = program % chunks, program // chunks
    zero = program * 0  # 64 bits; parameters that are 1 are no tensors
    batch = zero
    if APART:
        batch, program = program % batches, program // batches
    y_head = features
    y_token = (zero + heads) * features
    y_batch = y_token
    if BATCH_FIRST:
        y_batch = y_token * T
    else:
        y_token = y_token * batches
    tokens = program * BT + tl.arange(0, BT)
    item = chunk * BI + tl.arange(0, BI)
    entry, head = batch + item // heads, item % heads
    from_rows = tokens[:, None] * x_token + (entry * x_batch + head * x_head)[None, :]
    to_rows = tokens[:, None] * y_token + (entry * y_batch + head * y_head)[None, :]
    inside = (tokens < T)[:, None] & (item < items)[None, :]

    positions, some = _positions(tokens, T, batch, cu_seqlens, offsets, sequences, cu_seqlens is not None, BS)
    k = tl.arange(0, BH)
    known = (positions >= 0) & (positions < available) & some
    angles = freqs + positions[:, None] * freq_row
    first, second = (2 * k, 2 * k + 1) if INTERLEAVED else (k, k + half)
    turned_by = known[:, None] & (k < half)[None, :]
    # No angles for a position: nothing that looks like a result. No position: nothing to turn.
    missing = tl.where(some, float("nan"), 0.0)[:, None]
    t = tl.where(known[:, None], tl.load(angles + first[None, :], mask=turned_by, other=0.0), missing)
    c0, s0 = cosine_sine(t)
    t = tl.where(known[:, None], tl.load(angles + second[None, :], mask=turned_by, other=0.0), missing)
    c1, s1 = cosine_sine(t)
    if BACKWARD:
        s0, s1 = -s1, -s0
    c0, s0, c1, s1 = c0[:, None, :], s0[:, None, :], c1[:, None, :], s1[:, None, :]

    dtype: tl.constexpr = y.dtype.element_ty
    if INTERLEAVED:
        f = tl.arange(0, 2 * BH)
        mask = inside[:, :, None] & (f < 2 * half)[None, None, :]
        pairs = widen(tl.load(x + from_rows[:, :, None] + f[None, None, :], mask=mask, other=0.0))
        u, v = tl.split(pairs.reshape(BT, BI, BH, 2))
        turned = tl.join(u * c0 - v * s0, v * c1 + u * s1).reshape(BT, BI, 2 * BH)
        tl.store(y + to_rows[:, :, None] + f[None, None, :], narrow(turned, dtype, INTERPRETED), mask=mask)
    else:
        mask = inside[:, :, None] & (k < half)[None, None, :]
        places = x + from_rows[:, :, None] + k[None, None, :]
        u = widen(tl.load(places, mask=mask, other=0.0))
        v = widen(tl.load(places + half, mask=mask, other=0.0))
        places = y + to_rows[:, :, None] + k[None, None, :]
        tl.store(places, narrow(u * c0 - v * s0, dtype, INTERPRETED), mask=mask)
        tl.store(places + half, narrow(v * c1 + u * s1, dtype, INTERPRETED), mask=mask)
    if BP > 0:
        for begin in range(2 * half, features, BP):
            behind = begin + tl.arange(0, BP)
            there = inside[:, :, None] & (behind < features)[None, None, :]
            passing = tl.load(x + from_rows[:, :, None] + behind[None, None, :], mask=there)
            tl.store(y + to_rows[:, :, None] + behind[None, None, :], passing, mask=there)
