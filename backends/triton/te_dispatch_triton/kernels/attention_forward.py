# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention, forward: one program takes a block of queries of one head past all keys that it sees.

Weights are kept relative to the largest logit so far, in powers of two (Dao et al. 2022; Milakov and Gimelshein 2018).
That starts at the lowest finite number, so that a tile of nothing but -Inf, masked or not, adds 0. A maximum leaves
NaN out; the sum of a row's weights holds it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.attention import (
    LN2,
    LOG2E,
    columns_of,
    kept,
    length_of,
    load_rows,
    logits,
    lse_place,
    output_place,
    place_of,
    product,
    row_keys,
    shown,
    slope_of,
)
from te_dispatch_triton.kernels.codes import narrow

_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _past(
    acc, total, top, q, k, v, k_s, v_s, pages, begin, end, i, len_q, len_kv, low, high, hidden, hidden_i, hidden_j,
    bias, bias_i, slope, offset, scale, cap, factor, one, other, threshold,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, DROPOUT: tl.constexpr,
    PAGE: tl.constexpr, PLAIN: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Take rows past the columns of [begin, end)."""
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    n = tl.arange(0, BN)
    k_tile = k + n[:, None].to(tl.int64) * k_s + d[None, :]
    v_tile = v + n[:, None].to(tl.int64) * v_s + dv[None, :]
    for start in range(begin, end, BN):
        j = start + n
        if PAGE > 0:
            page = tl.load(pages + j // PAGE, mask=j < len_kv, other=0).to(tl.int64)
            # One page after the other: k_s and v_s count from token to token.
            row = page * PAGE + j % PAGE
            k_places = k + row[:, None] * k_s + d[None, :]
            v_places = v + row[:, None] * v_s + dv[None, :]
        else:
            k_places = k_tile + tl.cast(start, tl.int64) * k_s
            v_places = v_tile + tl.cast(start, tl.int64) * v_s
        keys = load_rows(k_places, j < len_kv, d, D, BD, EDGE)
        s = product(q, tl.trans(keys), None, PRECISION, INTERPRETED)
        if not PLAIN:
            s, _ = logits(s, i[:, None], j[None, :], len_q, len_kv, bias, bias_i, slope, offset, scale, cap, BIAS, CAP)
        if EDGE or hidden is not None:
            seen = shown(
                i[:, None], j[None, :], len_q, len_kv, low, high, hidden, hidden_i, hidden_j, EDGE, LEFT, RIGHT
            )
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1) * factor)
        p = tl.exp2(s * factor - higher[:, None])
        fade = tl.exp2(top - higher)
        top = higher
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        if DROPOUT:
            p = tl.where(kept(one[:, None], other[:, None], j[None, :], threshold), p, 0.0)
        values = load_rows(v_places, j < len_kv, dv, DV, BDV, EDGE)
        acc = product(narrow(p, values.dtype, INTERPRETED), values, acc, PRECISION, INTERPRETED)
    return acc, total, top


@triton.jit
def _largest(x):
    """The largest element, NaN if any is."""
    return tl.where(tl.max((x != x).to(tl.int32)) > 0, float("nan"), tl.max(x))


_SIZES = ["blocks", "batch", "heads", "groups", "rows", "columns", "left", "right", "threshold", "pages_b"]


@triton.jit(do_not_specialize=_SIZES)
def forward(
    q, k, v, out, lse, largest, cu_q, cu_kv, starts_q, starts_kv, pages, hidden, bias, slopes, sink, rng,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, hidden_b, hidden_h, hidden_i, hidden_j, bias_b, bias_h, bias_i,
    pages_b, blocks, batch, heads, groups, rows, columns, left, right, threshold, scale, cap, keep,
    LAYOUT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPLIT: tl.constexpr, LENGTHS_Q: tl.constexpr, LENGTHS_KV: tl.constexpr, BOTTOM: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr, BIAS: tl.constexpr, SLOPES: tl.constexpr, CAP: tl.constexpr, SINK: tl.constexpr,
    DROPOUT: tl.constexpr, PAGE: tl.constexpr, PLAIN: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Arguments as `te_dispatch_triton.attention.plans` gives them."""
    THD: tl.constexpr = LAYOUT == "thd"
    program = tl.program_id(0)
    b, h, first, origin, extent = place_of(program, blocks, starts_q, batch, heads, rows, BM, THD, RIGHT)
    # One number of each program, for `largest_logits`; blocks of a sequence follow each other.
    place = h.to(tl.int64) * blocks + program % blocks
    if not THD:
        place = (h.to(tl.int64) * batch + b) * blocks + program % blocks
    if first >= extent:
        if largest is not None:
            tl.store(largest + place, float("-inf"))
        return
    len_q = length_of(cu_q, b, rows, LENGTHS_Q)
    len_kv = length_of(cu_kv, b, columns, LENGTHS_KV)
    offset = len_q * 0
    if BOTTOM:
        offset = len_kv - len_q
    low, high = offset - left, offset + right
    g = h // (heads // groups)
    wide_b, wide_h, wide_g = b.to(tl.int64), h.to(tl.int64), g.to(tl.int64)
    origin_kv = origin * 0
    if THD and PAGE == 0:
        origin_kv = tl.load(starts_kv + b).to(tl.int64)
    k += wide_g * k_h + origin_kv * k_s
    v += wide_g * v_h + origin_kv * v_s
    if PAGE == 0:
        k += wide_b * k_b
        v += wide_b * v_b
    else:
        pages += wide_b * pages_b
    if hidden is not None:
        hidden += wide_b * hidden_b + wide_h * hidden_h
    if bias is not None:
        bias += wide_b * bias_b + wide_h * bias_h
    slope = scale
    if BIAS == "alibi":
        slope = slope_of(slopes, b, h, heads, SLOPES)

    m, d, dv = tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BDV)
    i = first + m
    q_tile = q + wide_b * q_b + wide_h * q_h + (origin + first) * q_s
    queries = tl.load(
        q_tile + m[:, None].to(tl.int64) * q_s + d[None, :], mask=(i < len_q)[:, None] & (d < D)[None, :], other=0.0
    )
    one, other = i, i
    if DROPOUT:
        one, other = row_keys(rng, b, h, heads, i)
    factor = LOG2E
    if PLAIN:
        factor = scale * LOG2E
    acc = tl.zeros((BM, BDV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), _LOWEST, tl.float32)
    begin, inner, outer, end = columns_of(first, len_q, len_kv, low, high, BM, BN, LEFT, RIGHT)
    near = tl.minimum(inner, end)
    if not SPLIT:
        near, inner, outer = begin, begin, begin
    if SPLIT and LEFT:
        acc, total, top = _past(
            acc, total, top, queries, k, v, k_s, v_s, pages, begin, near, i, len_q, len_kv, low, high, hidden,
            hidden_i, hidden_j, bias, bias_i, slope, offset, scale, cap, factor, one, other, threshold,
            D, DV, BD, BDV, BN, True, LEFT, RIGHT, BIAS, CAP, DROPOUT, PAGE, PLAIN, PRECISION, INTERPRETED,
        )  # fmt: skip
    if SPLIT:
        acc, total, top = _past(
            acc, total, top, queries, k, v, k_s, v_s, pages, inner, outer, i, len_q, len_kv, low, high, hidden,
            hidden_i, hidden_j, bias, bias_i, slope, offset, scale, cap, factor, one, other, threshold,
            D, DV, BD, BDV, BN, False, LEFT, RIGHT, BIAS, CAP, DROPOUT, PAGE, PLAIN, PRECISION, INTERPRETED,
        )  # fmt: skip
    acc, total, top = _past(
        acc, total, top, queries, k, v, k_s, v_s, pages, outer, end, i, len_q, len_kv, low, high, hidden,
        hidden_i, hidden_j, bias, bias_i, slope, offset, scale, cap, factor, one, other, threshold,
        D, DV, BD, BDV, BN, True, LEFT, RIGHT, BIAS, CAP, DROPOUT, PAGE, PLAIN, PRECISION, INTERPRETED,
    )  # fmt: skip

    live = ((top > _LOWEST) | (total != 0.0)) & (i < len_q)  # NaN is not 0
    if largest is not None:
        # A logit of Inf makes the sum NaN, too.
        logit = tl.where((total != total) & (top < float("inf")), float("nan"), top * LN2)
        tl.store(largest + place, _largest(tl.where(live, logit, float("-inf"))))
    if SINK != "vanilla":
        at = 0.0
        if SINK == "learnable":
            at = tl.load(sink + h) * LOG2E
        higher = tl.maximum(top, at)
        fade = tl.exp2(top - higher)
        total = total * fade + tl.exp2(at - higher)
        acc = acc * fade[:, None]
        top = higher
    total = tl.where(live, total, 1.0)
    result = acc * (keep / total)[:, None]
    result = tl.where(live[:, None], result, 0.0)
    offset_o, step = output_place(b, h, origin + first, batch, heads, rows, DV, LAYOUT)
    places = out + offset_o + m[:, None].to(tl.int64) * step + dv[None, :]
    tl.store(places, narrow(result, out.dtype.element_ty, INTERPRETED), mask=(i < extent)[:, None] & (dv < DV)[None, :])
    if lse is not None:
        offset_l, step_l = lse_place(b, h, origin + first, heads, rows, LAYOUT)
        ends = tl.where(live, top * LN2 + tl.log(total), float("-inf"))
        tl.store(lse + offset_l + m * step_l, ends, mask=i < extent)


@triton.jit
def largest_logits(partial, result, count, BLOCK: tl.constexpr):
    """The largest of a head's `count` partial maxima (heads, count)."""
    h = tl.program_id(0)
    found = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, count, BLOCK):
        places = first + tl.arange(0, BLOCK)
        more = tl.load(partial + h.to(tl.int64) * count + places, mask=places < count, other=float("-inf"))
        found = tl.maximum(found, more, propagate_nan=tl.PropagateNan.ALL)
    tl.store(result + h, _largest(found))
