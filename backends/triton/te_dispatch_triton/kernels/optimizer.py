# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Steps over lists of tensors: Adam, norms, scaling. A program works on CHUNK elements of one tensor: on whole blocks,
then on what is left."""

from __future__ import annotations

import triton
import triton.language as tl

from te_dispatch_triton.kernels.codes import narrow
from te_dispatch_triton.kernels.optimizer_table import (
    CODES,
    COUNT,
    FIRST,
    entry_of,
    read,
    read_coded,
    tensor_at,
    write,
    write_coded,
)


@triton.jit
def chunk_of(entry, LISTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """(elements of the tensor, where the chunk begins, where its whole blocks end, where it ends)."""
    count = tl.load(entry + (LISTS + COUNT))
    begin = (tl.program_id(0) - tl.load(entry + (LISTS + FIRST))) * CHUNK
    end = tl.minimum(begin + CHUNK, count)
    return count, begin, begin + (end - begin) // BLOCK * BLOCK, end


@triton.jit
def adam(
    table, entries, noop_flag, lr, beta2, eps, share1, share2, correction1, correction2, weight_decay,
    PARAM: tl.constexpr, GRAD: tl.constexpr, MASTER: tl.constexpr, DECAY: tl.constexpr, ADAM_W: tl.constexpr,
    MOST: tl.constexpr, ALIGNED: tl.constexpr, INTERPRETED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step: Kingma and Ba, 2014; with decoupled decay Loshchilov and Hutter, 2017. share = 1 - beta.

    Lists: params, grads, exp_avgs, exp_avg_sqs, master's or nothing.
    """
    if noop_flag is not None:  # noqa: SIM102  # known when compiling
        if tl.load(noop_flag) != 0.0:
            return
    entry = entry_of(table, entries, 5, MOST)
    count, begin, whole, end = chunk_of(entry, 5, CHUNK, BLOCK)
    for start in range(begin, whole, BLOCK):
        adam_block(
            entry, start, count, lr, beta2, eps, share1, share2, correction1, correction2, weight_decay,
            PARAM, GRAD, MASTER, DECAY, ADAM_W, True, ALIGNED, INTERPRETED, BLOCK,
        )  # fmt: skip
    if whole < end:
        adam_block(
            entry, whole, count, lr, beta2, eps, share1, share2, correction1, correction2, weight_decay,
            PARAM, GRAD, MASTER, DECAY, ADAM_W, False, ALIGNED, INTERPRETED, BLOCK,
        )  # fmt: skip


@triton.jit
def adam_block(
    entry, start, count, lr, beta2, eps, share1, share2, correction1, correction2, weight_decay,
    PARAM: tl.constexpr, GRAD: tl.constexpr, MASTER: tl.constexpr, DECAY: tl.constexpr, ADAM_W: tl.constexpr,
    WHOLE: tl.constexpr, ALIGNED: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The step of BLOCK elements."""
    param, grad = tensor_at(entry, 0, PARAM), tensor_at(entry, 1, GRAD)
    average, square = tensor_at(entry, 2, tl.float32), tensor_at(entry, 3, tl.float32)
    weights = tensor_at(entry, 4, tl.float32) if MASTER else param
    i = start + tl.arange(0, BLOCK)
    g = read(grad, i, count, WHOLE, ALIGNED).to(tl.float32)
    m = read(average, i, count, WHOLE, ALIGNED)
    v = read(square, i, count, WHOLE, ALIGNED)
    w = read(weights, i, count, WHOLE, ALIGNED).to(tl.float32)
    # Without decay a weight that is not finite must not reach the moments.
    if DECAY and not ADAM_W:
        g += w * weight_decay
    # Interpolated from the nearer end, as the moment is exact where either share is 0.
    distance = g - m
    m = tl.where(share1 < 0.5, m + share1 * distance, g + (share1 - 1.0) * distance)
    v = v * beta2 + share2 * g * g
    root = tl.math.sqrt_rn(tl.math.div_rn(v, tl.zeros_like(v) + correction2))
    update = tl.math.div_rn(tl.math.div_rn(m, tl.zeros_like(m) + correction1), root + eps)
    if DECAY and ADAM_W:
        update += w * weight_decay
    w -= lr * update
    write(average, i, m, count, WHOLE, ALIGNED)
    write(square, i, v, count, WHOLE, ALIGNED)
    if MASTER:
        write(weights, i, w, count, WHOLE, ALIGNED)
    write(param, i, narrow(w, PARAM, INTERPRETED), count, WHOLE, ALIGNED)


@triton.jit
def scale_tensors(
    table, entries, scale, noop_flag,
    MOST: tl.constexpr, ALIGNED: tl.constexpr, INTERPRETED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """outputs = inputs * scale; the flag becomes 1 where an input is not finite. Lists: inputs, outputs or nothing (the
    inputs once more)."""
    entry = entry_of(table, entries, 2, MOST)
    count, begin, whole, end = chunk_of(entry, 2, CHUNK, BLOCK)
    worst = tl.zeros((BLOCK,), tl.uint32)
    for start in range(begin, whole, BLOCK):
        worst = scale_block(entry, start, count, scale, worst, True, ALIGNED, INTERPRETED, BLOCK)
    if whole < end:
        worst = scale_block(entry, whole, count, scale, worst, False, ALIGNED, INTERPRETED, BLOCK)
    if noop_flag is not None:  # noqa: SIM102  # known when compiling
        # Whoever writes writes the same.
        if tl.max(worst, axis=0) >= 0x7F800000:
            tl.store(noop_flag, 1.0)


@triton.jit
def scale_block(
    entry, start, count, scale, worst,
    WHOLE: tl.constexpr, ALIGNED: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scales BLOCK elements; returns the largest magnitudes' bits, which are those of Inf or above for Inf and NaN."""
    codes = tl.load(entry + (2 + CODES))
    i = start + tl.arange(0, BLOCK)
    source, target = tl.load(entry), tl.load(entry + 1)
    x = read_coded(source, codes & 3, i, count, WHOLE, ALIGNED)
    target = tl.where(target == 0, source, target)
    write_coded(target, codes >> 2, i, x * scale, count, WHOLE, ALIGNED, INTERPRETED)
    return tl.maximum(worst, x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def partial_norms(
    table, entries, partials, place,
    MOST: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of squares of a chunk, at `place` and the program's number. Lists: tensors."""
    entry = entry_of(table, entries, 1, MOST)
    count, begin, whole, end = chunk_of(entry, 1, CHUNK, BLOCK)
    code = tl.load(entry + (1 + CODES))
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(begin, whole, BLOCK):
        x = read_coded(tl.load(entry), code, start + tl.arange(0, BLOCK), count, True, ALIGNED)
        sums += x * x
    if whole < end:
        x = read_coded(tl.load(entry), code, whole + tl.arange(0, BLOCK), count, False, ALIGNED)
        sums += x * x
    tl.store(partials + place + tl.program_id(0), tl.sum(sums, axis=0))


@triton.jit
def finish_norms(ranges, partials, out, whole, BLOCK: tl.constexpr):
    """out[p] = the root of the sum of p's partial sums: those from ranges[p] to ranges[p + 1], or the first `whole`."""
    begin, end = tl.zeros((), tl.int64), tl.zeros((), tl.int64) + whole
    if ranges is not None:
        begin, end = tl.load(ranges + tl.program_id(0)), tl.load(ranges + tl.program_id(0) + 1)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        sums += tl.load(partials + i, mask=i < end, other=0.0)
    tl.store(out + tl.program_id(0), tl.math.sqrt_rn(tl.sum(sums, axis=0)))
