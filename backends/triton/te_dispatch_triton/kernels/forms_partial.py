# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Shards of a flattened matrix: amaxes and casts by 128x128 tiles that the shard may hold in part.

A shard's elements are `start` .. `start` + `size` of a row-major matrix with rows of `width`. A program takes one tile,
from the tile row `first` on; tiles have side TILE. Casts of shards that begin anywhere in a row go by runs instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.codes import encode, magnitude_of, widen


@triton.jit
def _tile(size, width, height, start, first, TILE: tl.constexpr):
    """The program's tile: its number, places in the shard, and which of them there are."""
    across = tl.cdiv(width, TILE)
    program = tl.program_id(0)
    down = first + program // across
    rows = down.to(tl.int64) * TILE + tl.arange(0, TILE)
    columns = (program % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    places = rows[:, None] * width + (columns - start)[None, :]
    inside = (rows < height)[:, None] & (columns < width)[None, :]
    return down.to(tl.int64) * across + program % across, places, inside & (places >= 0) & (places < size)


@triton.jit
def _accumulate(amax, found):
    """As integers: non-negative floats order alike, NaN stays, what was below zero gives way."""
    bits = found.to(tl.int32, bitcast=True)
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32), bitcast=True), bits, sem="relaxed")


@triton.jit
def amax_tiles(x, amax, size, width, height, start, first, TILE: tl.constexpr):
    """amax[t] = max(amax[t], max |x| of the shard in tile t), for tiles that it reaches."""
    t, places, mask = _tile(size, width, height, start, first, TILE)
    found = tl.max(magnitude_of(widen(tl.load(x + places, mask=mask, other=0.0))))
    if tl.max(mask.to(tl.int32)) != 0:
        _accumulate(amax + t, found)


@triton.jit
def cast_tiles(
    x, out, scale, size, width, height, start, first, ENCODING: tl.constexpr, HARD: tl.constexpr, TILE: tl.constexpr
):
    """Codes of RN32(x * scale of the tile)."""
    t, places, mask = _tile(size, width, height, start, first, TILE)
    v = widen(tl.load(x + places, mask=mask, other=0.0)) * tl.load(scale + t)
    tl.store(out + places, encode(v, ENCODING, False, HARD), mask=mask)


@triton.jit
def cast_run(
    x, out, scale, size, width, start, ENCODING: tl.constexpr, HARD: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`cast_tiles` by elements of the shard that lie one after the other, at most `width` of them: accesses are wide
    wherever the shard begins in a row, and every element fetches its tile's scale."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    i = tl.arange(0, BLOCK)
    mask = first + i < size
    v = widen(tl.load(x + first + i, mask=mask, other=0.0))
    row, column = (start + first) // width, (start + first) % width + i
    next_row = column >= width
    column = tl.where(next_row, column - width, column)
    rows = row + next_row.to(tl.int32)
    tiles = rows // TILE * tl.cdiv(width, TILE) + column // TILE
    v = v * tl.load(scale + tiles, mask=mask, other=0.0)
    tl.store(out + first + i, encode(v, ENCODING, False, HARD), mask=mask)


@triton.jit
def amax_line(x, amax, size, BLOCK: tl.constexpr):
    """amax[0] = max(amax[0], max |x|)."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.max(magnitude_of(widen(tl.load(x + places, mask=places < size, other=0.0))))
    _accumulate(amax, found)


@triton.jit
def cast_line(x, out, scale, size, ENCODING: tl.constexpr, HARD: tl.constexpr, BLOCK: tl.constexpr):
    """Codes of RN32(x * scale[0])."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < size
    v = widen(tl.load(x + places, mask=mask, other=0.0)) * tl.load(scale)
    tl.store(out + places, encode(v, ENCODING, False, HARD), mask=mask)
