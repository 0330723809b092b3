# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rows of tokens to rows of experts and back. Every row has one choice at most, so nothing is summed across tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.codes import narrow, widen


@triton.jit
def spread_rows(
    source, row_map, filled, target, tokens, top_k, rows, columns, TOGETHER: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows as they are: read once per token, written once per choice; zeros in rows that no choice fills.

    Programs: tokens in groups of TOGETHER, then some for the unfilled rows; blocks of columns.
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < columns)[None, :]
    groups = tl.cdiv(tokens, TOGETHER)
    if tl.program_id(0) < groups:
        token = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
        there = token < tokens
        value = tl.load(source + token[:, None] * columns + column[None, :], mask=there[:, None] & inside, other=0)
        for choice in range(top_k):
            row = tl.load(row_map + token * top_k + choice, mask=there, other=-1).to(tl.int64)
            tl.store(target + row[:, None] * columns + column[None, :], value, mask=(row >= 0)[:, None] & inside)
    else:
        zeros = tl.zeros((TOGETHER, BLOCK), target.dtype.element_ty)
        first = tl.load(filled) + (tl.program_id(0) - groups).to(tl.int64) * TOGETHER
        for start in range(first, rows, (tl.num_programs(0) - groups) * TOGETHER):
            row = start + tl.arange(0, TOGETHER).to(tl.int64)
            tl.store(target + row[:, None] * columns + column[None, :], zeros, mask=(row < rows)[:, None] & inside)


@triton.jit
def gather_rows(
    x, row_map, probs, out, tokens, top_k, columns,
    UNROLLED: tl.constexpr, INTERPRETED: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of x[row_map[t, c]] times probs[t, c], in the order of the choices, in fp32.

    UNROLLED: top_k where it is small, so that rows of all choices are in flight together; else 0.
    """
    token = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, inside = token < tokens, column < columns
    total = tl.zeros((TOGETHER, BLOCK), tl.float32)
    if UNROLLED > 0:
        for choice in tl.static_range(UNROLLED):
            total = add_choice(total, x, row_map, probs, token, choice, top_k, column, columns, there, inside)
    else:
        for choice in range(top_k):
            total = add_choice(total, x, row_map, probs, token, choice, top_k, column, columns, there, inside)
    place = out + token[:, None] * columns + column[None, :]
    tl.store(place, narrow(total, out.dtype.element_ty, INTERPRETED), mask=there[:, None] & inside[None, :])


@triton.jit
def add_choice(total, x, row_map, probs, token, choice, top_k, column, columns, there, inside):
    """A dropped choice counts nothing, whatever its probability: 0 times Inf would be NaN."""
    row = tl.load(row_map + token * top_k + choice, mask=there, other=-1).to(tl.int64)
    led = row >= 0
    value = widen(tl.load(x + row[:, None] * columns + column[None, :], mask=led[:, None] & inside[None, :], other=0.0))
    if probs is not None:
        weight = widen(tl.load(probs + token * top_k + choice, mask=led, other=0.0))
        value = value * weight[:, None]
    return total + value


@triton.jit
def clear_marks(marks, rows, BLOCK: tl.constexpr):
    """marks = 0."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(marks + row, tl.zeros((BLOCK,), tl.uint8), mask=row < rows)


@triton.jit
def scatter_gradients(
    dy, x, row_map, probs, dinput, dprobs, marks, tokens, top_k, columns,
    INTERPRETED: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dinput's row of a choice = dy[t] times its probability; dprobs its product with x's row. Marks rows written."""
    token = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    there = token < tokens
    for choice in range(top_k):
        row = tl.load(row_map + token * top_k + choice, mask=there, other=-1).to(tl.int64)
        led = row >= 0
        weight = tl.full((TOGETHER,), 1.0, tl.float32)
        if probs is not None:
            weight = widen(tl.load(probs + token * top_k + choice, mask=led, other=0.0))
        dots = tl.zeros((TOGETHER, BLOCK), tl.float32)
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            mask = led[:, None] & (column < columns)[None, :]
            grad = widen(tl.load(dy + token[:, None] * columns + column[None, :], mask=mask, other=0.0))
            place = row[:, None] * columns + column[None, :]
            if probs is not None:
                dots += grad * widen(tl.load(x + place, mask=mask, other=0.0))
            value = narrow(grad * weight[:, None], dinput.dtype.element_ty, INTERPRETED)
            tl.store(dinput + place, value, mask=mask)
        if dprobs is not None:
            found = narrow(tl.sum(dots, axis=1), dprobs.dtype.element_ty, INTERPRETED)
            tl.store(dprobs + token * top_k + choice, found, mask=there)
        tl.store(marks + row, tl.full((TOGETHER,), 1, tl.uint8), mask=led)


@triton.jit
def clear_rows(marks, target, rows, columns, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in rows that are not marked."""
    row = tl.program_id(0).to(tl.int64) * TOGETHER + tl.arange(0, TOGETHER)
    left = (tl.load(marks + row, mask=row < rows, other=1) == 0)[:, None]
    if tl.max(left.to(tl.int32)) > 0:
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            zeros = tl.zeros((TOGETHER, BLOCK), target.dtype.element_ty)
            tl.store(target + row[:, None] * columns + column[None, :], zeros, mask=left & (column < columns)[None, :])
