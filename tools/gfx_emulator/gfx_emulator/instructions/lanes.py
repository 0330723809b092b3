# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Instructions that move values between lanes, and between lanes and scalar registers."""

from __future__ import annotations

import numpy as np

from gfx_emulator import operands
from gfx_emulator.arrays import LANES, Array, whole
from gfx_emulator.decode import Instruction
from gfx_emulator.errors import NotImplementedInstruction
from gfx_emulator.operands import VGPR
from gfx_emulator.registers import Active
from gfx_emulator.registry import Context, Execute, implements


@implements("V_READFIRSTLANE_B32")
def _read_first(instruction: Instruction, context: Context) -> Execute:
    """The value of the lowest active lane, of lane 0 where none is."""
    read, target = operands.vector(instruction["src0"], "u32", instruction), instruction["vdst"] - VGPR

    def execute(active: Active) -> None:
        value = whole(read(active), active.count)
        if active.mask is None:
            active.set_s(target, value[:, 0])
        else:
            active.set_s(target, value[np.arange(active.count), active.mask.argmax(axis=1)])

    return execute


@implements("V_READLANE_B32")
def _read_lane(instruction: Instruction, context: Context) -> Execute:
    read, target = operands.vector(instruction["src0"], "u32", instruction), instruction["vdst"] - VGPR
    lane = operands.scalar(instruction["src1"], "u32", instruction)

    def execute(active: Active) -> None:
        value = whole(read(active), active.count)
        active.set_s(target, value[np.arange(active.count), lane(active) & np.uint32(63)])

    return execute


@implements("V_WRITELANE_B32")
def _write_lane(instruction: Instruction, context: Context) -> Execute:
    """Writes one lane, whether it is active or not."""
    read, target = operands.scalar(instruction["src0"], "u32", instruction), instruction["vdst"] - VGPR
    lane = operands.scalar(instruction["src1"], "u32", instruction)

    def execute(active: Active) -> None:
        active.batch.vector[target][active.identity, lane(active) & np.uint32(63)] = read(active)

    return execute


@implements("V_PERMLANE16_SWAP_B32", "V_PERMLANE32_SWAP_B32")
def _swap_halves(instruction: Instruction, context: Context) -> Execute:
    """Upper rows of the target and lower rows of the source change places: rows of 16 lanes in pairs, or halves."""
    first, second = instruction["vdst"] - VGPR, instruction["src0"] - VGPR
    size = 16 if "16" in instruction.name else 32
    upper = np.arange(LANES) & size != 0

    def execute(active: Active) -> None:
        if active.mask is not None:
            raise NotImplementedInstruction(f"{instruction.name} with inactive lanes")
        a, b = active.v(first).copy(), active.v(second).copy()
        lanes = np.arange(LANES)
        active.set_v(first, np.where(upper, b[:, lanes ^ size], a))
        active.set_v(second, np.where(upper, b, a[:, lanes ^ size]))

    return execute


@implements("V_SWAP_B32")
def _swap(instruction: Instruction, context: Context) -> Execute:
    first, second = instruction["vdst"] - VGPR, instruction["src0"] - VGPR

    def execute(active: Active) -> None:
        a, b = active.v(first).copy(), active.v(second).copy()
        active.set_v(first, b)
        active.set_v(second, a)

    return execute


@implements("DS_BPERMUTE_B32")
def _backward_permute(instruction: Instruction, context: Context) -> Execute:
    """Each lane reads the lane that its address names, in bytes; inactive lanes read as zero."""
    address, data, target = (instruction[name] - VGPR for name in ("addr", "data0", "vdst"))
    offset = _offset(instruction)

    def execute(active: Active) -> None:
        lane = (active.v(address) + offset) >> np.uint32(2) & np.uint32(63)
        value = active.v(data)
        if active.mask is not None:
            value = np.where(active.mask, value, np.uint32(0))
        active.set_v(target, np.take_along_axis(value, lane.astype(np.int64), axis=1))

    return execute


@implements("DS_PERMUTE_B32")
def _forward_permute(instruction: Instruction, context: Context) -> Execute:
    """Each active lane sends to the lane that its address names; of several senders the highest one wins."""
    address, data, target = (instruction[name] - VGPR for name in ("addr", "data0", "vdst"))
    offset = _offset(instruction)

    def execute(active: Active) -> None:
        lane = (active.v(address) + offset) >> np.uint32(2) & np.uint32(63)
        value, sends = active.v(data), active.active_lanes()
        received = np.zeros((active.count, LANES), np.uint32)
        rows = np.arange(active.count)
        for sender in range(LANES):
            chosen = rows[sends[:, sender]]
            received[chosen, lane[chosen, sender]] = value[chosen, sender]
        active.set_v(target, received)

    return execute


def _offset(instruction: Instruction) -> np.uint32:
    return np.uint32(instruction["offset1"] << 8 | instruction["offset0"])


def swizzle_pattern(offset: int) -> Array:
    """DS_SWIZZLE: the lane that each lane reads."""
    lane = np.arange(LANES)
    if offset & 0x8000:
        choice = np.array([offset >> 2 * i & 3 for i in range(4)])
        return (lane & ~3) + choice[lane & 3]
    low = lane & 31
    return (lane & 32) + ((low & offset & 31 | offset >> 5 & 31) ^ offset >> 10 & 31)


@implements("DS_SWIZZLE_B32")
def _swizzle(instruction: Instruction, context: Context) -> Execute:
    offset = int(_offset(instruction))
    if offset >= 0xC000:
        raise NotImplementedInstruction(f"{instruction}: swizzle mode {offset:#x}")
    pattern = swizzle_pattern(offset)
    data, target = instruction["addr"] - VGPR, instruction["vdst"] - VGPR

    def execute(active: Active) -> None:
        value = active.v(data)
        if active.mask is not None:
            value = np.where(active.mask, value, np.uint32(0))
        active.set_v(target, value[:, pattern])

    return execute
