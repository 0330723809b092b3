# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products of FP8 codes on Hopper whose partial sums are promoted to fp32 while the units multiply on.

`gemm.product_tile` waits for each product of 128 along K before it adds it up, and the units idle meanwhile. Here warps
have roles. Teams of four warps, each with 64 rows of the program's tile, take turns at the units: while one adds its
product up, the others' are multiplied. One warp loads tiles, as soon as all teams are done with what a stage held. Two
load scales, which lie a row apart: TURN steps at a time, laid down in the order in which threads of the teams take
them. Roles wait for each other at barriers in shared memory. Triton's language has neither roles nor such waits; Gluon,
which comes with it, has both.

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
VIEWS_ARE_PUBLIC = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

#: Rows of a team, and parts of shared memory for scales: those in use and those that follow.
ROWS = gl.constexpr(64)
PARTS = gl.constexpr(2)


@gluon.constexpr_function
def ordered(first, size, steps):
    """The layout of (steps, size) scales, or of one step's where that is 0: by steps, each with places that differ by
    `first` side by side, which one thread takes together."""
    bits = [*first, *(1 << i for i in range(size.bit_length() - 1) if 1 << i not in first)]
    if not steps:
        return gl.SharedLinearLayout([[bit] for bit in bits])
    of_steps = [[1 << i, 0] for i in range(steps.bit_length() - 1)]
    return gl.SharedLinearLayout([[0, bit] for bit in bits] + of_steps)


