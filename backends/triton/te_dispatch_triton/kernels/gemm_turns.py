# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products of FP8 codes on Hopper whose partial sums are promoted to fp32 while the units multiply on.

`gemm.product_tile` waits for each product of 128 along K before it adds it up, and the units idle meanwhile. Here the
next product runs while one is added: the steps of K come in turns of TURN, at whose ends alone the units run dry
(ptxas gives up overlap where a product is under way from one round of a loop to the next). Steps that make no whole
turn come first, one by one. That takes waiting for products one at a time, which Triton's language does not have, and
Gluon, which comes with it, does.

Bits are those of `gemm.gemm` with PROMOTE, or with block scales.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from te_dispatch_triton.kernels.gemm import place

# Triton 3.6 has the former of the names, later releases the latter.
_names = vars(tma)
load_tile = _names.get("async_load") or _names["async_copy_global_to_shared"]
store_tile = _names.get("async_store") or _names["async_copy_shared_to_global"]


@gluon.jit
def fetch(
    a, b, xs, ys, full, stage, index, first_m, first_n, first_k, k, tiles_m, tiles_n,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Start loading a step's tiles into a stage.

    Returns what is loaded after it: (stage, tile, where it begins along M, N and K).
    """
    BM: gl.constexpr = a.block_type.shape[0]
    BN: gl.constexpr = b.block_type.shape[0]
    BK: gl.constexpr = a.block_type.shape[1]
    ready, here = full.index(stage), index < tiles_m * tiles_n
    mbarrier.expect(ready, (BM + BN) * BK, pred=here)
    load_tile(a, [first_m, first_k], ready, xs.index(stage), pred=here)
    load_tile(b, [first_n, first_k], ready, ys.index(stage), pred=here)
    first_k += BK
    if first_k >= k:
        first_k = 0
        index += gl.num_programs(0)
        row, column = place(index, tiles_m, tiles_n, GROUP)
        first_m, first_n = row * BM, column * BN
    return gl.where(stage == STAGES - 1, 0, stage + 1), index, first_m, first_n, first_k


@gluon.jit
def multiply(xs, ys, full, stage, phase, zeros, STAGES: gl.constexpr):
    """(a product that is under way, the next stage, the phase in which that is loaded)."""
    mbarrier.wait(full.index(stage), phase)
    part = warpgroup_mma(xs.index(stage), ys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    last = stage == STAGES - 1
    return part, gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def scales(scale, places, size, count, block, SCALING: gl.constexpr, TILES: gl.constexpr):
    """Of one operand for the block-th of `count` 128s along K: for each place, or one number."""
    if SCALING == "tensor":
        return 1.0
    elif TILES:
        return gl.load(scale + places.to(gl.int64) * count + block)
    else:
        return gl.load(scale + places.to(gl.int64) * count + block, mask=places < size, other=0.0)


@gluon.jit
def promoted(acc, part, whole, left, right, SCALING: gl.constexpr, A_TILES: gl.constexpr, B_TILES: gl.constexpr):
    """acc + part, scaled in the order of `gemm.product_tile`."""
    LINE: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    if SCALING == "tensor":
        acc += part * whole
    elif A_TILES and B_TILES:
        acc += part * (left * right)
    elif A_TILES:
        acc += part * gl.convert_layout(right * left, LINE)[None, :]
    elif B_TILES:
        acc += part * (left * right)[:, None]
    else:
        acc += part * (left[:, None] * gl.convert_layout(right, LINE)[None, :])
    return acc


@gluon.jit
def gemm_turns(
    a, b, out, a_scale, b_scale, bias, alpha, m, n, k,
    A_TILES: gl.constexpr, B_TILES: gl.constexpr, SCALING: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    TURN: gl.constexpr,
):  # fmt: skip
    """As `gemm.gemm`: a, b and out are descriptors, both operands lie along K, and nothing but a bias follows.

    STAGES: tiles of both operands that are loaded or multiplied at a time.
    """
    BM: gl.constexpr = a.block_type.shape[0]
    BN: gl.constexpr = b.block_type.shape[0]
    BK: gl.constexpr = a.block_type.shape[1]
    gl.static_assert(BK == 128)  # what shares a block's scale, and a product that is promoted
    UNITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 32])
    # A number for each thread: the matrix's layout would have each read the scales of a fourth of the columns.
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    xs = gl.allocate_shared_memory(a.dtype, [STAGES, BM, BK], a.layout)
    ys = gl.allocate_shared_memory(b.dtype, [STAGES, BN, BK], b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    held = gl.allocate_shared_memory(out.dtype, [BM, BN], out.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    tiles_m, tiles_n = gl.cdiv(m, BM), gl.cdiv(n, BN)
    steps = gl.cdiv(k, BK)
    zeros = gl.zeros([BM, BN], gl.float32, UNITS)
    whole = 1.0
    if SCALING == "tensor":
        whole = gl.load(a_scale) * gl.load(b_scale)

    stage, phase = 0, 0
    free, ahead = 0, gl.program_id(0)
    ahead_row, ahead_column = place(ahead, tiles_m, tiles_n, GROUP)
    ahead_m, ahead_n, ahead_k = ahead_row * BM, ahead_column * BN, 0
    for _ in gl.static_range(STAGES):
        free, ahead, ahead_m, ahead_n, ahead_k = fetch(
            a, b, xs, ys, full, free, ahead, ahead_m, ahead_n, ahead_k, k, tiles_m, tiles_n, STAGES, GROUP
        )  # fmt: skip
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = place(index, tiles_m, tiles_n, GROUP)
        first_m, first_n = row * BM, column * BN
        rows, columns = first_m + gl.arange(0, BM, layout=gl.SliceLayout(1, UNITS)), first_n + gl.arange(0, BN, LINE)
        if A_TILES:
            rows = first_m // 128
        if B_TILES:
            columns = first_n // 128
        acc = gl.zeros([BM, BN], gl.float32, UNITS)
        alone = steps % TURN
        for step in range(alone):
            part, stage, phase = multiply(xs, ys, full, stage, phase, zeros, STAGES)
            left = scales(a_scale, rows, m, steps, step, SCALING, A_TILES)
            right = scales(b_scale, columns, n, steps, step, SCALING, B_TILES)
            done = warpgroup_mma_wait(0, deps=(part,))
            free, ahead, ahead_m, ahead_n, ahead_k = fetch(
                a, b, xs, ys, full, free, ahead, ahead_m, ahead_n, ahead_k, k, tiles_m, tiles_n, STAGES, GROUP
            )  # fmt: skip
            acc = promoted(acc, done, whole, left, right, SCALING, A_TILES, B_TILES)
        for first in range(alone, steps, TURN):
            part, stage, phase = multiply(xs, ys, full, stage, phase, zeros, STAGES)
            left = scales(a_scale, rows, m, steps, first, SCALING, A_TILES)
            right = scales(b_scale, columns, n, steps, first, SCALING, B_TILES)
            for i in gl.static_range(1, TURN + 1):
                if i < TURN:
                    more, stage, phase = multiply(xs, ys, full, stage, phase, zeros, STAGES)
                    more_left = scales(a_scale, rows, m, steps, first + i, SCALING, A_TILES)
                    more_right = scales(b_scale, columns, n, steps, first + i, SCALING, B_TILES)
                    done = warpgroup_mma_wait(1, deps=(part,))
                else:
                    done = warpgroup_mma_wait(0, deps=(part,))
                # Into the stage whose product is done: Triton has warps wait for each other before memory is reused.
                free, ahead, ahead_m, ahead_n, ahead_k = fetch(
                    a, b, xs, ys, full, free, ahead, ahead_m, ahead_n, ahead_k, k, tiles_m, tiles_n, STAGES, GROUP
                )  # fmt: skip
                acc = promoted(acc, done, whole, left, right, SCALING, A_TILES, B_TILES)
                if i < TURN:
                    part, left, right = more, more_left, more_right
        z = acc * alpha
        if bias is not None:
            places = first_n + gl.arange(0, BN, layout=gl.SliceLayout(0, UNITS))
            z += gl.load(bias + places, mask=places < n, other=0.0).to(gl.float32)[None, :]
        tma.store_wait(0)
        held.store(z.to(out.dtype))
        fence_async_shared()
        store_tile(out, [first_m, first_n], held)
    tma.store_wait(0)
