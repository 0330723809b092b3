# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Atomic read-modify-writes of global and local memory.

Lanes are served in the order of waves and lanes, which hardware does not promise: sums of floats by atomics may differ
from run to run there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gfx_emulator import floats
from gfx_emulator.arrays import Array
from gfx_emulator.decode import Instruction
from gfx_emulator.instructions.addresses import Lanes
from gfx_emulator.instructions.lds_access import byte_offsets
from gfx_emulator.instructions.vector_memory import BufferAddresses, data_register, global_addresses, lds_places
from gfx_emulator.registers import Active
from gfx_emulator.registry import Builder, Context, Execute, add

#: (what memory held, the operand) to what it holds then, of the row's dtype.
_Modify = Callable[[Array, Array], Any]


def _halves(function: _Modify) -> _Modify:
    """Of two packed numbers of 16 bits, given as uint32."""

    def both(old: Array, new: Array) -> Array:
        low = function((old & np.uint32(0xFFFF)).astype(np.uint16), (new & np.uint32(0xFFFF)).astype(np.uint16))
        high = function((old >> np.uint32(16)).astype(np.uint16), (new >> np.uint32(16)).astype(np.uint16))
        return np.asarray(low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16))

    return both


def _add_half(old: Array, new: Array) -> Array:
    return floats.half(old.view(np.float16).astype(np.float32) + new.view(np.float16).astype(np.float32))


def _add_bf16(old: Array, new: Array) -> Array:
    return floats.bf16(floats.from_bf16(old) + floats.from_bf16(new))


def _increment(old: Array, limit: Array) -> Array:
    return np.where(old >= limit, old.dtype.type(0), old + old.dtype.type(1))


def _decrement(old: Array, limit: Array) -> Array:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


def _plus(old: Array, new: Array) -> Array:
    return floats.with_nans(old + new, [old, new]) if old.dtype.kind == "f" else old + new


_INTEGER: dict[str, tuple[str, _Modify]] = {
    "ADD": ("u", _plus), "SUB": ("u", lambda old, new: old - new), "SMIN": ("i", np.minimum), "UMIN": ("u", np.minimum),
    "SMAX": ("i", np.maximum), "UMAX": ("u", np.maximum), "AND": ("u", lambda old, new: old & new),
    "OR": ("u", lambda old, new: old | new), "XOR": ("u", lambda old, new: old ^ new), "INC": ("u", _increment),
    "DEC": ("u", _decrement), "SWAP": ("u", lambda old, new: new),
}  # fmt: skip
_FLOAT: dict[str, tuple[type, _Modify]] = {
    "ADD_F32": (np.float32, _plus), "ADD_F64": (np.float64, _plus), "MIN_F64": (np.float64, np.fmin),
    "MAX_F64": (np.float64, np.fmax), "PK_ADD_F16": (np.uint32, _halves(_add_half)),
    "PK_ADD_BF16": (np.uint32, _halves(_add_bf16)),
}  # fmt: skip


def _turns(addresses: Array) -> Iterator[Array]:
    """Places of an array of addresses in turns, so that none has an address twice; in order for each address."""
    if not len(addresses):
        return
    order = np.argsort(addresses, kind="stable")
    ranked = addresses[order]
    start = np.concatenate([[True], ranked[1:] != ranked[:-1]])
    first = np.maximum.accumulate(np.where(start, np.arange(len(order)), 0))
    turn = np.arange(len(order)) - first
    for number in range(int(turn.max()) + 1):
        yield order[turn == number]


def _modify(
    addresses: Array, data: Array, dtype: type, function: _Modify, load: Callable[[Array], Array],
    store: Callable[[Array, Array], None],
) -> Array:  # fmt: skip
    """Apply one access after the other; returns what each one found: uint8 ``[k, size]``."""
    size = np.dtype(dtype).itemsize
    found = np.empty((len(addresses), size), np.uint8)
    for chosen in _turns(addresses):
        old = load(addresses[chosen])
        found[chosen] = old
        # A comparison has a second operand.
        operand: Array = np.ascontiguousarray(data[chosen]).view(dtype)
        value = function(np.ascontiguousarray(old).view(dtype), operand)
        store(addresses[chosen], np.ascontiguousarray(value.astype(dtype)).view(np.uint8))
    return found


