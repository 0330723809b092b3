# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Loads and stores of vector registers: global, flat, buffer and scratch; and loads that go to LDS directly.

Accesses are complete when their instruction was executed; cache controls (sc0, sc1, nt) have no effect.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx_emulator import operands
from gfx_emulator.arrays import Array
from gfx_emulator.decode import Instruction
from gfx_emulator.errors import AccessError, NotImplementedInstruction
from gfx_emulator.instructions.addresses import Lanes, extended, signed
from gfx_emulator.operands import VGPR
from gfx_emulator.registers import M0, Active
from gfx_emulator.registry import Context, Execute, add

_SIZES = {
    "BYTE": 1, "UBYTE": 1, "SBYTE": 1, "SHORT": 2, "USHORT": 2, "SSHORT": 2, "DWORD": 4, "DWORDX2": 8, "DWORDX3": 12,
    "DWORDX4": 16,
}  # fmt: skip
_LOADS = ("UBYTE", "SBYTE", "USHORT", "SSHORT", "DWORD", "DWORDX2", "DWORDX3", "DWORDX4")
_HALF_LOADS = ("UBYTE", "SBYTE", "SHORT")
_STORES = ("BYTE", "SHORT", "DWORD", "DWORDX2", "DWORDX3", "DWORDX4")
_NO_ADDRESS = 127

#: Byte addresses of every lane, int64 ``[n, 64]``.
Addresses = Callable[[Active], Array]


def global_addresses(instruction: Instruction) -> Addresses:
    """Of GLOBAL and FLAT: a 64-bit vector address, or a scalar base and a 32-bit vector offset."""
    register, base = instruction["addr"] - VGPR, instruction["saddr"]
    if instruction.form == "FLAT":
        constant = instruction["offset"]
        return lambda active: active.v64(register).astype(np.int64) + constant
    constant = signed(instruction["offset"], 13)
    if base == _NO_ADDRESS:
        return lambda active: active.v64(register).astype(np.int64) + constant
    return lambda active: active.s64(base).astype(np.int64)[:, None] + active.v(register) + constant


class BufferAddresses:
    """Of MUBUF with a raw buffer (its stride is zero): addresses, and which lanes are within the buffer's range."""

    def __init__(self, instruction: Instruction) -> None:
        if instruction["idxen"]:
            raise NotImplementedInstruction(f"{instruction}: buffer accesses by index")
        self._resource = instruction["srsrc"]
        self._register = instruction["vaddr"] - VGPR if instruction["offen"] else None
        self._constant = instruction["offset"]
        self._scalar = operands.scalar(instruction["soffset"], "u32", instruction)
        self._instruction = instruction

    def of(self, active: Active) -> tuple[Array, Array]:
        """(addresses int64 ``[n, 64]``, bytes from there to the end of the range)."""
        high = active.s(self._resource + 1)
        if (high >> np.uint32(16)).any() or (active.s(self._resource + 3) >> np.uint32(30)).any():
            raise NotImplementedInstruction(
                f"{self._instruction}: a buffer resource with a stride, swizzled, or no buffer"
            )
        base = (active.s64(self._resource) & np.uint64(0xFFFF_FFFF_FFFF)).astype(np.int64)
        offsets = np.full((active.count, 64), self._constant, np.int64)
        if self._register is not None:
            offsets += active.v(self._register)
        scalar = np.broadcast_to(self._scalar(active), (active.count,)).astype(np.int64)[:, None]
        records = active.s(self._resource + 2).astype(np.int64)[:, None]
        return base[:, None] + offsets + scalar, records - scalar - offsets


def data_register(active: Active, instruction: Instruction, field: str) -> int:
    """The row of a data operand: accumulation registers follow the others."""
    number = instruction[field] - VGPR
    return number + active.batch.accum_offset if instruction["acc"] else number


def _place(name: str) -> tuple[str, int | None]:
    """(the access's type, the half of a register that it fills or None): of ``LOAD_SHORT_D16_HI`` (SHORT, 1)."""
    kind = name.split("_", 2)[2] if "_LDS_" not in name else name.rsplit("_", 1)[1]
    if kind.endswith("_D16_HI"):
        return kind.removesuffix("_D16_HI"), 1
    return (kind.removesuffix("_D16"), 0) if kind.endswith("_D16") else (kind, None)


