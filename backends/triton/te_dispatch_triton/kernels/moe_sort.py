# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A stable counting sort of choices by expert, without knowing how many experts there are: segments of the choices are
counted, then every segment's program adds up what comes before its own. Experts from EXPERTS on (nobody has as many)
are ranked by comparing with all choices, which is right and slow."""

from __future__ import annotations

import triton
import triton.language as tl

#: Experts that are counted; a power of two.
EXPERTS: tl.constexpr = tl.constexpr(1024)
#: Most segments: what one program reads of all others grows with them.
SEGMENTS: tl.constexpr = tl.constexpr(64)


@triton.jit
def count_experts(indices, counts, largest, choices, length, BLOCK: tl.constexpr):
    """counts (segments, EXPERTS) of a segment's choices, and its largest expert (at most EXPERTS)."""
    segment = tl.program_id(0)
    begin = segment.to(tl.int64) * length
    end = tl.minimum(begin + length, choices)
    bins = tl.zeros((EXPERTS,), tl.int32)
    most = tl.zeros((BLOCK,), tl.int32)
    for start in range(begin, end, BLOCK):
        c = start + tl.arange(0, BLOCK)
        expert = tl.load(indices + c, mask=c < end, other=-1)
        expert = tl.where(expert < 0, -1, tl.minimum(expert, EXPERTS)).to(tl.int32)
        most = tl.maximum(most, expert)
        counted = (expert >= 0) & (expert < EXPERTS)
        bins += tl.histogram(tl.where(counted, expert, 0), EXPERTS, mask=counted)
    tl.store(counts + segment * EXPERTS + tl.arange(0, EXPERTS), bins)
    tl.store(largest + segment, tl.max(most, axis=0))


@triton.jit
def rank_choices(
    indices, counts, largest, probs, row_map, sorted_probs, filled, choices, length, rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each choice's row, or -1; the probabilities by row; how many rows are filled."""
    segments = tl.num_programs(0)
    s = tl.arange(0, SEGMENTS)
    most = tl.max(tl.load(largest + s, mask=s < segments, other=0), axis=0)
    kept = tl.zeros((), tl.int64)
    if most < 32:
        kept = rank_counted(indices, counts, probs, row_map, sorted_probs, choices, length, rows, 32, BLOCK)
    elif most < 256:
        kept = rank_counted(indices, counts, probs, row_map, sorted_probs, choices, length, rows, 256, BLOCK)
    elif most < EXPERTS:
        kept = rank_counted(indices, counts, probs, row_map, sorted_probs, choices, length, rows, EXPERTS, BLOCK)
    else:
        kept = rank_by_comparing(indices, probs, row_map, sorted_probs, choices, length, rows, BLOCK)
    kept = tl.minimum(kept, rows)
    if tl.program_id(0) == 0:
        tl.store(filled, kept)
    if sorted_probs is not None:
        for start in range(kept + tl.program_id(0) * BLOCK, rows, segments * BLOCK):
            row = start + tl.arange(0, BLOCK)
            tl.store(sorted_probs + row, tl.zeros((BLOCK,), sorted_probs.dtype.element_ty), mask=row < rows)


@triton.jit
def place(c, own, at, probs, row_map, sorted_probs, end, rows):
    """Stores where choices went."""
    fits = (own >= 0) & (at < rows)
    tl.store(row_map + c, tl.where(fits, at, -1).to(tl.int32), mask=c < end)
    if sorted_probs is not None:
        p = tl.load(probs + c, mask=(c < end) & fits, other=0.0)
        tl.store(sorted_probs + at, p, mask=(c < end) & fits)


@triton.jit
def rank_counted(
    indices, counts, probs, row_map, sorted_probs, choices, length, rows, BINS: tl.constexpr, BLOCK: tl.constexpr
):
    """Ranks a segment's choices of experts below BINS by the counts; returns how many choices all segments keep."""
    segment = tl.program_id(0)
    e = tl.arange(0, BINS)
    together: tl.constexpr = 8
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for start in range(0, tl.num_programs(0), together):
        s = start + tl.arange(0, together)
        there = (s < tl.num_programs(0))[:, None]
        found = tl.load(counts + s[:, None] * EXPERTS + e[None, :], mask=there, other=0)
        total += tl.sum(found, axis=0)
        before += tl.sum(tl.where((s < segment)[:, None], found, 0), axis=0)
    # Where the next choice of each expert goes.
    following = tl.cumsum(total, axis=0) - total + before
    begin = segment.to(tl.int64) * length
    end = tl.minimum(begin + length, choices)
    for start in range(begin, end, BLOCK):
        c = start + tl.arange(0, BLOCK)
        expert = tl.load(indices + c, mask=c < end, other=-1)
        expert = tl.where(expert < 0, -1, expert).to(tl.int32)
        earlier = (expert[:, None] == expert[None, :]) & (tl.arange(0, BLOCK)[:, None] > tl.arange(0, BLOCK)[None, :])
        rank = tl.sum(earlier.to(tl.int32), axis=1)
        counted = expert >= 0
        index = tl.where(counted, expert, 0)
        at = tl.gather(following, index, axis=0) + rank
        place(c, expert, at, probs, row_map, sorted_probs, end, rows)
        following += tl.histogram(index, BINS, mask=counted)
    return tl.sum(total, axis=0).to(tl.int64)


@triton.jit
def rank_by_comparing(indices, probs, row_map, sorted_probs, choices, length, rows, BLOCK: tl.constexpr):
    """Ranks a segment's choices by looking at all choices; returns how many are kept."""
    begin = tl.program_id(0).to(tl.int64) * length
    end = tl.minimum(begin + length, choices)
    kept = tl.zeros((), tl.int64)
    for start in range(begin, end, BLOCK):
        c = start + tl.arange(0, BLOCK)
        own = tl.load(indices + c, mask=c < end, other=-1)
        at = tl.zeros((BLOCK,), tl.int64)
        kept = tl.zeros((), tl.int64)
        for first in range(0, choices, BLOCK):
            other = first + tl.arange(0, BLOCK)
            expert = tl.load(indices + other, mask=other < choices, other=-1)
            lower = expert[None, :] < own[:, None]
            lower |= (expert[None, :] == own[:, None]) & (other[None, :] < c[:, None])
            at += tl.sum((lower & (expert >= 0)[None, :]).to(tl.int32), axis=1)
            kept += tl.sum((expert >= 0).to(tl.int32), axis=0)
        place(c, own, at, probs, row_map, sorted_probs, end, rows)
    return kept
