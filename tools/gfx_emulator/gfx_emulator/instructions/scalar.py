# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scalar instructions: SOP1, SOP2, SOPC, SOPK and loads through the scalar cache (SMEM).

A scalar instruction is one line of a table: types of the result and the operands, the function on NumPy integers of
those types (``[n]``, one number per wave), and how SCC follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gfx_emulator import operands
from gfx_emulator.arrays import Array
from gfx_emulator.decode import Instruction
from gfx_emulator.errors import NotImplementedInstruction
from gfx_emulator.registers import EXEC, Active
from gfx_emulator.registry import Builder, Context, Execute, add, implements

Function = Callable[..., Any]
_DTYPES = {"u32": np.uint32, "i32": np.int32, "u64": np.uint64, "i64": np.int64}


def typed(read: operands.Reader, kind: str) -> operands.Reader:
    """A reader of bits as one of values."""
    dtype = _DTYPES[kind]
    if kind[0] == "u":
        return read
    return lambda active: read(active).view(dtype)


def bits(value: Any, kind: str) -> Array:
    return np.asarray(value).astype(_DTYPES["u" + kind[1:]], copy=False)


def write(active: Active, code: int, value: Array, kind: str) -> None:
    if kind.endswith("64"):
        active.set_s64(code, bits(value, kind))
    else:
        active.set_s(code, bits(value, kind))


def _simple(result: str, kinds: tuple[str, ...], function: Function, scc: str | Function | None) -> Builder:
    """A builder of SOP1, SOP2 and SOPK instructions with ordinary operands.

    Args:
        scc: ``nonzero`` where SCC is whether the result is not zero, a function of the operands and the result, or None
            where SCC stays.
    """

    def build(instruction: Instruction, context: Context) -> Execute:
        codes = [instruction[name] for name in ("ssrc0", "ssrc1") if name in instruction.fields]
        reads = [typed(operands.scalar(code, kind, instruction), kind) for code, kind in zip(codes, kinds)]
        target = instruction["sdst"]

        def execute(active: Active) -> None:
            values = [read(active) for read in reads]
            value = function(*values)
            if scc == "nonzero":
                active.set_scc(value != 0)
            elif callable(scc):
                active.set_scc(scc(*values, value))
            write(active, target, value, result)

        return execute

    return build


def _wide(value: Array) -> Array:
    return value.astype(np.int64)


def _overflow(value: Array) -> Array:
    """Whether an exact sum (int64) is no int32."""
    return np.asarray((value < -(2**31)) | (value >= 2**31))


def _shift_mask(value: Array, width: int) -> Array:
    return value & value.dtype.type(width - 1)


def _bfe(value: Array, control: Array, width: int, signed: bool) -> Array:
    """A bit field: offset in the control's low bits, size in bits 22:16; a size beyond the width takes what is left."""
    offset = (control & np.uint32(width - 1)).astype(np.uint64)
    size = np.minimum(control >> np.uint32(16) & np.uint32(0x7F), np.uint32(width)).astype(np.uint64)
    shifted = (value.astype(np.int64) if signed else value.astype(np.uint64)) >> offset.astype(
        np.int64 if signed else np.uint64
    )
    words = np.asarray(shifted).view(np.uint64)
    mask = np.where(size >= 64, ~np.uint64(0), (np.uint64(1) << np.minimum(size, np.uint64(63))) - np.uint64(1))
    field = words & mask
    if signed:
        top = np.where(size > 0, np.uint64(1) << (np.maximum(size, np.uint64(1)) - np.uint64(1)), np.uint64(0))
        field = (field ^ top) - top
    return field


def _count_ones(value: Array) -> Array:
    return np.bitwise_count(value).astype(np.int32)


def first_one(value: Array) -> Array:
    """The lowest set bit, -1 where there is none: int32."""
    low = value & (~value + value.dtype.type(1))
    place = np.bitwise_count(low - value.dtype.type(1)).astype(np.int32)
    return np.where(value == 0, np.int32(-1), place)