@gluon.jit
def viewed(x, shape: gl.constexpr, layout: gl.constexpr):
    """Shared memory of fp32 as a matrix of another layout."""
    if VIEWS_ARE_PUBLIC:
        return x.reinterpret(gl.float32, shape, layout)
    else:
        return x._reinterpret(gl.float32, shape, layout)


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """What follows a stage, and the phase of its barrier."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def load_tiles(given, TEAMS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """One warp's role: tiles of both operands, step by step, for all tiles of the output that the program computes."""
    a, b, xs, ys, full, empty, m, n, steps = given
    BN: gl.constexpr = b.block_type.shape[0]
    BK: gl.constexpr = b.block_type.shape[1]
    tiles_m, tiles_n = gl.cdiv(m, TEAMS * ROWS), gl.cdiv(n, BN)
    stage, phase = 0, 1
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = place(index, tiles_m, tiles_n, GROUP)
        for step in range(steps):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, (TEAMS * ROWS + BN) * BK)
            for team in gl.static_range(TEAMS):
                load_tile(a, [(row * TEAMS + team) * ROWS, step * BK], ready, xs.index(stage * TEAMS + team))
            load_tile(b, [column * BN, step * BK], ready, ys.index(stage))
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def scales(scale, first, size, step, steps, SIZE: gl.constexpr, TURN: gl.constexpr, TILES: gl.constexpr):
    """(SIZE, TURN) of an operand, or (1, TURN) where one serves them all; 0 beyond it."""
    FORM: gl.constexpr = gl.BlockedLayout([1, 4], [128 // TURN, TURN // 4], [gl.num_warps(), 1], [1, 0])
    places = first + gl.arange(0, SIZE, layout=gl.SliceLayout(1, FORM))
    blocks = step + gl.arange(0, TURN, layout=gl.SliceLayout(0, FORM))
    inside = (places < size)[:, None] & (blocks < steps)[None, :]
    if TILES:
        places = places // 128
    return gl.load(scale + places.to(gl.int64)[:, None] * steps + blocks[None, :], mask=inside, other=0.0)


@gluon.jit
def load_scales(
    given, A_TILES: gl.constexpr, B_LINES: gl.constexpr, TEAMS: gl.constexpr, GROUP: gl.constexpr
):  # fmt: skip
    """Two warps' role: scales of blocks for TURN steps at a time. One of b for a whole tile is applied to a's here."""
    a_scale, b_scale, lefts, rights, full, empty, m, n, steps = given
    TURN: gl.constexpr = lefts.shape[1]
    BN: gl.constexpr = 128
    tiles_m, tiles_n = gl.cdiv(m, TEAMS * ROWS), gl.cdiv(n, BN)
    part, phase = 0, 1
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = place(index, tiles_m, tiles_n, GROUP)
        first_m, first_n = row * (TEAMS * ROWS), column * BN
        for step in range(0, steps, TURN):
            # All are under way before the first is waited for.
            left = scales(a_scale, first_m, m, step, steps, ROWS, TURN, A_TILES)
            more = scales(a_scale, first_m + ROWS, m, step, steps, ROWS, TURN, A_TILES)
            last = more
            if TEAMS == 3:
                last = scales(a_scale, first_m + 2 * ROWS, m, step, steps, ROWS, TURN, A_TILES)
            right = scales(b_scale, first_n, n, step, steps, BN if B_LINES else 1, TURN, not B_LINES)
            if not B_LINES:
                left, more, last = left * right, more * right, last * right
            mbarrier.wait(empty.index(part), phase)
            lefts.index(part * TEAMS).store(left.permute((1, 0)))
            lefts.index(part * TEAMS + 1).store(more.permute((1, 0)))
            if TEAMS == 3:
                lefts.index(part * TEAMS + 2).store(last.permute((1, 0)))
            if B_LINES:
                rights.index(part).store(right.permute((1, 0)))
            mbarrier.arrive(full.index(part), count=1)
            part, phase = after(part, phase, PARTS)


@gluon.jit
def promoted(acc, product, left, line, step, whole, B_LINES: gl.constexpr, SCALING: gl.constexpr):
    """acc + product, scaled in the order of `gemm.product_tile`."""
    RIGHT: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    if SCALING == "tensor":
        acc += product * whole
    elif B_LINES:
        acc += product * (left[:, None] * line.index(step).load(RIGHT)[None, :])
    else:
        acc += product * left[:, None]
    return acc


@gluon.jit
def put(z, out, held, first_m, first_n):
    """Store a part of the output by way of shared memory."""
    tma.store_wait(0)
    held.store(z.to(out.dtype))
    fence_async_shared()
    store_tile(out, [first_m, first_n], held)


@gluon.jit
def multiply(
    given, team: gl.constexpr, B_LINES: gl.constexpr, SCALING: gl.constexpr, TEAMS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A team's role: its rows of all tiles of the output that the program computes."""
    (
        out, bias, alpha, a_scale, b_scale, xs, ys, lefts, rights, held, full, empty, scales_full, scales_empty, m, n,
        steps
    ) = given  # fmt: skip
    TURN: gl.constexpr = lefts.shape[1]
    BN: gl.constexpr = ys.shape[1]
    UNITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BN, 32])
    tiles_m, tiles_n = gl.cdiv(m, TEAMS * ROWS), gl.cdiv(n, BN)
    zeros = gl.zeros([ROWS, BN], gl.float32, UNITS)
    whole = 1.0
    if SCALING == "tensor":
        whole = gl.load(a_scale) * gl.load(b_scale)
    stage, phase, part, part_phase = 0, 0, 0, 0
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, column = place(index, tiles_m, tiles_n, GROUP)
        first_m, first_n = (row * TEAMS + team) * ROWS, column * BN
        acc = gl.zeros([ROWS, BN], gl.float32, UNITS)
        for first in range(0, steps, TURN):
            mine = viewed(lefts.index(part * TEAMS + team), [TURN, ROWS], ordered([8], ROWS, 0))
            line = mine
            if B_LINES:
                line = viewed(rights.index(part), [TURN, BN], ordered([1, 8], BN, 0))
            if SCALING == "block":
                mbarrier.wait(scales_full.index(part), part_phase)
            for step in range(gl.minimum(TURN, steps - first)):
                mbarrier.wait(full.index(stage), phase)
                product = warpgroup_mma(
                    xs.index(stage * TEAMS + team), ys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
                )  # fmt: skip
                left = mine.index(step).load(gl.SliceLayout(1, UNITS))
                product = warpgroup_mma_wait(0, deps=(product,))
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = after(stage, phase, STAGES)
                acc = promoted(acc, product, left, line, step, whole, B_LINES, SCALING)
            if SCALING == "block":
                mbarrier.arrive(scales_empty.index(part), count=1)
                part, part_phase = after(part, part_phase, PARTS)
        z = acc * alpha
        if bias is not None:
            places = first_n + gl.arange(0, BN, layout=gl.SliceLayout(0, UNITS))
            z += gl.load(bias + places, mask=places < n, other=0.0).to(gl.float32)[None, :]
        if out.block_type.shape[1] == BN:
            put(z, out, held.index(team), first_m, first_n)
        else:
            HALF: gl.constexpr = BN // 2
            left, right = gl.split(gl.permute(gl.reshape(z, (ROWS, 2, HALF)), (0, 2, 1)))
            put(left, out, held.index(team), first_m, first_n)
            put(right, out, held.index(team), first_m, first_n + HALF)
    tma.store_wait(0)


@gluon.jit
def gemm_turns(
    a, b, out, a_scale, b_scale, bias, alpha, m, n, k,
    A_TILES: gl.constexpr, B_TILES: gl.constexpr, SCALING: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    TURN: gl.constexpr, TEAMS: gl.constexpr,
):  # fmt: skip
    """As `gemm.gemm`: a, b and out are descriptors, both operands lie along K, and nothing but a bias follows.

    Tiles of the output have 64 rows for each of the TEAMS, two or three. Of out, a part of a team's rows is stored at
    a time.

    STAGES: tiles of both operands that are loaded or multiplied at a time.
    """
    BN: gl.constexpr = b.block_type.shape[0]
    BK: gl.constexpr = b.block_type.shape[1]
    gl.static_assert(a.block_type.shape[0] == ROWS)
    gl.static_assert(BN == 128 and BK == 128)  # what shares a block's scale, and a product that is promoted
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    xs = gl.allocate_shared_memory(a.dtype, [STAGES * TEAMS, ROWS, BK], a.layout)
    ys = gl.allocate_shared_memory(b.dtype, [STAGES, BN, BK], b.layout)
    held = gl.allocate_shared_memory(out.dtype, [TEAMS, ROWS, out.block_type.shape[1]], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    scales_full = gl.allocate_shared_memory(gl.int64, [PARTS, 1], BARRIER)
    scales_empty = gl.allocate_shared_memory(gl.int64, [PARTS, 1], BARRIER)
    lefts = gl.allocate_shared_memory(gl.float32, [PARTS * TEAMS, TURN, ROWS], ordered([8], ROWS, TURN))
    B_LINES: gl.constexpr = SCALING == "block" and not B_TILES
    rights = lefts
    if B_LINES:
        rights = gl.allocate_shared_memory(gl.float32, [PARTS, TURN, BN], ordered([1, 8], BN, TURN))
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=TEAMS)
    for i in gl.static_range(PARTS):
        mbarrier.init(scales_full.index(i), count=1)
        mbarrier.init(scales_empty.index(i), count=TEAMS)
    fence_async_shared()
    steps = gl.cdiv(k, BK)
    scaled = steps if SCALING == "block" else 0
    given = (
        out, bias, alpha, a_scale, b_scale, xs, ys, lefts, rights, held, full, empty, scales_full, scales_empty, m, n,
        steps
    )  # fmt: skip
    tiles = (a, b, xs, ys, full, empty, m, n, steps)
    scaling = (a_scale, b_scale, lefts, rights, scales_full, scales_empty, m, n, scaled)
    # Registers: what is left to the first team is as much as the others have, or nearly.
    if TEAMS == 2:
        gl.warp_specialize(
            [
                (multiply, (given, 0, B_LINES, SCALING, TEAMS, STAGES, GROUP)),
                (multiply, (given, 1, B_LINES, SCALING, TEAMS, STAGES, GROUP)),
                (load_tiles, (tiles, TEAMS, STAGES, GROUP)),
                (load_scales, (scaling, A_TILES, B_LINES, TEAMS, GROUP)),
            ],
            [4, 1, 2],
            [208, 96, 96],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (given, 0, B_LINES, SCALING, TEAMS, STAGES, GROUP)),
                (multiply, (given, 1, B_LINES, SCALING, TEAMS, STAGES, GROUP)),
                (multiply, (given, 2, B_LINES, SCALING, TEAMS, STAGES, GROUP)),
                (load_tiles, (tiles, TEAMS, STAGES, GROUP)),
                (load_scales, (scaling, A_TILES, B_LINES, TEAMS, GROUP)),
            ],
            [4, 4, 1, 2],
            [144, 144, 80, 80],
        )
