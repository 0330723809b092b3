# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The gradient of attention's bias: one program computes a tile of scores again for every sequence and head that share
it, and adds up in their order."""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.attention import (
    LOG2E,
    kept,
    length_of,
    logits,
    lse_place,
    output_place,
    product,
    row_keys,
    shown,
)
from te_dispatch_triton.kernels.attention_backward import common, load_lse
from te_dispatch_triton.kernels.codes import narrow

_SIZES = ["size_b", "size_h", "size_i", "size_j", "batch", "heads", "groups", "rows", "columns", "left", "right",
          "threshold"]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def bias_gradient(
    q, k, v, dout, lse, delta, dbias, cu_q, cu_kv, starts_q, starts_kv, hidden, bias, rng,
    q_b, q_s, q_h, k_b, k_s, k_h, v_b, v_s, v_h, hidden_b, hidden_h, hidden_i, hidden_j, bias_b, bias_h, bias_i,
    size_b, size_h, size_i, size_j, batch, heads, groups, rows, columns, left, right, threshold, scale, cap, keep,
    LAYOUT: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, LENGTHS: tl.constexpr, BOTTOM: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    BIAS: tl.constexpr, CAP: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of a bias (size_b, size_h, size_i, size_j), over all sequences and heads it serves."""
    program = tl.program_id(0)
    tiles_j, tiles_i = tl.cdiv(size_j, BN), tl.cdiv(size_i, BM)
    j = program % tiles_j * BN + tl.arange(0, BN)
    program = program // tiles_j
    i = program % tiles_i * BM + tl.arange(0, BM)
    program = program // tiles_i
    of_h, of_b = program % size_h, program // size_h
    last_h, last_b = tl.where(size_h == 1, heads, of_h + 1), tl.where(size_b == 1, batch, of_b + 1)
    d, wide = tl.arange(0, BD), tl.arange(0, BDV)
    acc = tl.zeros((BM, BN), tl.float32)
    for sequence in range(of_b, last_b):
        b = of_b * 0 + sequence
        len_q = length_of(cu_q, b, rows, LENGTHS)
        len_kv = length_of(cu_kv, b, columns, LENGTHS)
        offset = len_q * 0
        if BOTTOM:
            offset = len_kv - len_q
        wide_b = b.to(tl.int64)
        row_q, row_kv = i.to(tl.int64), j.to(tl.int64)
        start_q = wide_b * 0
        if LAYOUT == "thd":
            start_q += tl.load(starts_q + b)
            row_q += start_q
            row_kv += tl.load(starts_kv + b)
        for head in range(of_h, last_h):
            h = of_h * 0 + head
            wide_h, wide_g = h.to(tl.int64), (h // (heads // groups)).to(tl.int64)
            offset_l, step_l = lse_place(b, h, start_q, heads, rows, LAYOUT)
            offset_o, step_o = output_place(b, h, start_q, batch, heads, rows, DV, LAYOUT)
            ends = load_lse(lse + offset_l + i * step_l, i < len_q)
            live = (ends != float("inf"))[:, None]
            of_rows = tl.load(delta + offset_l + i * step_l, mask=i < len_q, other=0.0)
            q_rows = tl.load(
                q + wide_b * q_b + wide_h * q_h + row_q[:, None] * q_s + d[None, :], mask=live & (d < D)[None, :],
                other=0.0,
            )  # fmt: skip
            grads = tl.load(
                dout + offset_o + i[:, None].to(tl.int64) * step_o + wide[None, :], mask=live & (wide < DV)[None, :],
                other=0.0,
            )  # fmt: skip
            inside = (j < len_kv)[:, None]
            k_rows = tl.load(
                k + wide_b * k_b + wide_g * k_h + row_kv[:, None] * k_s + d[None, :], mask=inside & (d < D)[None, :],
                other=0.0,
            )  # fmt: skip
            v_rows = tl.load(
                v + wide_b * v_b + wide_g * v_h + row_kv[:, None] * v_s + wide[None, :],
                mask=inside & (wide < DV)[None, :], other=0.0,
            )  # fmt: skip
            grads = common(grads, v_rows)
            s = product(q_rows, tl.trans(k_rows), None, PRECISION, INTERPRETED)
            dp = product(grads, tl.trans(common(v_rows, grads)), None, PRECISION, INTERPRETED)
            bias_head = bias + wide_b * bias_b + wide_h * bias_h
            hidden_head = hidden
            if hidden is not None:
                hidden_head = hidden + wide_b * hidden_b + wide_h * hidden_h
            z, capped = logits(
                s, i[:, None], j[None, :], len_q, len_kv, bias_head, bias_i, scale, offset, scale, cap, BIAS, CAP
            )
            seen = shown(
                i[:, None], j[None, :], len_q, len_kv, offset - left, offset + right, hidden_head, hidden_i, hidden_j,
                True, LEFT, RIGHT,
            )  # fmt: skip
            p = tl.exp2(tl.where(seen, z, float("-inf")) * LOG2E - ends[:, None])
            if DROPOUT:
                one, other = row_keys(rng, b, h, heads, i)
                dp = tl.where(kept(one[:, None], other[:, None], j[None, :], threshold), dp * keep, 0.0)
            dz = p * (dp - of_rows[:, None])
            if BIAS == "pre_scale":
                if CAP:
                    dz = dz * (1.0 - capped * capped)
                dz = dz * scale
            acc += tl.where(seen, dz, 0.0)
    line = (of_b.to(tl.int64) * size_h + of_h) * size_i
    places = dbias + (line + i)[:, None] * size_j + j[None, :]
    tl.store(
        places, narrow(acc, dbias.dtype.element_ty, INTERPRETED), mask=(i < size_i)[:, None] & (j < size_j)[None, :]
    )
