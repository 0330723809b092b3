# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Gradients of LayerNorm and RMSNorm. x, dy, add and dx are dense (M, N); mean is None for RMSNorm.

With h = (x - mean) rstd and g = dy factor, dx = rstd (g - h mean(g h) - mean(g)), the last term for LayerNorm only;
dgamma and dbeta sum dy h and dy over rows. Programs take rows in turns and keep the columns' sums; each leaves one
partial sum a column, which `sum_weights` adds in the programs' order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels import tile
from te_dispatch_triton.kernels.codes import narrow, widen
from te_dispatch_triton.kernels.norm import mean_of, weights


@triton.jit
def _terms(dy, x, mean, rstd, rows, columns, factor, M, N):
    """h, dy and g of a block of rows, all 0 beyond the matrix; and rstd."""
    present = rows < M
    mask = present[:, None] & (columns < N)[None, :]
    places = rows[:, None] * N + columns[None, :]
    h = widen(tl.load(x + places, mask=mask, other=0.0))
    d = widen(tl.load(dy + places, mask=mask, other=0.0))
    inverse = tl.load(rstd + rows, mask=present, other=0.0)
    if mean is not None:
        average = tl.load(mean + rows, mask=present, other=0.0)
        h = tl.where(mask, h - average[:, None], 0.0)
    h = h * inverse[:, None]
    return h, d, d * factor[None, :], inverse


@triton.jit
def norm_gradients(
    dy, x, gamma, mean, rstd, add, dx, partial, sums, M, N,
    ZERO_CENTERED: tl.constexpr, INTERPRETED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BM rows at a time, and BN columns, all of them unless `sums` has rows' mean(g h) and mean(g), fp32 (2, M).

    partial: fp32 (programs, 2, N), or (programs, 1, N) for RMSNorm.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    factor, _ = weights(gamma, None, columns, N, ZERO_CENTERED)
    dgamma = tl.zeros((BM, BN), tl.float32)
    dbeta = tl.zeros((BM, BN), tl.float32)
    for block in tl.range(program, tl.cdiv(M, BM), programs, num_stages=STAGES):
        rows = tile.span(tl.cast(block, tl.int64) * BM, BM)
        h, d, g, inverse = _terms(dy, x, mean, rstd, rows, columns, factor, M, N)
        dgamma = tl.fma(d, h, dgamma)
        if sums is None:
            along_h = mean_of(tl.sum(g * h, axis=1), N)
        else:
            along_h = tl.load(sums + rows, mask=rows < M, other=0.0)
        result = tl.fma(h, -along_h[:, None], g)
        if mean is not None:
            dbeta += d
            if sums is None:
                average = mean_of(tl.sum(g, axis=1), N)
            else:
                average = tl.load(sums + M + rows, mask=rows < M, other=0.0)
            result -= average[:, None]
        result *= inverse[:, None]
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        places = rows[:, None] * N + columns[None, :]
        if add is not None:
            result += widen(tl.load(add + places, mask=mask, other=0.0))
        tl.store(dx + places, narrow(result, dx.dtype.element_ty, INTERPRETED), mask=mask)
    terms = 1 if mean is None else 2
    target = partial + program.to(tl.int64) * terms * N + columns
    tl.store(target, tl.sum(dgamma, axis=0), mask=columns < N)
    if mean is not None:
        tl.store(target + N, tl.sum(dbeta, axis=0), mask=columns < N)


@triton.jit
def norm_gradient_sums(
    dy, x, gamma, mean, rstd, sums, M, N, ZERO_CENTERED: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """mean(g h) and mean(g) of one long row a program, into fp32 (2, M)."""
    program = tl.program_id(0)
    rows = tile.span(program.to(tl.int64), 1)
    products = tl.zeros((1, BN), tl.float32)
    plain = tl.zeros((1, BN), tl.float32)
    for first in range(0, N, BN):
        columns = first + tl.arange(0, BN)
        factor, _ = weights(gamma, None, columns, N, ZERO_CENTERED)
        h, _, g, _ = _terms(dy, x, mean, rstd, rows, columns, factor, M, N)
        products = tl.fma(g, h, products)
        plain += g
    tl.store(sums + rows, mean_of(tl.sum(products, axis=1), N))
    if mean is not None:
        tl.store(sums + M + rows, mean_of(tl.sum(plain, axis=1), N))


@triton.jit
def sum_weights(
    partial, count, N, dgamma, dbeta, INTERPRETED: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """dgamma, and dbeta along the grid's second axis: the sums of `count` partial ones, rounded once."""
    columns = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    term = tl.program_id(1)
    terms = 1 if dbeta is None else 2
    total = tl.zeros((BR, BN), tl.float32)
    for first in range(0, count, BR):
        parts = first + tl.arange(0, BR)
        places = (parts.to(tl.int64)[:, None] * terms + term) * N + columns[None, :]
        total += tl.load(partial + places, mask=(parts < count)[:, None] & (columns < N)[None, :], other=0.0)
    found = narrow(tl.sum(total, axis=0), dgamma.dtype.element_ty, INTERPRETED)
    if term == 0:
        tl.store(dgamma + columns, found, mask=columns < N)
    elif dbeta is not None:
        tl.store(dbeta + columns, found, mask=columns < N)
