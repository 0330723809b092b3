# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""max |x| of a whole tensor: NaN ignored, Inf kept, 0 for an empty one."""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels import tile
from te_dispatch_triton.kernels.codes import widen


@triton.jit
def maxima_line(x, size, maxima, noop, BLOCK: tl.constexpr):
    """One partial maximum a program, of elements that lie one after the other; the grid has as many as are wanted."""
    if noop is not None:  # noqa: SIM102  (one of these is decided as the kernel is compiled)
        if tl.load(noop) != 0.0:
            return
    program = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.float32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for first in range(program.to(tl.int64) * BLOCK, size, step):
        places = first + tl.arange(0, BLOCK)
        v = widen(tl.load(x + places, mask=places < size, other=0.0))
        found = tl.maximum(found, tile.magnitudes(v))
    tile.put_maximum(maxima, program, tile.amax_of(found))


@triton.jit
def maxima_rows(x, stride, M, N, maxima, noop, BM: tl.constexpr, BN: tl.constexpr):
    """The same of an (M, N) matrix with `stride` elements from row to row."""
    if noop is not None:  # noqa: SIM102  (one of these is decided as the kernel is compiled)
        if tl.load(noop) != 0.0:
            return
    program = tl.program_id(0)
    across = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * across.to(tl.int64)
    found = tl.zeros((BM, BN), tl.float32)
    for place in range(program.to(tl.int64), tiles, tl.num_programs(0).to(tl.int64)):
        down = place // across
        rows, columns = tile.span(down * BM, BM), tile.span((place - down * across) * BN, BN)
        mask = tile.inside(rows, columns, M, N)
        v = widen(tl.load(x + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0))
        found = tl.maximum(found, tile.magnitudes(v))
    tile.put_maximum(maxima, program, tile.amax_of(found))


@triton.jit
def fold_maxima(maxima, target, COUNT: tl.constexpr):
    """target[0] = the largest of COUNT partial maxima."""
    tl.store(target, tile.maximum_of(maxima, COUNT))
