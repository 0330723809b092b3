# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the passes of attention share: where a program's rows lie, which scores are seen, logits, dropout.

Positions count within a sequence. Row i sees column j where ``j < length of the keys``, ``i + low <= j <= i + high``
(each only where the mask has that side), and `hidden` does not forbid it; ``low = offset - left``, ``high = offset +
right``. Index tensors come as (n, 1) and (1, m), so that a tile may hold scores or their transpose.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sequence_of(program, starts, batch, BLOCK: tl.constexpr):
    """The sequence of a packed tensor that a block belongs to, and where its first block is.

    Blocks are numbered so that sequence b has those from ``starts[b] // BLOCK + b`` on: at least as many as cover it
    and the gap behind it, for any lengths, in ``tokens // BLOCK + batch`` blocks altogether.
    """
    found = program * 0
    for first in range(0, batch, 256):
        places = first + tl.arange(0, 256)
        start = tl.load(starts + places, mask=places < batch, other=0)
        found += tl.sum(((start // BLOCK + places <= program) & (places < batch)).to(tl.int32))
    b = found - 1
    return b, program - (tl.load(starts + b) // BLOCK + b)


@triton.jit
def place_of(program, blocks, starts, batch, heads, extent, BLOCK: tl.constexpr, THD: tl.constexpr, LAST: tl.constexpr):
    """(b, h, first position, where the sequence starts, positions to write). LAST: the last block first."""
    line = program % blocks
    rest = program // blocks
    if LAST:
        line = blocks - 1 - line
    if THD:
        b, block = sequence_of(line, starts, batch, BLOCK)
        origin = tl.load(starts + b)
        end = tl.load(starts + b + 1, mask=b + 1 < batch, other=0)
        size = tl.where(b + 1 < batch, end, extent) - origin
        h = rest
    else:
        block = line
        h = rest % heads
        b = rest // heads
        origin = line * 0
        size = origin + extent
    return b, h, block * BLOCK, origin.to(tl.int64), size


@triton.jit
def length_of(cu, b, extent, LENGTHS: tl.constexpr):
    """Positions of a sequence that are valid."""
    if LENGTHS:
        return tl.load(cu + b + 1) - tl.load(cu + b)
    else:
        return b * 0 + extent


@triton.jit
def output_place(b, h, position, batch, heads, rows, WIDTH: tl.constexpr, LAYOUT: tl.constexpr):
    """Offset of a row of a dense tensor laid out as the output, and elements to the next row.

    position: of the row within the batch's rows (sbhd, bshd) or tokens (thd), int64.
    """
    if LAYOUT == "sbhd":
        step = (batch * heads).to(tl.int64) * WIDTH
        offset = position * step + (b * heads + h).to(tl.int64) * WIDTH
    else:
        step = heads.to(tl.int64) * WIDTH
        first = position
        if LAYOUT == "bshd":
            first += b.to(tl.int64) * rows
        offset = first * step + h.to(tl.int64) * WIDTH
    return offset, step


@triton.jit
def lse_place(b, h, position, heads, rows, LAYOUT: tl.constexpr):
    """The same of the log-sum-exp: (b, h, rows), or (tokens, h) for thd."""
    if LAYOUT == "thd":
        return position * heads + h, heads.to(tl.int64)
    else:
        return (b.to(tl.int64) * heads + h) * rows + position, (heads * 0 + 1).to(tl.int64)


@triton.jit
def columns_of(
    first, len_q, len_kv, low, high, BM: tl.constexpr, BN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """Where a block of rows begins to see columns, where all its rows see all of a tile, where not, and where it ends.

    Tiles begin at multiples of BN; those of [begin, inner) and [outer, end) need the mask, those between do not. Where
    there is no such tile, inner may lie behind the end.
    """
    begin = first * 0
    end = begin + len_kv
    open_end = end
    if RIGHT:
        end = tl.minimum(end, tl.minimum(first + BM, len_q) + high)
        open_end = tl.minimum(open_end, first + high + 1)
    inner = begin
    if LEFT:
        begin = tl.maximum(first + low, 0) // BN * BN
        inner = tl.maximum(begin, (tl.maximum(first + BM - 1 + low, 0) + BN - 1) // BN * BN)
    end = tl.where(first < len_q, tl.maximum(end, begin), begin)
    outer = tl.maximum(tl.minimum(tl.maximum(open_end, 0), end) // BN * BN, inner)
    return begin, inner, outer, end


@triton.jit
def rows_of(
    first, len_q, len_kv, low, high, BM: tl.constexpr, BN: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr
):
    """As `columns_of`: the rows that see a block of columns. Columns past the keys need no mask."""
    begin = first * 0
    end = begin + len_q
    open_end = end
    if LEFT:
        end = tl.minimum(end, tl.minimum(first + BN, len_kv) - low)
        open_end = tl.minimum(open_end, first - low + 1)
    inner = begin
    if RIGHT:
        begin = tl.maximum(first - high, 0) // BM * BM
        inner = tl.maximum(begin, (tl.maximum(first + BN - 1 - high, 0) + BM - 1) // BM * BM)
    end = tl.where(first < len_kv, tl.maximum(end, begin), begin)
    outer = tl.maximum(tl.minimum(tl.maximum(open_end, 0), end) // BM * BM, inner)
    return begin, inner, outer, end


@triton.jit
def load_rows(places, inside, d, D: tl.constexpr, BD: tl.constexpr, EDGE: tl.constexpr):
    """A tile of rows with D features, padded with zeros to BD. EDGE: only the rows `inside` exist."""
    if EDGE:
        if BD == D:
            found = tl.load(places, mask=inside[:, None], other=0.0)
        else:
            found = tl.load(places, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    elif BD == D:
        found = tl.load(places)
    else:
        found = tl.load(places, mask=(d < D)[None, :], other=0.0)
    return found


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + a b, or a b where acc is None. Triton's interpreter takes bf16 numbers for integers."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def shown(
    i, j, len_q, len_kv, low, high, hidden, hidden_i, hidden_j,
    EDGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Which scores of a tile are seen. EDGE: positions must be looked at, not only `hidden`."""
    # Bounds of each row of the tile, which threads hold few of, so that a score takes few comparisons.
    if i.shape[1] == 1:
        last = len_kv - 1
        if EDGE and RIGHT:
            last = tl.minimum(i + high, last)
        seen = j <= tl.where(i < len_q, last, -1)
    else:
        seen = i < tl.where(j < len_kv, len_q, 0)
        if EDGE and RIGHT:
            seen = seen & (j <= i + high)
    if EDGE and LEFT:
        seen = seen & (j >= i + low)
    if hidden is not None:
        places = hidden + i.to(tl.int64) * hidden_i + j.to(tl.int64) * hidden_j
        seen = seen & (tl.load(places, mask=(j < len_kv) & (i < len_q), other=1) == 0)
    return seen


@triton.jit
def _tanh(x):
    """Within 2 ulp. Near 0 an odd polynomial, fitted by least squares; beyond, 1 - 2 / (e^2x + 1)."""
    magnitude = tl.abs(x)
    square = x * x
    near = -0.006169402506202459 * square + 0.02102203108370304
    near = near * square - 0.05384759604930878
    near = near * square + 0.13332626223564148
    near = near * square - 0.33333322405815125
    near = near * square * magnitude + magnitude
    far = 1.0 - 2.0 / (tl.exp2(magnitude * (2.0 * LOG2E)) + 1.0)
    found = tl.where(magnitude < 0.6, near, far)
    return tl.where(x < 0.0, -found, found)


@triton.jit
def slope_of(slopes, b, h, heads, SLOPES: tl.constexpr):
    """ALiBi's slope of a head. SLOPES: 0 for Press et al.'s, else dimensions of what was given.

    Theirs: 2^(-8 n / p), n = 1 .. p, for the largest power of two p within the heads, then 2^(-4 n / p), n odd.
    """
    if SLOPES == 0:
        power = heads * 0 + 1
        for _ in range(20):
            power = tl.where(power * 2 <= heads, power * 2, power)
        own = tl.where(h < power, 8 * (h + 1), 4 * (2 * (h - power) + 1))
        exponent = -(own.to(tl.float64) / power.to(tl.float64))
        return tl.exp2(exponent).to(tl.float32)
    else:
        place = h
        if SLOPES == 2:
            place = b * heads + h
        return tl.load(slopes + place)


@triton.jit
def logits(
    s, i, j, len_q, len_kv, bias, bias_i, slope, offset, scale, cap, BIAS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """z of q . k, and tanh of the cap (z where there is none)."""
    if BIAS == "pre_scale" or BIAS == "post_scale":
        places = bias + i.to(tl.int64) * bias_i + j
        added = tl.load(places, mask=(i < len_q) & (j < len_kv), other=0.0).to(tl.float32)
    if BIAS == "pre_scale":
        z = (s + added) * scale
    else:
        z = s * scale
    capped = z
    if CAP:
        capped = _tanh(z / cap)
        z = capped * cap
    if BIAS == "post_scale":
        z += added
    elif BIAS == "alibi":
        z += slope * (j - i - offset).to(tl.float32)
    return z, capped


@triton.jit
def row_keys(rng, b, h, heads, i):
    """Two random words of each row: Philox (Salmon et al. 2011) of row, sequence and head, offset; the seed its key."""
    seed = tl.load(rng)
    offset = tl.load(rng + 1)
    row = i.to(tl.uint32)
    line = (b * heads + h).to(tl.uint32) + tl.zeros_like(row)
    low = (offset & 0xFFFFFFFF).to(tl.uint32) + tl.zeros_like(row)
    high = (offset >> 32).to(tl.uint32) + tl.zeros_like(row)
    one, other, _, _ = tl.philox(seed, row, line, low, high)
    return one, other


@triton.jit
def _mix(x):
    """Bijective mixing of 32-bit words, every bit of which depends on every other (Wellons's "lowbias32")."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(one, other, j, threshold):
    """Which elements dropout keeps, with probability 1 - threshold 2^-24: hashes of columns under the rows' words."""
    word = _mix(_mix(j.to(tl.uint32) ^ one) + other)
    return (word >> 8).to(tl.int32) >= threshold
