# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention, backward: weights are computed again from the log-sum-exp, once for queries and once for keys.

No two programs write to one place, and each adds up in an order of its own, so results are the same every time:
`queries` takes a block of queries past their keys, `keys` a block of keys past their queries, of all heads that share
them. The first also leaves delta = sum(dout out), each row's sum of p dp (Dao et al. 2022), for the second.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.attention import (
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
    rows_of,
    shown,
    slope_of,
)
from te_dispatch_triton.kernels.codes import narrow

_SIZES = ["blocks", "batch", "heads", "groups", "rows", "columns", "left", "right", "threshold"]


@triton.jit
def common(x, other):
    """x in a type that it can be multiplied in with the other: fp32 where the two differ."""
    if x.dtype == other.dtype:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def load_lse(places, mask):
    """Log-sum-exps in powers of two; Inf where there is none, which makes every weight of the row 0. NaN stays."""
    found = tl.load(places, mask=mask, other=float("-inf"))
    return tl.where(found == float("-inf"), float("inf"), found * LOG2E)


@triton.jit
def _past_keys(
    acc, q, dout, lse, delta, k, v, k_s, v_s, begin, end, i, len_q, len_kv, low, high, hidden, hidden_i, hidden_j,
    bias, bias_i, slope, offset, scale, cap, factor, keep, one, other, threshold,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, EDGE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, DROPOUT: tl.constexpr,
    PLAIN: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    n = tl.arange(0, BN)
    k_tile = k + n[:, None].to(tl.int64) * k_s + d[None, :]
    v_tile = v + n[:, None].to(tl.int64) * v_s + dv[None, :]
    for start in range(begin, end, BN):
        j = start + n
        k_places = k_tile + tl.cast(start, tl.int64) * k_s
        v_places = v_tile + tl.cast(start, tl.int64) * v_s
        keys = load_rows(k_places, j < len_kv, d, D, BD, EDGE)
        values = load_rows(v_places, j < len_kv, dv, DV, BDV, EDGE)
        s = product(q, tl.trans(keys), None, PRECISION, INTERPRETED)
        dp = product(dout, tl.trans(common(values, dout)), None, PRECISION, INTERPRETED)
        capped = s
        if not PLAIN:
            s, capped = logits(
                s, i[:, None], j[None, :], len_q, len_kv, bias, bias_i, slope, offset, scale, cap, BIAS, CAP
            )
        if EDGE or hidden is not None:
            seen = shown(
                i[:, None], j[None, :], len_q, len_kv, low, high, hidden, hidden_i, hidden_j, EDGE, LEFT, RIGHT
            )
            s = tl.where(seen, s, float("-inf"))
        p = tl.exp2(s * factor - lse[:, None])
        if DROPOUT:
            dp = tl.where(kept(one[:, None], other[:, None], j[None, :], threshold), dp * keep, 0.0)
        ds = p * (dp - delta[:, None])
        if CAP:
            ds = ds * (1.0 - capped * capped)
        acc = product(narrow(ds, keys.dtype, INTERPRETED), keys, acc, PRECISION, INTERPRETED)
    return acc


@triton.jit(do_not_specialize=_SIZES)
def queries(
    q, k, v, out, dout, lse, dq, delta, dsink, cu_q, cu_kv, starts_q, starts_kv, hidden, bias, slopes, sink, rng,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, dq_b, dq_s, dq_h, hidden_b, hidden_h, hidden_i, hidden_j,
    bias_b, bias_h, bias_i, blocks, batch, heads, groups, rows, columns, left, right, threshold, scale, cap, keep,
    LAYOUT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPLIT: tl.constexpr, LENGTHS: tl.constexpr, BOTTOM: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BIAS: tl.constexpr, SLOPES: tl.constexpr, CAP: tl.constexpr, SINK: tl.constexpr, DROPOUT: tl.constexpr,
    PLAIN: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """dq, delta (laid out as lse), and each program's part of the softmax offset's gradient (heads, programs)."""
    THD: tl.constexpr = LAYOUT == "thd"
    program = tl.program_id(0)
    b, h, first, origin, extent = place_of(program, blocks, starts_q, batch, heads, rows, BM, THD, RIGHT)
    wide_b, wide_h = b.to(tl.int64), h.to(tl.int64)
    place = wide_h * blocks + program % blocks
    if not THD:
        place = (wide_h * batch + b) * blocks + program % blocks
    if first >= extent:
        if dsink is not None:
            tl.store(dsink + place, 0.0)
        return
    len_q = length_of(cu_q, b, rows, LENGTHS)
    len_kv = length_of(cu_kv, b, columns, LENGTHS)
    offset = len_q * 0
    if BOTTOM:
        offset = len_kv - len_q
    low, high = offset - left, offset + right
    wide_g = (h // (heads // groups)).to(tl.int64)
    origin_kv = origin * 0
    if THD:
        origin_kv = tl.load(starts_kv + b).to(tl.int64)
    k += wide_b * k_b + wide_g * k_h + origin_kv * k_s
    v += wide_b * v_b + wide_g * v_h + origin_kv * v_s
    if hidden is not None:
        hidden += wide_b * hidden_b + wide_h * hidden_h
    if bias is not None:
        bias += wide_b * bias_b + wide_h * bias_h
    slope = scale
    if BIAS == "alibi":
        slope = slope_of(slopes, b, h, heads, SLOPES)

    m, d, dv = tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BDV)
    i = first + m
    offset_l, step_l = lse_place(b, h, origin + first, heads, rows, LAYOUT)
    ends = load_lse(lse + offset_l + m * step_l, i < len_q)
    live = ends != float("inf")
    offset_o, step_o = output_place(b, h, origin + first, batch, heads, rows, DV, LAYOUT)
    o_places = offset_o + m[:, None].to(tl.int64) * step_o + dv[None, :]
    o_mask = live[:, None] & (dv < DV)[None, :]
    grads = tl.load(dout + o_places, mask=o_mask, other=0.0)
    results = tl.load(out + o_places, mask=o_mask, other=0.0)
    of_rows = tl.sum(grads.to(tl.float32) * results.to(tl.float32), 1)
    tl.store(delta + offset_l + m * step_l, of_rows, mask=i < extent)
    if dsink is not None:
        at = 0.0
        if SINK == "learnable":
            at = tl.load(sink + h) * LOG2E
        tl.store(dsink + place, -tl.sum(tl.exp2(at - ends) * of_rows))
    q_tile = q + wide_b * q_b + wide_h * q_h + (origin + first) * q_s
    q_rows = tl.load(
        q_tile + m[:, None].to(tl.int64) * q_s + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0
    )
    if grads.dtype != v.dtype.element_ty:
        grads = grads.to(tl.float32)
    one, other = i, i
    if DROPOUT:
        one, other = row_keys(rng, b, h, heads, i)
    factor = LOG2E
    if PLAIN:
        factor = scale * LOG2E
    acc = tl.zeros((BM, BD), tl.float32)
    begin, inner, outer, end = columns_of(first, len_q, len_kv, low, high, BM, BN, LEFT, RIGHT)
    near = tl.minimum(inner, end)
    if not SPLIT:
        near, inner, outer = begin, begin, begin
    if SPLIT and LEFT:
        acc = _past_keys(
            acc, q_rows, grads, ends, of_rows, k, v, k_s, v_s, begin, near, i, len_q, len_kv, low, high, hidden,
            hidden_i, hidden_j, bias, bias_i, slope, offset, scale, cap, factor, keep, one, other, threshold,
            D, DV, BD, BDV, BN, True, LEFT, RIGHT, BIAS, CAP, DROPOUT, PLAIN, PRECISION, INTERPRETED,
        )  # fmt: skip
    if SPLIT:
        acc = _past_keys(
            acc, q_rows, grads, ends, of_rows, k, v, k_s, v_s, inner, outer, i, len_q, len_kv, low, high, hidden,
            hidden_i, hidden_j, bias, bias_i, slope, offset, scale, cap, factor, keep, one, other, threshold,
            D, DV, BD, BDV, BN, False, LEFT, RIGHT, BIAS, CAP, DROPOUT, PLAIN, PRECISION, INTERPRETED,
        )  # fmt: skip
    acc = _past_keys(
        acc, q_rows, grads, ends, of_rows, k, v, k_s, v_s, outer, end, i, len_q, len_kv, low, high, hidden,
        hidden_i, hidden_j, bias, bias_i, slope, offset, scale, cap, factor, keep, one, other, threshold,
        D, DV, BD, BDV, BN, True, LEFT, RIGHT, BIAS, CAP, DROPOUT, PLAIN, PRECISION, INTERPRETED,
    )  # fmt: skip
    result = tl.where(live[:, None], acc * scale, 0.0)
    places = dq + wide_b * dq_b + wide_h * dq_h + (origin + first) * dq_s + m[:, None].to(tl.int64) * dq_s + d[None, :]
    tl.store(places, narrow(result, dq.dtype.element_ty, INTERPRETED), mask=(i < extent)[:, None] & (d < D)[None, :])


@triton.jit
def _past_queries(
    dk, dv, keys, values, q, q_s, dout, step_o, lse, delta, step_l, begin, end, j, len_q, len_kv, low, high, hidden,
    hidden_i, hidden_j, bias, bias_i, slope, offset, scale, cap, factor, keep, rng, b, h, heads, threshold,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, EDGE: tl.constexpr,
    BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
    DROPOUT: tl.constexpr,
    PLAIN: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Scores are held transposed, (keys, queries), which the products that follow want them to be."""
    # Elsewhere each row of a sequence that has keys sees the first.
    GUARD: tl.constexpr = EDGE and (BOTTOM or LEFT)
    d, wide = tl.arange(0, BD), tl.arange(0, BDV)
    m = tl.arange(0, BM)
    q_tile = q + m[:, None].to(tl.int64) * q_s + d[None, :]
    o_tile = dout + m[:, None].to(tl.int64) * step_o + wide[None, :]
    for start in range(begin, end, BM):
        i = start + m
        places = (start + m) * step_l
        q_places = q_tile + tl.cast(start, tl.int64) * q_s
        o_places = o_tile + tl.cast(start, tl.int64) * step_o
        ends = load_lse(lse + places, i < len_q)
        of_rows = tl.load(delta + places, mask=i < len_q, other=0.0)
        if GUARD or hidden is not None:
            # Rows that see nothing may hold anything.
            live = ends != float("inf")
            queries = load_rows(q_places, live, d, D, BD, True)
            grads = load_rows(o_places, live, wide, DV, BDV, True)
        else:
            queries = load_rows(q_places, i < len_q, d, D, BD, True)
            grads = load_rows(o_places, i < len_q, wide, DV, BDV, True)
        grads = common(grads, values)
        s = product(keys, tl.trans(queries), None, PRECISION, INTERPRETED)
        dp = product(common(values, grads), tl.trans(grads), None, PRECISION, INTERPRETED)
        capped = s
        if not PLAIN:
            s, capped = logits(
                s, i[None, :], j[:, None], len_q, len_kv, bias, bias_i, slope, offset, scale, cap, BIAS, CAP
            )
        if EDGE or hidden is not None:
            seen = shown(
                i[None, :], j[:, None], len_q, len_kv, low, high, hidden, hidden_i, hidden_j, EDGE, LEFT, RIGHT
            )
            s = tl.where(seen, s, float("-inf"))
        p = tl.exp2(s * factor - ends[None, :])
        weights = p
        if DROPOUT:
            one, other = row_keys(rng, b, h, heads, i)
            stays = kept(one[None, :], other[None, :], j[:, None], threshold)
            weights = tl.where(stays, p, 0.0)
            dp = tl.where(stays, dp * keep, 0.0)
        dv = product(narrow(weights, grads.dtype, INTERPRETED), grads, dv, PRECISION, INTERPRETED)
        ds = p * (dp - of_rows[None, :])
        if CAP:
            ds = ds * (1.0 - capped * capped)
        dk = product(narrow(ds, queries.dtype, INTERPRETED), queries, dk, PRECISION, INTERPRETED)
    return dk, dv


@triton.jit(do_not_specialize=_SIZES)
def keys(
    q, k, v, dout, lse, delta, dk, dv, cu_q, cu_kv, starts_q, starts_kv, hidden, bias, slopes, rng,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, dk_b, dk_s, dk_h, dv_b, dv_s, dv_h, hidden_b, hidden_h, hidden_i,
    hidden_j, bias_b, bias_h, bias_i, blocks, batch, heads, groups, rows, columns, left, right, threshold, scale, cap,
    keep,
    LAYOUT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SPLIT: tl.constexpr, LENGTHS: tl.constexpr, BOTTOM: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BIAS: tl.constexpr, SLOPES: tl.constexpr, CAP: tl.constexpr, DROPOUT: tl.constexpr, PLAIN: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys."""
    THD: tl.constexpr = LAYOUT == "thd"
    b, g, first, origin, extent = place_of(tl.program_id(0), blocks, starts_kv, batch, groups, columns, BN, THD, False)
    if first >= extent:
        return
    len_q = length_of(cu_q, b, rows, LENGTHS)
    len_kv = length_of(cu_kv, b, columns, LENGTHS)
    offset = len_q * 0
    if BOTTOM:
        offset = len_kv - len_q
    low, high = offset - left, offset + right
    wide_b, wide_g = b.to(tl.int64), g.to(tl.int64)
    origin_q = origin * 0
    if THD:
        origin_q = tl.load(starts_q + b).to(tl.int64)
    n, d, wide = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BDV)
    j = first + n
    row = origin + first + n.to(tl.int64)
    k_mask, v_mask = (j < len_kv)[:, None] & (d < D)[None, :], (j < len_kv)[:, None] & (wide < DV)[None, :]
    k_rows = tl.load(k + wide_b * k_b + wide_g * k_h + row[:, None] * k_s + d[None, :], mask=k_mask, other=0.0)
    v_rows = tl.load(v + wide_b * v_b + wide_g * v_h + row[:, None] * v_s + wide[None, :], mask=v_mask, other=0.0)
    if v_rows.dtype != dout.dtype.element_ty:
        v_rows = v_rows.to(tl.float32)
    factor = LOG2E
    if PLAIN:
        factor = scale * LOG2E
    of_keys = tl.zeros((BN, BD), tl.float32)
    of_values = tl.zeros((BN, BDV), tl.float32)
    begin, inner, outer, end = rows_of(first, len_q, len_kv, low, high, BM, BN, LEFT, RIGHT)
    near = tl.minimum(inner, end)
    if not SPLIT:
        near, inner, outer = begin, begin, begin
    elif not LEFT:
        # Rows past the end have no log-sum-exp, which is mask enough.
        outer = end
    share = heads // groups
    for member in range(share):
        h = g * share + member
        wide_h = h.to(tl.int64)
        slope = scale
        if BIAS == "alibi":
            slope = slope_of(slopes, b, h, heads, SLOPES)
        offset_o, step_o = output_place(b, h, origin_q, batch, heads, rows, DV, LAYOUT)
        offset_l, step_l = lse_place(b, h, origin_q, heads, rows, LAYOUT)
        q_head = q + wide_b * q_b + wide_h * q_h + origin_q * q_s
        hidden_head, bias_head = hidden, bias
        if hidden is not None:
            hidden_head = hidden + wide_b * hidden_b + wide_h * hidden_h
        if bias is not None:
            bias_head = bias + wide_b * bias_b + wide_h * bias_h
        if SPLIT and RIGHT:
            of_keys, of_values = _past_queries(
                of_keys, of_values, k_rows, v_rows, q_head, q_s, dout + offset_o, step_o, lse + offset_l,
                delta + offset_l, step_l, begin, near, j, len_q, len_kv, low, high, hidden_head, hidden_i, hidden_j,
                bias_head, bias_i, slope, offset, scale, cap, factor, keep, rng, b, h, heads, threshold,
                D, DV, BD, BDV, BM, True, BOTTOM, LEFT, RIGHT, BIAS, CAP, DROPOUT, PLAIN, PRECISION, INTERPRETED,
            )  # fmt: skip
        if SPLIT:
            of_keys, of_values = _past_queries(
                of_keys, of_values, k_rows, v_rows, q_head, q_s, dout + offset_o, step_o, lse + offset_l,
                delta + offset_l, step_l, inner, outer, j, len_q, len_kv, low, high, hidden_head, hidden_i, hidden_j,
                bias_head, bias_i, slope, offset, scale, cap, factor, keep, rng, b, h, heads, threshold,
                D, DV, BD, BDV, BM, False, BOTTOM, LEFT, RIGHT, BIAS, CAP, DROPOUT, PLAIN, PRECISION, INTERPRETED,
            )  # fmt: skip
        if LEFT or not SPLIT:
            of_keys, of_values = _past_queries(
                of_keys, of_values, k_rows, v_rows, q_head, q_s, dout + offset_o, step_o, lse + offset_l,
                delta + offset_l, step_l, outer, end, j, len_q, len_kv, low, high, hidden_head, hidden_i, hidden_j,
                bias_head, bias_i, slope, offset, scale, cap, factor, keep, rng, b, h, heads, threshold,
                D, DV, BD, BDV, BM, True, BOTTOM, LEFT, RIGHT, BIAS, CAP, DROPOUT, PLAIN, PRECISION, INTERPRETED,
            )  # fmt: skip
    inside = (j < len_kv)[:, None]
    of_keys = tl.where(inside, of_keys * scale, 0.0)
    of_values = tl.where(inside, of_values * keep, 0.0)
    k_places = dk + wide_b * dk_b + wide_g * dk_h + row[:, None] * dk_s + d[None, :]
    v_places = dv + wide_b * dv_b + wide_g * dv_h + row[:, None] * dv_s + wide[None, :]
    written = (j < extent)[:, None]
    tl.store(k_places, narrow(of_keys, dk.dtype.element_ty, INTERPRETED), mask=written & (d < D)[None, :])
    tl.store(v_places, narrow(of_values, dv.dtype.element_ty, INTERPRETED), mask=written & (wide < DV)[None, :])


@triton.jit
def offset_sums(partial, result, count, BLOCK: tl.constexpr):
    """Sums of a head's `count` partial gradients (heads, count)."""
    h = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, BLOCK):
        places = first + tl.arange(0, BLOCK)
        found += tl.load(partial + h.to(tl.int64) * count + places, mask=places < count, other=0.0)
    tl.store(result + h, tl.sum(found))
