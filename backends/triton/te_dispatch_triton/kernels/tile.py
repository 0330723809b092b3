# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Pieces of casts for kernels that hold a tile of fp32 values: what a fused operator does after computing its values.

A tile is ``v``, fp32 (BM, BN), at ``rows`` (BM,) and ``columns`` (BN,), int64 from `span`, of an (M, N) matrix. Beyond
the matrix v must be 0 (load with ``other=0.0``, and select where the values computed from zeros are not zero), so that
maxima and sums need no mask; stores mask by themselves. For a cast with one scale per tensor, in this order::

    rows, columns = tile.span(first_row, BM), tile.span(first_column, BN)
    scale = tl.load(scale_pointer)                       # delayed; current: tile.scale_of(...)
    tile.put_inverse(scale_inv, scale, program == 0)     # one program of the grid writes it
    codes = tile.scaled_codes(v, scale, ENCODING, COMMON, HARD)
    tile.put_rows(codes, row_data, rows, columns, M, N)        # (M, N)
    tile.put_transposed(codes, col_data, rows, columns, M, N)  # (N, M)
    tile.record_amax(history, tile.amax_of(v))           # delayed: history[0] = max(history[0], amax)
    tile.put_sums(v, workspace, tile_row, columns, N)    # workspace fp32 (ceil(M / BM), N), then `cast.sum_columns`

Current scaling takes two launches: the programs of the first, COUNT of them and that a power of two, write
``tile.put_maximum(workspace, program, amax_of(v))``, and every program of the second calls ``tile.scale_of(workspace,
...)``. Nothing here depends on the order in which programs run: a maximum of non-negative fp32 is one of integers, and
sums go through the workspace.

Block scalings have their pieces in `kernels.blocks`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from te_dispatch_triton.kernels.codes import encode, scale_from_amax
from te_dispatch_triton.triton_private import for_amd

#: As ``@triton.jit`` reads it when this module is imported.
INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def span(first, SIZE: tl.constexpr):
    """first .. first + SIZE, int64: rows or columns of a tile."""
    return first.to(tl.int64) + tl.arange(0, SIZE)


@triton.jit
def fours(first, COUNT: tl.constexpr, M):
    """first, first + 4, ..., COUNT of them, int64: every fourth row of a tile.

    M, which is not negative, hides the 4 from the compiler: Triton 3.6 shifts such rows together with columns that are
    four to a thread, and gives the columns bits of the rows (`te_dispatch_triton.lanes`).
    """
    return first.to(tl.int64) + tl.arange(0, COUNT) * tl.where(M < 0, 1, 4)


@triton.jit
def inside(rows, columns, M, N):
    """(BM, BN) mask of what lies in the matrix."""
    return (rows < M)[:, None] & (columns < N)[None, :]


@triton.jit
def magnitudes(v):
    """|v| for maxima.

    A maximum of a number and NaN is the number, on NVIDIA. NumPy's and AMD's is NaN where that NaN signals (AMD's
    manuals, V_MAX_F32 in IEEE mode), and the maximum of this and a third number is the third, however large the first
    one was.
    """
    if INTERPRETED or for_amd():
        return tl.where(v == v, tl.abs(v), 0.0)
    else:
        return tl.abs(v)


@triton.jit
def number(found):
    """A maximum of `magnitudes`, 0 where all were NaN."""
    return tl.where(found == found, found, 0.0)


@triton.jit
def amax_of(v):
    """max |v| of a tile of any rank, a scalar fp32: NaN ignored, Inf kept, 0 for nothing but NaN."""
    return number(tl.max(magnitudes(v)))


@triton.jit
def record_amax(pointer, amax):
    """pointer[0] = max(pointer[0], amax), fp32 and not negative: an atomic of integers, in any order the same."""
    bits = amax.to(tl.int32, bitcast=True)
    tl.atomic_max(pointer.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@triton.jit
def put_maximum(workspace, place, amax):
    """A partial maximum, for `scale_of` in a later launch."""
    tl.store(workspace + place, amax)


@triton.jit
def maximum_of(maxima, COUNT: tl.constexpr):
    """The largest of COUNT (a power of two) partial maxima. One alone, from an operator's caller, may be NaN: kept."""
    if COUNT == 1:
        found = tl.load(maxima)
    else:
        found = tl.max(tl.load(maxima + tl.arange(0, COUNT)))
    return found


@triton.jit
def scale_of(maxima, limit, epsilon, POWER_OF_TWO: tl.constexpr, COUNT: tl.constexpr):
    """The scale of a current cast, from its partial maxima. limit: where the cast saturates (`codes.max_value`)."""
    return scale_from_amax(maximum_of(maxima, COUNT), limit, epsilon, POWER_OF_TWO)


@triton.jit
def put_inverse(scale_inv, scale, mine):
    """RN32(1 / scale), written where `mine` holds: by one program. The others do not wait for the scale here."""
    if mine:
        tl.store(scale_inv, tl.math.div_rn(1.0, scale))


@triton.jit
def scaled_codes(v, scale, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr):
    """Codes (uint8) of RN32(v * scale). scale: a scalar, or of a shape that broadcasts to v's."""
    return encode(v * scale, ENCODING, COMMON, HARD)


@triton.jit
def apart(factor):
    """factor again, for codes that are stored a second time: a value of its own to compilers, which cannot leave out
    the selection because it makes 0 of -0. Nothing here may depend on an integer argument: Triton compiles in one that
    is 1. Where codes are packed for one store and taken apart for the other, NVIDIA's assembler 12.8, which Triton 3.5
    and 3.6 come with, may read half of a pair before it is there. `encode` with HARD = 1 has no pairs."""
    return tl.where(factor == 0.0, 0.0, factor)


@triton.jit
def put_rows(codes, target, rows, columns, M, N):
    """Store a tile row-major into (M, N). Codes, or anything of the target's type."""
    tl.store(target + rows[:, None] * N + columns[None, :], codes, mask=inside(rows, columns, M, N))


@triton.jit
def put_transposed(codes, target, rows, columns, M, N):
    """Store a tile transposed into (N, M)."""
    places = target + columns[:, None] * M + rows[None, :]
    tl.store(places, tl.trans(codes), mask=inside(columns, rows, N, M))


@triton.jit
def put_sums(v, workspace, tile_row, columns, N):
    """The tile's column sums, into row `tile_row` of an fp32 workspace (tile rows, N)."""
    tl.store(workspace + tile_row.to(tl.int64) * N + columns, tl.sum(v, axis=0), mask=columns < N)