def leading_zeros(value: Array, width: int) -> Array:
    """Zeros before the highest set bit, -1 where there is none: int32."""
    filled = value.copy() if isinstance(value, np.ndarray) else value
    for shift in (1, 2, 4, 8, 16, 32)[: 5 if width == 32 else 6]:
        filled = filled | filled >> value.dtype.type(shift)
    count = width - np.bitwise_count(filled).astype(np.int32)
    return np.where(value == 0, np.int32(-1), count)


def reverse_bits(value: Array) -> Array:
    """The bits of uint32 in the opposite order."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        value = (value >> np.uint32(shift) & np.uint32(mask)) | ((value & np.uint32(mask)) << np.uint32(shift))
    return value >> np.uint32(16) | value << np.uint32(16)


_BITWISE: dict[str, Function] = {
    "AND": lambda a, b: a & b, "OR": lambda a, b: a | b, "XOR": lambda a, b: a ^ b, "ANDN2": lambda a, b: a & ~b,
    "ORN2": lambda a, b: a | ~b, "NAND": lambda a, b: ~(a & b), "NOR": lambda a, b: ~(a | b),
    "XNOR": lambda a, b: ~(a ^ b),
}  # fmt: skip

_TABLE: dict[str, tuple[str, tuple[str, ...], Function, str | Function | None]] = {
    "S_MOV_B32": ("u32", ("u32",), lambda a: a, None),
    "S_MOV_B64": ("u64", ("u64",), lambda a: a, None),
    "S_NOT_B32": ("u32", ("u32",), lambda a: ~a, "nonzero"),
    "S_NOT_B64": ("u64", ("u64",), lambda a: ~a, "nonzero"),
    "S_BREV_B32": ("u32", ("u32",), reverse_bits, None),
    "S_BCNT1_I32_B32": ("i32", ("u32",), _count_ones, "nonzero"),
    "S_BCNT1_I32_B64": ("i32", ("u64",), _count_ones, "nonzero"),
    "S_FF1_I32_B32": ("i32", ("u32",), first_one, None),
    "S_FF1_I32_B64": ("i32", ("u64",), first_one, None),
    "S_FLBIT_I32_B32": ("i32", ("u32",), lambda a: leading_zeros(a, 32), None),
    "S_FLBIT_I32_B64": ("i32", ("u64",), lambda a: leading_zeros(a, 64), None),
    "S_SEXT_I32_I8": ("i32", ("i32",), lambda a: a.astype(np.int8).astype(np.int32), None),
    "S_SEXT_I32_I16": ("i32", ("i32",), lambda a: a.astype(np.int16).astype(np.int32), None),
    "S_ABS_I32": ("i32", ("i32",), np.abs, "nonzero"),
    "S_ADD_U32": ("u32", ("u32", "u32"), lambda a, b: a + b, lambda a, b, r: r < a),
    "S_SUB_U32": ("u32", ("u32", "u32"), lambda a, b: a - b, lambda a, b, r: b > a),
    "S_ADD_I32": ("i32", ("i32", "i32"), lambda a, b: a + b, lambda a, b, r: _overflow(_wide(a) + _wide(b))),
    "S_SUB_I32": ("i32", ("i32", "i32"), lambda a, b: a - b, lambda a, b, r: _overflow(_wide(a) - _wide(b))),
    "S_MIN_I32": ("i32", ("i32", "i32"), np.minimum, lambda a, b, r: a < b),
    "S_MIN_U32": ("u32", ("u32", "u32"), np.minimum, lambda a, b, r: a < b),
    "S_MAX_I32": ("i32", ("i32", "i32"), np.maximum, lambda a, b, r: a >= b),
    "S_MAX_U32": ("u32", ("u32", "u32"), np.maximum, lambda a, b, r: a >= b),
    "S_ABSDIFF_I32": ("i32", ("i32", "i32"), lambda a, b: np.abs(a - b), "nonzero"),
    "S_MUL_I32": ("i32", ("i32", "i32"), lambda a, b: a * b, None),
    "S_MUL_HI_U32": ("u32", ("u32", "u32"), lambda a, b: a.astype(np.uint64) * b >> np.uint64(32), None),
    "S_MUL_HI_I32": ("i32", ("i32", "i32"), lambda a, b: a.astype(np.int64) * b >> np.int64(32), None),
    "S_LSHL_B32": ("u32", ("u32", "u32"), lambda a, b: a << _shift_mask(b, 32), "nonzero"),
    "S_LSHL_B64": ("u64", ("u64", "u32"), lambda a, b: a << _shift_mask(b, 64).astype(np.uint64), "nonzero"),
    "S_LSHR_B32": ("u32", ("u32", "u32"), lambda a, b: a >> _shift_mask(b, 32), "nonzero"),
    "S_LSHR_B64": ("u64", ("u64", "u32"), lambda a, b: a >> _shift_mask(b, 64).astype(np.uint64), "nonzero"),
    "S_ASHR_I32": ("i32", ("i32", "u32"), lambda a, b: a >> _shift_mask(b, 32).astype(np.int32), "nonzero"),
    "S_ASHR_I64": ("i64", ("i64", "u32"), lambda a, b: a >> _shift_mask(b, 64).astype(np.int64), "nonzero"),
    "S_BFM_B32": ("u32", ("u32", "u32"),
                  lambda a, b: ((np.uint32(1) << _shift_mask(a, 32)) - np.uint32(1)) << _shift_mask(b, 32), None),
    "S_BFE_U32": ("u32", ("u32", "u32"), lambda a, b: _bfe(a, b, 32, False), "nonzero"),
    "S_BFE_I32": ("i32", ("i32", "u32"), lambda a, b: _bfe(a, b, 32, True), "nonzero"),
    "S_BFE_U64": ("u64", ("u64", "u32"), lambda a, b: _bfe(a, b, 64, False), "nonzero"),
    "S_BFE_I64": ("i64", ("i64", "u32"), lambda a, b: _bfe(a, b, 64, True), "nonzero"),
    "S_PACK_LL_B32_B16": ("u32", ("u32", "u32"), lambda a, b: a & np.uint32(0xFFFF) | b << np.uint32(16), None),
    "S_PACK_LH_B32_B16": ("u32", ("u32", "u32"), lambda a, b: a & np.uint32(0xFFFF) | b & np.uint32(0xFFFF0000), None),
    "S_PACK_HH_B32_B16": ("u32", ("u32", "u32"), lambda a, b: a >> np.uint32(16) | b & np.uint32(0xFFFF0000), None),
}  # fmt: skip
for _shift in (1, 2, 3, 4):
    _TABLE[f"S_LSHL{_shift}_ADD_U32"] = (
        "u32", ("u32", "u32"), lambda a, b, s=_shift: (a << np.uint32(s)) + b,
        lambda a, b, r, s=_shift: (a.astype(np.uint64) << np.uint64(s)) + b >= 2**32,
    )  # fmt: skip
for _name, _function in _BITWISE.items():
    for _width in (32, 64):
        _TABLE[f"S_{_name}_B{_width}"] = (f"u{_width}", (f"u{_width}",) * 2, _function, "nonzero")
for _name, (_result, _kinds, _function, _scc) in _TABLE.items():
    add([_name], _simple(_result, _kinds, _function, _scc))

_COMPARISONS: dict[str, Function] = {
    "EQ": lambda a, b: a == b, "LG": lambda a, b: a != b, "GT": lambda a, b: a > b, "GE": lambda a, b: a >= b,
    "LT": lambda a, b: a < b, "LE": lambda a, b: a <= b,
    "BITCMP0": lambda a, b: (a >> _shift_mask(b, 8 * a.dtype.itemsize).astype(a.dtype) & a.dtype.type(1)) == 0,
    "BITCMP1": lambda a, b: (a >> _shift_mask(b, 8 * a.dtype.itemsize).astype(a.dtype) & a.dtype.type(1)) == 1,
}  # fmt: skip


def _comparison(function: Function, kinds: tuple[str, str]) -> Builder:
    def build(instruction: Instruction, context: Context) -> Execute:
        first = typed(operands.scalar(instruction["ssrc0"], kinds[0], instruction), kinds[0])
        second = typed(operands.scalar(instruction["ssrc1"], kinds[1], instruction), kinds[1])
        return lambda active: active.set_scc(function(first(active), second(active)))

    return build


def _comparison_with_constant(function: Function, kind: str) -> Builder:
    """SOPK: the register named as the target with the 16-bit constant, extended by the type's sign."""

    def build(instruction: Instruction, context: Context) -> Execute:
        held = np.asarray(_simm(instruction) if kind == "i32" else instruction["simm16"], _DTYPES[kind])
        read = typed(operands.scalar(instruction["sdst"], kind, instruction), kind)
        return lambda active: active.set_scc(function(read(active), held))

    return build