def _keep_half(lanes: Lanes, number: int, data: Array, half: int) -> None:
    old = lanes.of(lanes.active.v(number))
    value = np.ascontiguousarray(data).view(np.uint32)[:, 0] & np.uint32(0xFFFF)
    lanes.put(
        number, old & np.uint32(0xFFFF0000) | value if half == 0 else old & np.uint32(0xFFFF) | value << np.uint32(16)
    )


def _flat_load(instruction: Instruction, context: Context) -> Execute:
    addresses, (kind, half) = global_addresses(instruction), _place(instruction.name)
    size = _SIZES[kind]

    def execute(active: Active) -> None:
        lanes = Lanes(active)
        data = lanes.guarded(instruction, lanes.of(addresses(active)), active.batch.memory.load, size)
        number = data_register(active, instruction, "vdst")
        if half is None:
            lanes.put_bytes(number, extended(data, kind))
        else:
            _keep_half(lanes, number, extended(data, kind), half)

    return execute


def _flat_store(instruction: Instruction, context: Context) -> Execute:
    addresses, (kind, half) = global_addresses(instruction), _place(instruction.name)
    size = _SIZES[kind]

    def execute(active: Active) -> None:
        lanes = Lanes(active)
        data = lanes.words(data_register(active, instruction, "data"), (size + 3) // 4)
        first = 2 if half else 0
        lanes.guarded(
            instruction, lanes.of(addresses(active)), active.batch.memory.store, data[:, first : first + size]
        )

    return execute


def _buffer_load(instruction: Instruction, context: Context) -> Execute:
    addresses, (kind, half) = BufferAddresses(instruction), _place(instruction.name)
    size, to_lds = _SIZES[kind], bool(instruction["lds"])

    def execute(active: Active) -> None:
        places, left = addresses.of(active)
        lanes = Lanes(active)
        flat, rest = lanes.of(places), lanes.of(left)
        bytes_ = _within_range(active, instruction, lanes, flat, rest, size)
        if to_lds:
            _to_lds(active, instruction, lanes, extended(bytes_, kind), instruction["offset"])
            return
        number = data_register(active, instruction, "vdata")
        if half is None:
            lanes.put_bytes(number, extended(bytes_, kind))
        else:
            _keep_half(lanes, number, extended(bytes_, kind), half)

    return execute


def _within_range(active: Active, instruction: Instruction, lanes: Lanes, flat: Array, rest: Array, size: int) -> Array:
    """uint8 ``[k, size]``; what is out of range reads as zero, register by register."""
    whole = rest >= size
    if whole.all():
        loaded: Array = lanes.guarded(instruction, flat, active.batch.memory.load, size)
        return loaded
    step = min(size, 4)
    data = np.zeros((len(flat), size // step, step), np.uint8)
    loaded = lanes.among(whole).guarded(instruction, flat[whole], active.batch.memory.load, size)
    data[whole] = loaded.reshape(len(loaded), size // step, step)
    _load_partial(active, instruction, lanes, flat, rest, data)
    return data.reshape(len(flat), size)


def _load_partial(
    active: Active, instruction: Instruction, lanes: Lanes, flat: Array, rest: Array, data: Array
) -> None:
    """Registers of accesses that lie partly within the range."""
    for word in range(data.shape[1]):
        chosen = (rest >= 4 * word + 4) & (rest < 4 * data.shape[1])
        if data.shape[2] == 4 and chosen.any():
            part = lanes.among(chosen)
            data[chosen, word] = part.guarded(instruction, flat[chosen] + 4 * word, active.batch.memory.load, 4)


def _buffer_store(instruction: Instruction, context: Context) -> Execute:
    addresses, (kind, half) = BufferAddresses(instruction), _place(instruction.name)
    size = _SIZES[kind]
    step = min(size, 4)

    def execute(active: Active) -> None:
        places, left = addresses.of(active)
        number = data_register(active, instruction, "vdata")
        first = 2 if half else 0
        everything = active.active_lanes()
        inside = left >= size
        complete = bool(inside.all())
        whole = Lanes(active) if complete else Lanes(active, everything & inside)
        data = whole.words(number, (size + 3) // 4)[:, first : first + size]
        whole.guarded(instruction, whole.of(places), active.batch.memory.store, data)
        for word in range(size // step if size > 4 and not complete else 0):
            part = Lanes(active, everything & (left < size) & (left >= 4 * word + 4))
            part.guarded(
                instruction, part.of(places) + 4 * word, active.batch.memory.store, part.words(number + word, 1)
            )

    return execute


def _to_lds(active: Active, instruction: Instruction, lanes: Lanes, data: Array, constant: int) -> None:
    """Lane after lane from M0 on; the instruction's constant counts for both addresses."""
    size = data.shape[1]
    start = active.s(M0).astype(np.int64) & 0x3FFFF
    store_lds(instruction, lanes, start[lanes.row] + constant + size * lanes.lane, data)


def lds_places(instruction: Instruction, lanes: Lanes, offsets: Array, size: int) -> Array:
    """Flat addresses in the batch's LDS of offsets in each lane's workgroup.

    Raises:
        AccessError: where bytes are outside the workgroup's LDS, which hardware would read as zero and not write.
    """
    lds = lanes.active.batch.lds
    wrong = (offsets < 0) | (offsets + size > lds.size)
    if wrong.any():
        place = int(np.nonzero(wrong)[0][0])
        told = lanes.told(instruction, offsets, place, f"the workgroup has {lds.size} bytes of LDS")
        raise AccessError(told)
    return lanes.workgroup() * lds.stride + offsets


def store_lds(instruction: Instruction, lanes: Lanes, offsets: Array, data: Array) -> None:
    places = lds_places(instruction, lanes, offsets, data.shape[1])
    lanes.guarded(instruction, places, lanes.active.batch.lds.store, data, lanes.wave())


def _global_load_lds(instruction: Instruction, context: Context) -> Execute:
    addresses, (kind, _) = global_addresses(instruction), _place(instruction.name)
    size, constant = _SIZES[kind], signed(instruction["offset"], 13)

    def execute(active: Active) -> None:
        lanes = Lanes(active)
        data = lanes.guarded(instruction, lanes.of(addresses(active)), active.batch.memory.load, size)
        _to_lds(active, instruction, lanes, extended(data, kind), constant)

    return execute


def _scratch_offsets(instruction: Instruction) -> Addresses:
    """Byte offsets in each lane's private memory."""
    register, base, constant = instruction["addr"] - VGPR, instruction["saddr"], signed(instruction["offset"], 13)

    def offsets(active: Active) -> Array:
        found = np.full((active.count, 64), constant, np.int64)
        if instruction["sve"]:
            found += active.v(register)
        if base != _NO_ADDRESS:
            found += active.s(base).astype(np.int64)[:, None]
        return found

    return offsets


def _scratch(instruction: Instruction, context: Context) -> Execute:
    offsets, (kind, _) = _scratch_offsets(instruction), _place(instruction.name)
    count, loads = _SIZES[kind] // 4, "_LOAD_" in instruction.name

    def execute(active: Active) -> None:
        memory = active.batch.scratch
        lanes = Lanes(active)
        flat = lanes.of(offsets(active))
        wrong = (flat % 4 != 0) | (flat < 0) | (flat // 4 + count > len(memory))
        if wrong.any():
            place = int(np.nonzero(wrong)[0][0])
            raise AccessError(
                lanes.told(instruction, flat, place, f"a lane has {4 * len(memory)} bytes of scratch memory")
            )
        rows = active.identity[lanes.row]
        number = data_register(active, instruction, "vdst" if loads else "data")
        for word in range(count):
            if loads:
                lanes.put(number + word, memory[flat // 4 + word, rows, lanes.lane])
            else:
                memory[flat // 4 + word, rows, lanes.lane] = lanes.of(active.v(number + word))

    return execute


for _segment in ("GLOBAL", "FLAT"):
    add([f"{_segment}_LOAD_{kind}" for kind in _LOADS], _flat_load)
    add([f"{_segment}_LOAD_{kind}_D16{half}" for kind in _HALF_LOADS for half in ("", "_HI")], _flat_load)
    add([f"{_segment}_STORE_{kind}" for kind in _STORES], _flat_store)
    add([f"{_segment}_STORE_{kind}_D16_HI" for kind in ("BYTE", "SHORT")], _flat_store)
add([f"GLOBAL_LOAD_LDS_{kind}" for kind in _LOADS if kind != "DWORDX2"], _global_load_lds)
add([f"SCRATCH_{verb}_{kind}" for verb in ("LOAD", "STORE") for kind in _LOADS if kind.startswith("DWORD")], _scratch)
add([f"BUFFER_LOAD_{kind}" for kind in _LOADS], _buffer_load)
add([f"BUFFER_LOAD_{kind}_D16{half}" for kind in _HALF_LOADS for half in ("", "_HI")], _buffer_load)
add([f"BUFFER_STORE_{kind}" for kind in _STORES], _buffer_store)
add([f"BUFFER_STORE_{kind}_D16_HI" for kind in ("BYTE", "SHORT")], _buffer_store)