def _compare_and_swap(old: Array, operand: Array) -> Array:
    return np.where(old == operand[:, 1:2], operand[:, 0:1], old)


def _global(dtype: type, function: _Modify, operand_words: int, buffer: bool) -> Builder:
    size = np.dtype(dtype).itemsize
    source = "vdata" if buffer else "data"

    def build(instruction: Instruction, context: Context) -> Execute:
        plain = None if buffer else global_addresses(instruction)
        ranged = BufferAddresses(instruction) if buffer else None
        returns = bool(instruction["sc0"])

        def execute(active: Active) -> None:
            mask = active.active_lanes()
            if ranged is not None:
                places, left = ranged.of(active)
                mask = mask & (left >= size)
            else:
                assert plain is not None
                places = plain(active)
            lanes, memory = Lanes(active, mask), active.batch.memory
            flat = lanes.of(places)
            # A buffer's data register is also where the result goes.
            data = lanes.words(data_register(active, instruction, source), operand_words)
            lanes.guarded(instruction, flat, memory.load, size)
            found = _modify(flat, data, dtype, function, lambda at: memory.load(at, size), memory.store)
            if returns:
                lanes.put_bytes(data_register(active, instruction, "vdata" if buffer else "vdst"), found)

        return execute

    return build


for _segment in ("GLOBAL", "FLAT", "BUFFER"):
    for _suffix, _bits in (("", 32), ("_X2", 64)):
        for _name, (_sign, _function) in _INTEGER.items():
            _dtype = np.dtype(f"{_sign}{_bits // 8}").type
            add([f"{_segment}_ATOMIC_{_name}{_suffix}"], _global(_dtype, _function, _bits // 32, _segment == "BUFFER"))
        _dtype = np.dtype(f"u{_bits // 8}").type
        add(
            [f"{_segment}_ATOMIC_CMPSWAP{_suffix}"],
            _global(_dtype, _compare_and_swap, _bits // 16, _segment == "BUFFER"),
        )
    for _name, (_dtype, _function) in _FLOAT.items():
        _words = np.dtype(_dtype).itemsize // 4
        add([f"{_segment}_ATOMIC_{_name}"], _global(_dtype, _function, _words, _segment == "BUFFER"))


def _local(dtype: type, function: _Modify) -> Builder:
    size = np.dtype(dtype).itemsize

    def build(instruction: Instruction, context: Context) -> Execute:
        constant = instruction["offset1"] << 8 | instruction["offset0"]
        returns = "_RTN" in instruction.name

        def execute(active: Active) -> None:
            lanes, lds = Lanes(active), active.batch.lds
            places = lds_places(instruction, lanes, byte_offsets(lanes, instruction, constant), size)
            lanes.guarded(instruction, places, lds.atomic, size, lanes.wave())
            data = lanes.words(data_register(active, instruction, "data0"), size // 4)
            found = _modify(places, data, dtype, function, lambda at: lds.peek(at, size), lds.put)
            if returns:
                lanes.put_bytes(data_register(active, instruction, "vdst"), found)

        return execute

    return build


_LOCAL: dict[str, tuple[str, _Modify]] = {
    "ADD_{}U": ("u", _plus), "SUB_{}U": ("u", lambda old, new: old - new), "MIN_{}I": ("i", np.minimum),
    "MAX_{}I": ("i", np.maximum), "MIN_{}U": ("u", np.minimum), "MAX_{}U": ("u", np.maximum),
    "AND_{}B": ("u", lambda old, new: old & new), "OR_{}B": ("u", lambda old, new: old | new),
    "XOR_{}B": ("u", lambda old, new: old ^ new), "INC_{}U": ("u", _increment), "DEC_{}U": ("u", _decrement),
}  # fmt: skip
for _bits in (32, 64):
    for _pattern, (_sign, _function) in _LOCAL.items():
        _builder = _local(np.dtype(f"{_sign}{_bits // 8}").type, _function)
        add([f"DS_{_pattern.format('')}{_bits}", f"DS_{_pattern.format('RTN_')}{_bits}"], _builder)
    add([f"DS_WRXCHG_RTN_B{_bits}"], _local(np.dtype(f"u{_bits // 8}").type, lambda old, new: new))
add(["DS_ADD_F32", "DS_ADD_RTN_F32"], _local(np.float32, _plus))
add(["DS_ADD_F64", "DS_ADD_RTN_F64"], _local(np.float64, _plus))