for _name in ("EQ", "LG", "GT", "GE", "LT", "LE"):
    for _kind in ("i32", "u32"):
        add([f"S_CMP_{_name}_{_kind.upper()}"], _comparison(_COMPARISONS[_name], (_kind, _kind)))
        add([f"S_CMPK_{_name}_{_kind.upper()}"], _comparison_with_constant(_COMPARISONS[_name], _kind))
for _name in ("EQ", "LG"):
    add([f"S_CMP_{_name}_U64"], _comparison(_COMPARISONS[_name], ("u64", "u64")))
for _name in ("BITCMP0", "BITCMP1"):
    for _width in (32, 64):
        add([f"S_{_name}_B{_width}"], _comparison(_COMPARISONS[_name], (f"u{_width}", "u32")))


def _simm(instruction: Instruction) -> int:
    value = instruction["simm16"]
    return value - 0x10000 if value & 0x8000 else value


@implements("S_ADDC_U32", "S_SUBB_U32")
def _carry(instruction: Instruction, context: Context) -> Execute:
    first = operands.scalar(instruction["ssrc0"], "u32", instruction)
    second = operands.scalar(instruction["ssrc1"], "u32", instruction)
    add_up, target = instruction.name == "S_ADDC_U32", instruction["sdst"]

    def execute(active: Active) -> None:
        a, b = first(active).astype(np.int64), second(active).astype(np.int64)
        exact = a + b + active.scc() if add_up else a - b - active.scc()
        active.set_scc((exact < 0) | (exact >= 2**32))
        active.set_s(target, exact.astype(np.uint32))

    return execute


