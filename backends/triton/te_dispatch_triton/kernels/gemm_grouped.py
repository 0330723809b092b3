# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A product per group in one launch. Where the groups' matrices lie, programs read from a table in device memory.

The table has FIELDS int64 for each group, in the order of `te_dispatch_triton.gemm_grouped.Row`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.gemm import place, product_tile, typed
from te_dispatch_triton.kernels.gemm_epilogue import finish

FIELDS = tl.constexpr(13)


@triton.jit
def fill(table, values, OFFSET: tl.constexpr, COUNT: tl.constexpr):
    """table[OFFSET + i] = values[i]: what the host knows, by value, so that a captured launch keeps it.

    The host sends 16 v + 2^36, so that Triton sees multiples of 16 that take 64 bits, whatever v is.
    """
    for i in tl.static_range(COUNT):
        tl.store(table + OFFSET + i, (values[i] >> 4) - 0x100000000)


@triton.jit
def address(table, group, FIELD: tl.constexpr, TYPE: tl.constexpr, GIVEN: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from the table, None where the groups have none."""
    if GIVEN:
        found = tl.load(table + group * FIELDS + FIELD).to(tl.pointer_type(TYPE))
        if ALIGNED:
            found = tl.multiple_of(found, 16)
    else:
        found = None
    return found


@triton.jit
def number(table, group, FIELD: tl.constexpr, ALIGNED: tl.constexpr):
    """A size or stride from the table."""
    found = tl.load(table + group * FIELDS + FIELD)
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def grouped(
    table, splits, groups,
    A_ALONG_K: tl.constexpr, B_ALONG_K: tl.constexpr, A_CODE: tl.constexpr, B_CODE: tl.constexpr,
    A_TILES: tl.constexpr, B_TILES: tl.constexpr, SCALING: tl.constexpr, UNITS: tl.constexpr, PROMOTE: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_K: tl.constexpr, INTERPRETED: tl.constexpr, ACCUMULATE: tl.constexpr,
    TYPE: tl.constexpr, OUT_TYPE: tl.constexpr, BIAS_TYPE: tl.constexpr, SCALE_TYPE: tl.constexpr,
    BIASED: tl.constexpr, DEALT: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PROMOTED: tl.constexpr,
):  # fmt: skip
    """Persistent over the tiles of all groups, one group after the other.

    DEALT: where splits (int64, on the device) deal the one a out: ``m`` or ``k`` is what a group has of it, its stored
    rows begin (``rows``) or run (``columns``) where the groups before it end; ``none`` where the table says it all.
    No group reads or writes more than the table allows.
    """
    SCALED: tl.constexpr = A_CODE != "none"
    index = tl.program_id(0)
    first = 0
    start = tl.zeros((), tl.int64)
    for group in range(groups):
        a = address(table, group, 0, TYPE, True, False)
        b = address(table, group, 1, TYPE, True, ALIGNED)
        out = address(table, group, 2, OUT_TYPE, True, ALIGNED)
        bias = address(table, group, 3, BIAS_TYPE, BIASED, False)
        a_scale = address(table, group, 4, SCALE_TYPE, SCALED, False)
        b_scale = address(table, group, 5, SCALE_TYPE, SCALED, False)
        m, n, k = number(table, group, 6, False), number(table, group, 7, ALIGNED), number(table, group, 8, ALIGNED)
        a_stride, b_stride = number(table, group, 9, ALIGNED), number(table, group, 10, ALIGNED)
        if DEALT != "none":
            count = tl.load(splits + group).to(tl.int64)
            if DEALT == "m_rows" or DEALT == "k_rows":
                a += start * a_stride
            else:
                a += start
            if DEALT == "m_rows" or DEALT == "m_columns":
                m = tl.minimum(m, tl.maximum(count, 0))
            else:
                k = tl.minimum(k, tl.maximum(count, 0))
            start += count
        if ALIGNED and DEALT != "m_columns" and DEALT != "k_columns":
            a = tl.multiple_of(a, 16)
        if UNITS and (SCALING == "tensor" or SCALING == "block"):
            a, b = typed(a, A_CODE), typed(b, B_CODE)
        tiles_m, tiles_n = tl.cdiv(m, BLOCK_M).to(tl.int32), tl.cdiv(n, BLOCK_N).to(tl.int32)
        last = first + tiles_m * tiles_n
        while index < last:
            row, column = place(index - first, tiles_m, tiles_n, GROUP)
            acc = product_tile(
                a, b, a_scale, b_scale, m, n, k, a_stride, b_stride, row * BLOCK_M, column * BLOCK_N,
                A_ALONG_K, B_ALONG_K, A_CODE, B_CODE, A_TILES, B_TILES, SCALING, UNITS, PROMOTE, PROMOTED, PRECISION,
                False, EVEN_K, INTERPRETED, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if SCALING == "tensor" and not PROMOTE:
                acc = acc * (tl.load(a_scale) * tl.load(b_scale))
            if SCALING == "nv":
                a_whole = address(table, group, 11, tl.float32, True, False)
                acc = acc * (tl.load(a_whole) * tl.load(address(table, group, 12, tl.float32, True, False)))
            finish(
                acc, out, bias, None, None, None, None, None, None, None, None, m, n, row * BLOCK_M,
                column * BLOCK_N, row, False, "none", ACCUMULATE, "none", False, False, "none", False, False,
                INTERPRETED, False,
            )  # fmt: skip
            index += tl.num_programs(0)
        first = last
