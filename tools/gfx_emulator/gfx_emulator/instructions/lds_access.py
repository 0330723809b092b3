# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Loads and stores of local memory (DS)."""

from __future__ import annotations

import re

import numpy as np

from gfx_emulator.arrays import Array
from gfx_emulator.decode import Instruction
from gfx_emulator.errors import NotImplementedInstruction
from gfx_emulator.instructions.addresses import Lanes, extended
from gfx_emulator.instructions.vector_memory import data_register, lds_places, store_lds
from gfx_emulator.operands import VGPR
from gfx_emulator.registers import Active
from gfx_emulator.registry import Context, Execute, add

_TYPE = re.compile(r"_[BUI](\d+)")


def _size(name: str) -> int:
    """Bytes of one access: of ``DS_READ2ST64_B64`` 8."""
    found = _TYPE.search(name)
    assert found is not None
    return int(found[1]) // 8


def _offset(instruction: Instruction) -> int:
    return instruction["offset1"] << 8 | instruction["offset0"]


def byte_offsets(lanes: Lanes, instruction: Instruction, constant: int) -> Array:
    """Byte offsets in LDS; the sum of register and constant has 32 bits, and compilers make use of that."""
    found: Array = lanes.of(lanes.active.v(instruction["addr"] - VGPR)) + np.uint32(constant)
    return found.astype(np.int64)


def _refuse_gds(instruction: Instruction) -> None:
    if instruction["gds"]:
        raise NotImplementedInstruction(f"{instruction}: global data share")


def load(instruction: Instruction, lanes: Lanes, constant: int, size: int) -> Array:
    """uint8 ``[k, size]`` at the lanes' addresses."""
    offsets = byte_offsets(lanes, instruction, constant)
    places = lds_places(instruction, lanes, offsets, size)
    data: Array = lanes.guarded(instruction, places, lanes.active.batch.lds.load, size, lanes.wave())
    return data


def _read(instruction: Instruction, context: Context) -> Execute:
    _refuse_gds(instruction)
    name, size = instruction.name, _size(instruction.name)
    half = 1 if name.endswith("_D16_HI") else 0 if name.endswith("_D16") else None

    def execute(active: Active) -> None:
        lanes = Lanes(active)
        data = extended(load(instruction, lanes, _offset(instruction), size), name)
        number = data_register(active, instruction, "vdst")
        if half is None:
            lanes.put_bytes(number, data)
            return
        value, old = data.view(np.uint32)[:, 0] & np.uint32(0xFFFF), lanes.of(active.v(number))
        kept = old & np.uint32(0xFFFF0000 if half == 0 else 0xFFFF)
        lanes.put(number, kept | value << np.uint32(16 * half))

    return execute


def _pair_step(instruction: Instruction) -> int:
    """What the two offsets of a pair of accesses count."""
    return _size(instruction.name) * (64 if "ST64" in instruction.name else 1)


def _read_pair(instruction: Instruction, context: Context) -> Execute:
    _refuse_gds(instruction)
    size, step = _size(instruction.name), _pair_step(instruction)

    def execute(active: Active) -> None:
        lanes = Lanes(active)
        parts = [load(instruction, lanes, step * instruction[field], size) for field in ("offset0", "offset1")]
        lanes.put_bytes(data_register(active, instruction, "vdst"), np.concatenate(parts, axis=1))

    return execute


def _write(instruction: Instruction, context: Context) -> Execute:
    _refuse_gds(instruction)
    size, upper = _size(instruction.name), instruction.name.endswith("_D16_HI")

    def execute(active: Active) -> None:
        lanes = Lanes(active)
        data = lanes.words(data_register(active, instruction, "data0"), (size + 3) // 4)
        first = 2 if upper else 0
        store_lds(
            instruction, lanes, byte_offsets(lanes, instruction, _offset(instruction)), data[:, first : first + size]
        )

    return execute


def _write_pair(instruction: Instruction, context: Context) -> Execute:
    _refuse_gds(instruction)
    size, step = _size(instruction.name), _pair_step(instruction)

    def execute(active: Active) -> None:
        lanes = Lanes(active)
        for field, offset in (("data0", "offset0"), ("data1", "offset1")):
            data = lanes.words(data_register(active, instruction, field), size // 4)
            store_lds(instruction, lanes, byte_offsets(lanes, instruction, step * instruction[offset]), data)

    return execute


def _read_transposed(instruction: Instruction, context: Context) -> Execute:
    """Every 16 lanes load a matrix of 64 bits per lane by rows and get it by columns.

    With elements of w bits a row has 16 elements, which w / 4 lanes load; lane i gets element i of every row.
    """
    _refuse_gds(instruction)
    width = int(instruction.name.rsplit("_B", 1)[1]) // 8
    if width not in (1, 2):
        raise NotImplementedInstruction(f"{instruction.name} is not implemented")
    in_lane = 8 // width
    lanes_of_row = 16 // in_lane

    def execute(active: Active) -> None:
        if active.mask is not None:
            raise NotImplementedInstruction(f"{instruction.name} with inactive lanes")
        lanes = Lanes(active)
        loaded = load(instruction, lanes, _offset(instruction), 8)
        # [group of 16 lanes, row, lane of the row, element of the lane, byte] to one column per lane.
        matrix = loaded.reshape(len(loaded) // 16, in_lane, lanes_of_row * in_lane, width)
        lanes.put_bytes(data_register(active, instruction, "vdst"), matrix.transpose(0, 2, 1, 3).reshape(-1, 8))

    return execute


add(["DS_READ_B32", "DS_READ_B64", "DS_READ_B96", "DS_READ_B128"], _read)
add([f"DS_READ_{kind}" for kind in ("I8", "U8", "I16", "U16")], _read)
add([f"DS_READ_{kind}_D16{half}" for kind in ("I8", "U8", "U16") for half in ("", "_HI")], _read)
add([f"DS_READ2{stride}_B{width}" for stride in ("", "ST64") for width in (32, 64)], _read_pair)
add(["DS_WRITE_B32", "DS_WRITE_B64", "DS_WRITE_B96", "DS_WRITE_B128", "DS_WRITE_B8", "DS_WRITE_B16"], _write)
add(["DS_WRITE_B8_D16_HI", "DS_WRITE_B16_D16_HI"], _write)
add([f"DS_WRITE2{stride}_B{width}" for stride in ("", "ST64") for width in (32, 64)], _write_pair)
add(["DS_READ_B64_TR_B8", "DS_READ_B64_TR_B16"], _read_transposed)