@implements("S_CSELECT_B32", "S_CSELECT_B64")
def _select(instruction: Instruction, context: Context) -> Execute:
    kind = "u" + instruction.name[-2:]
    first = operands.scalar(instruction["ssrc0"], kind, instruction)
    second = operands.scalar(instruction["ssrc1"], kind, instruction)
    target = instruction["sdst"]
    return lambda active: write(active, target, np.where(active.scc(), first(active), second(active)), kind)


@implements("S_CMOV_B32", "S_CMOV_B64")
def _conditional_move(instruction: Instruction, context: Context) -> Execute:
    kind, target = "u" + instruction.name[-2:], instruction["sdst"]
    read = operands.scalar(instruction["ssrc0"], kind, instruction)
    old = operands.scalar(target, kind, instruction)
    return lambda active: write(active, target, np.where(active.scc(), read(active), old(active)), kind)


@implements("S_MOVK_I32")
def _move_constant(instruction: Instruction, context: Context) -> Execute:
    value, target = np.asarray(_simm(instruction), np.int32).view(np.uint32), instruction["sdst"]
    return lambda active: active.set_s(target, value)


@implements("S_ADDK_I32", "S_MULK_I32")
def _with_constant(instruction: Instruction, context: Context) -> Execute:
    value, target = np.int64(_simm(instruction)), instruction["sdst"]
    adds = instruction.name == "S_ADDK_I32"

    def execute(active: Active) -> None:
        old = active.s(target).view(np.int32).astype(np.int64)
        exact = old + value if adds else old * value
        if adds:
            active.set_scc(_overflow(exact))
        active.set_s(target, exact.astype(np.uint32))

    return execute


@implements("S_BITSET0_B32", "S_BITSET1_B32")
def _bitset(instruction: Instruction, context: Context) -> Execute:
    read, target = operands.scalar(instruction["ssrc0"], "u32", instruction), instruction["sdst"]
    sets = instruction.name == "S_BITSET1_B32"

    def execute(active: Active) -> None:
        bit = np.uint32(1) << _shift_mask(read(active), 32)
        active.set_s(target, active.s(target) | bit if sets else active.s(target) & ~bit)

    return execute


def _save_exec(function: Function) -> Builder:
    def build(instruction: Instruction, context: Context) -> Execute:
        read, target = operands.scalar(instruction["ssrc0"], "u64", instruction), instruction["sdst"]

        def execute(active: Active) -> None:
            before = active.s64(EXEC)
            value = function(read(active), before)
            active.set_s64(target, before)
            active.set_s64(EXEC, np.broadcast_to(value, before.shape))
            active.set_scc(value != 0)

        return execute

    return build


for _name, _function in _BITWISE.items():
    add([f"S_{_name}_SAVEEXEC_B64"], _save_exec(_function))
add(["S_ANDN1_SAVEEXEC_B64"], _save_exec(lambda a, b: ~a & b))
add(["S_ORN1_SAVEEXEC_B64"], _save_exec(lambda a, b: ~a | b))


@implements("S_LOAD_DWORD", "S_LOAD_DWORDX2", "S_LOAD_DWORDX4", "S_LOAD_DWORDX8", "S_LOAD_DWORDX16")
def _load(instruction: Instruction, context: Context) -> Execute:
    count = int(instruction.name.removeprefix("S_LOAD_DWORD").removeprefix("X") or 1)
    base, target = instruction["sbase"], instruction["sdata"]
    constant = (instruction["offset"] ^ 0x100000) - 0x100000 if instruction["imm"] else 0
    extra = instruction["soffset"] if instruction["soffset_en"] else None
    if not instruction["imm"] and extra is None:
        # Without either flag the offset is a register, whose number stands in the offset's low bits.
        extra = instruction["offset"] & 0x7F

    def execute(active: Active) -> None:
        addresses = active.s64(base).astype(np.int64) + constant
        if extra is not None:
            addresses += operands.scalar(extra, "u32", instruction)(active).astype(np.int64)
        # The two lowest bits of an address are ignored.
        words = active.batch.memory.load(addresses & ~np.int64(3), 4 * count).view(np.uint32)
        for word in range(count):
            active.set_s(target + word, words[:, word])

    return execute


#: Of MODE, from the lowest: rounding of fp32, then of fp16 and fp64, two bits each.
_ROUNDING_BITS = 4


@implements("S_SETREG_IMM32_B32", "S_SETREG_B32")
def _set_register(instruction: Instruction, context: Context) -> Execute:
    place = instruction["simm16"]
    register, offset, size = place & 0x3F, place >> 6 & 0x1F, (place >> 11 & 0x1F) + 1
    if register == 1 and offset + size <= _ROUNDING_BITS and instruction.get("literal", 1) == 0:
        # Round to nearest even, which it is all the time: LLVM says so once more where it lost track of MODE.
        return lambda active: None
    # Of MODE (1) only the bit FP16_OVFL can be changed: the others are taken from the kernel descriptor once.
    if register != 1 or (offset, size) != (23, 1):
        raise NotImplementedInstruction(
            f"{instruction}: hardware register {register}, bits {offset} to {offset + size - 1}"
        )
    if instruction.name == "S_SETREG_IMM32_B32":
        value = np.asarray(instruction["literal"], np.uint32)
        read: operands.Reader = lambda active: value  # noqa: E731
    else:
        read = operands.scalar(instruction["sdst"], "u32", instruction)

    def execute(active: Active) -> None:
        bit = (read(active) & np.uint32(1)) << np.uint32(offset)
        mode = active.batch.mode[active.rows]
        active.batch.mode[active.rows] = mode & ~np.uint32(1 << offset) | bit

    return execute
