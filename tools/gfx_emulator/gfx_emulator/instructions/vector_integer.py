# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Vector instructions on integers and bits."""

from __future__ import annotations

import numpy as np

from gfx_emulator import operands
from gfx_emulator.arrays import LANES, Array, whole
from gfx_emulator.decode import Instruction
from gfx_emulator.instructions.scalar import first_one, leading_zeros, reverse_bits
from gfx_emulator.instructions.simple import Row, fill, simple
from gfx_emulator.registers import VCC, Active
from gfx_emulator.registry import Context, Execute, add, implements
from gfx_emulator.vector_forms import Target, source, source_codes, sources

_FIVE, _SIX = np.uint32(31), np.uint32(63)


def _low24(value: Array) -> Array:
    """The low 24 bits, extended by the sign where the type is signed: as 64 bits."""
    if value.dtype == np.int32:
        return (value << np.int32(8) >> np.int32(8)).astype(np.int64)
    return (value & np.uint32(0xFFFFFF)).astype(np.uint64)


def _upper(value: Array) -> Array:
    return value >> value.dtype.type(32)


def _bfe(value: Array, offset: Array, size: Array) -> Array:
    """A bit field of 32 bits; its size is taken modulo 32, so that none has more than 31 bits."""
    offset, size = offset & offset.dtype.type(31), size & size.dtype.type(31)
    if value.dtype == np.int32:
        left = np.where(offset + size > 32, np.uint32(0), np.uint32(32) - offset - size).astype(np.int32)
        right = np.minimum(left + offset.astype(np.int32), 31)
        return np.where(size == 0, np.int32(0), value << left >> right)
    return value >> offset & ((np.uint32(1) << size) - np.uint32(1))


def _perm(first: Array, second: Array, selector: Array) -> Array:
    """V_PERM_B32: each byte of the result is one of the eight bytes of {first, second}, a sign or a constant."""
    if selector.size and (selector == selector.flat[0]).all():
        return _perm_of(first, second, [int(selector.flat[0]) >> 8 * byte & 0xFF for byte in range(4)])
    shape = np.broadcast_shapes(first.shape, second.shape, selector.shape)
    both = np.broadcast_to(first.astype(np.uint64) << np.uint64(32) | second, shape)
    result = np.zeros(shape, np.uint32)
    for byte in range(4):
        choice = selector >> np.uint32(8 * byte) & np.uint32(0xFF)
        plain = (both >> (np.uint64(8) * np.minimum(choice, np.uint32(7)).astype(np.uint64)) & np.uint64(0xFF)).astype(
            np.uint32
        )
        if (choice > 7).any():
            # 8 to 11: the sign of bytes 1, 3, 5 and 7, repeated; 12: zero; beyond: ones.
            signed = np.uint64(16) * (np.clip(choice, 8, 11) - np.uint32(8)).astype(np.uint64) + np.uint64(15)
            sign = (both >> signed & np.uint64(1)).astype(np.uint32) * np.uint32(0xFF)
            special = np.where(choice >= 13, np.uint32(0xFF), np.where(choice == 12, np.uint32(0), sign))
            plain = np.where(choice > 7, special, plain)
        result |= plain << np.uint32(8 * byte)
    return result


def _perm_of(first: Array, second: Array, choices: list[int]) -> Array:
    """The same where every lane chooses alike."""
    result = np.zeros(np.broadcast_shapes(first.shape, second.shape), np.uint32)
    for byte, choice in enumerate(choices):
        target = np.uint32(8 * byte)
        if choice < 8:
            source = first if choice > 3 else second
            result |= (source >> np.uint32(8 * (choice & 3)) & np.uint32(0xFF)) << target
        elif choice < 12:
            source = first if choice > 9 else second
            sign = source >> np.uint32(15 if choice % 2 == 0 else 31) & np.uint32(1)
            result |= sign * np.uint32(0xFF) << target
        elif choice > 12:
            result |= np.uint32(0xFF) << target
    return result


def _alignbit(first: Array, second: Array, shift: Array) -> Array:
    both = first.astype(np.uint64) << np.uint64(32) | second
    return (both >> (shift & _FIVE).astype(np.uint64)).astype(np.uint32)


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _mul_hi(a: Array, b: Array) -> Array:
    wide = np.int64 if a.dtype == np.int32 else np.uint64
    return (a.astype(wide) * b.astype(wide) >> wide(32)).astype(a.dtype)


_LANE_BELOW_LOW = np.array([(1 << min(lane, 32)) - 1 for lane in range(LANES)], np.uint64).astype(np.uint32)
_LANE_BELOW_HIGH = np.array([(1 << max(lane - 32, 0)) - 1 for lane in range(LANES)], np.uint64).astype(np.uint32)


def _count(value: Array) -> Array:
    return np.bitwise_count(value).astype(np.uint32)


_THREE_U, _THREE_I = ("u32",) * 3, ("i32",) * 3
_ROWS: dict[str, Row] = {
    "V_MOV_B32": ("u32", ("u32",), lambda a: a),
    "V_MOV_B64": ("u64", ("u64",), lambda a: a),
    "V_NOT_B32": ("u32", ("u32",), lambda a: ~a),
    "V_BFREV_B32": ("u32", ("u32",), reverse_bits),
    "V_FFBH_U32": ("i32", ("u32",), lambda a: leading_zeros(a, 32)),
    "V_FFBL_B32": ("i32", ("u32",), first_one),
    "V_BCNT_U32_B32": ("u32", ("u32", "u32"), lambda a, b: _count(a) + b),
    "V_MBCNT_LO_U32_B32": ("u32", ("u32", "u32"), lambda a, b: _count(a & _LANE_BELOW_LOW) + b),
    "V_MBCNT_HI_U32_B32": ("u32", ("u32", "u32"), lambda a, b: _count(a & _LANE_BELOW_HIGH) + b),
    "V_AND_B32": ("u32", ("u32", "u32"), lambda a, b: a & b),
    "V_OR_B32": ("u32", ("u32", "u32"), lambda a, b: a | b),
    "V_XOR_B32": ("u32", ("u32", "u32"), lambda a, b: a ^ b),
    "V_XNOR_B32": ("u32", ("u32", "u32"), lambda a, b: ~(a ^ b)),
    "V_LSHRREV_B32": ("u32", ("u32", "u32"), lambda a, b: b >> (a & _FIVE)),
    "V_LSHLREV_B32": ("u32", ("u32", "u32"), lambda a, b: b << (a & _FIVE)),
    "V_ASHRREV_I32": ("i32", ("u32", "i32"), lambda a, b: b >> (a & _FIVE).astype(np.int32)),
    "V_LSHRREV_B64": ("u64", ("u32", "u64"), lambda a, b: b >> (a & _SIX).astype(np.uint64)),
    "V_LSHLREV_B64": ("u64", ("u32", "u64"), lambda a, b: b << (a & _SIX).astype(np.uint64)),
    "V_ASHRREV_I64": ("i64", ("u32", "i64"), lambda a, b: b >> (a & _SIX).astype(np.int64)),
    "V_MIN_I32": ("i32", ("i32", "i32"), np.minimum),
    "V_MAX_I32": ("i32", ("i32", "i32"), np.maximum),
    "V_MIN_U32": ("u32", ("u32", "u32"), np.minimum),
    "V_MAX_U32": ("u32", ("u32", "u32"), np.maximum),
    "V_MUL_LO_U32": ("u32", ("u32", "u32"), lambda a, b: a * b),
    "V_MUL_HI_U32": ("u32", ("u32", "u32"), _mul_hi),
    "V_MUL_HI_I32": ("i32", ("i32", "i32"), _mul_hi),
    "V_MUL_U32_U24": ("u32", ("u32", "u32"), lambda a, b: (_low24(a) * _low24(b)).astype(np.uint32)),
    "V_MUL_I32_I24": ("i32", ("i32", "i32"), lambda a, b: (_low24(a) * _low24(b)).astype(np.int32)),
    "V_MUL_HI_U32_U24": ("u32", ("u32", "u32"), lambda a, b: _upper(_low24(a) * _low24(b)).astype(np.uint32)),
    "V_MUL_HI_I32_I24": ("i32", ("i32", "i32"), lambda a, b: _upper(_low24(a) * _low24(b)).astype(np.int32)),
    "V_MAD_U32_U24": ("u32", _THREE_U, lambda a, b, c: (_low24(a) * _low24(b)).astype(np.uint32) + c),
    "V_MAD_I32_I24": ("i32", _THREE_I, lambda a, b, c: (_low24(a) * _low24(b)).astype(np.int32) + c),
    "V_MAD_U32_U16": ("u32", ("u16", "u16", "u32"), lambda a, b, c: a.astype(np.uint32) * b + c),
    "V_MAD_I32_I16": ("i32", ("i16", "i16", "i32"), lambda a, b, c: a.astype(np.int32) * b + c),
    "V_BFE_U32": ("u32", _THREE_U, _bfe),
    "V_BFE_I32": ("i32", ("i32", "u32", "u32"), _bfe),
    "V_BFI_B32": ("u32", _THREE_U, lambda a, b, c: a & b | ~a & c),
    "V_BFM_B32": ("u32", ("u32", "u32"), lambda a, b: ((np.uint32(1) << (a & _FIVE)) - np.uint32(1)) << (b & _FIVE)),
    "V_ALIGNBIT_B32": ("u32", _THREE_U, _alignbit),
    "V_ALIGNBYTE_B32": ("u32", _THREE_U, lambda a, b, c: _alignbit(a, b, (c & np.uint32(3)) << np.uint32(3))),
    "V_PERM_B32": ("u32", _THREE_U, _perm),
    "V_MIN3_I32": ("i32", _THREE_I, lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "V_MAX3_I32": ("i32", _THREE_I, lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "V_MED3_I32": ("i32", _THREE_I, _median),
    "V_MIN3_U32": ("u32", _THREE_U, lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "V_MAX3_U32": ("u32", _THREE_U, lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "V_MED3_U32": ("u32", _THREE_U, _median),
    "V_XAD_U32": ("u32", _THREE_U, lambda a, b, c: (a ^ b) + c),
    "V_LSHL_ADD_U32": ("u32", _THREE_U, lambda a, b, c: (a << (b & _FIVE)) + c),
    "V_ADD_LSHL_U32": ("u32", _THREE_U, lambda a, b, c: (a + b) << (c & _FIVE)),
    "V_ADD3_U32": ("u32", _THREE_U, lambda a, b, c: a + b + c),
    "V_LSHL_OR_B32": ("u32", _THREE_U, lambda a, b, c: a << (b & _FIVE) | c),
    "V_AND_OR_B32": ("u32", _THREE_U, lambda a, b, c: a & b | c),
    "V_OR3_B32": ("u32", _THREE_U, lambda a, b, c: a | b | c),
    "V_LSHL_ADD_U64": ("u64", ("u64", "u32", "u64"), lambda a, b, c: (a << (b & np.uint32(7)).astype(np.uint64)) + c),
    "V_ADD_U16": ("u16", ("u16", "u16"), lambda a, b: a + b),
    "V_SUB_U16": ("u16", ("u16", "u16"), lambda a, b: a - b),
    "V_SUBREV_U16": ("u16", ("u16", "u16"), lambda a, b: b - a),
    "V_MUL_LO_U16": ("u16", ("u16", "u16"), lambda a, b: a * b),
    "V_LSHLREV_B16": ("u16", ("u16", "u16"), lambda a, b: b << (a & np.uint16(15))),
    "V_LSHRREV_B16": ("u16", ("u16", "u16"), lambda a, b: b >> (a & np.uint16(15))),
    "V_ASHRREV_I16": ("i16", ("u16", "i16"), lambda a, b: b >> (a & np.uint16(15)).astype(np.int16)),
    "V_MAX_U16": ("u16", ("u16", "u16"), np.maximum),
    "V_MIN_U16": ("u16", ("u16", "u16"), np.minimum),
    "V_MAX_I16": ("i16", ("i16", "i16"), np.maximum),
    "V_MIN_I16": ("i16", ("i16", "i16"), np.minimum),
}  # fmt: skip
fill(_ROWS, simple)
#: On GFX9 these alone keep the upper half of the register that they write (LLVM, `zeroesHigh16BitsOfDest`).
add(["V_MAD_U16"], simple("u16", ("u16", "u16", "u16"), lambda a, b, c: a * b + c, keep_upper=True))


@implements("V_ADD_U32", "V_SUB_U32", "V_SUBREV_U32", "V_ADD_I32", "V_SUB_I32")
def _sum(instruction: Instruction, context: Context) -> Execute:
    """Sums and differences; clamping keeps them in the range of their type."""
    kind = instruction.name[-3:].lower()
    reads, target = sources(instruction, (kind, kind)), Target(instruction, kind, clamps=True)
    name, clamps = instruction.name, bool(instruction.get("clmp"))
    limits = np.iinfo(np.uint32 if kind == "u32" else np.int32)

    def execute(active: Active) -> None:
        a, b = (read(active) for read in reads)
        if clamps:
            a, b = a.astype(np.int64), b.astype(np.int64)
        result = a + b if name.startswith("V_ADD") else b - a if "REV" in name else a - b
        target.write(active, np.clip(result, limits.min, limits.max).astype(limits.dtype) if clamps else result)

    return execute


@implements("V_BITOP3_B32", "V_BITOP3_B16")
def _bitop3(instruction: Instruction, context: Context) -> Execute:
    """Any function of three bits: its truth table stands where other instructions have modifiers."""
    kind = "u" + instruction.name[-2:]
    table = instruction["omod"] << 6 | instruction["abs"] << 3 | instruction["neg"]
    plain = Instruction(
        instruction.offset, instruction.size, instruction.name, instruction.form,
        {**instruction.fields, "omod": 0, "abs": 0, "neg": 0},
    )  # fmt: skip
    reads, target = sources(plain, (kind,) * 3), Target(plain, kind)

    def execute(active: Active) -> None:
        a, b, c = (read(active) for read in reads)
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), a.dtype)
        for case in range(8):
            if table >> case & 1:
                result |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
        target.write(active, result)

    return execute


@implements("V_CNDMASK_B32")
def _choose(instruction: Instruction, context: Context) -> Execute:
    codes, target = source_codes(instruction), Target(instruction, "u32")
    # VOP3 has modifiers for the chosen values, which are floats then.
    modified = instruction.get("neg") or instruction.get("abs")
    kind = "f32" if modified else "u32"
    first, second = (source(instruction, index, codes[index], kind) for index in range(2))
    mask = codes[2] if len(codes) > 2 else VCC

    def execute(active: Active) -> None:
        chosen = np.where(active.mask_of(mask), second(active), first(active))
        target.write(active, chosen.view(np.uint32))

    return execute


@implements(
    "V_ADD_CO_U32", "V_SUB_CO_U32", "V_SUBREV_CO_U32", "V_ADDC_CO_U32", "V_SUBB_CO_U32", "V_SUBBREV_CO_U32"
)  # fmt: skip
def _carry(instruction: Instruction, context: Context) -> Execute:
    """Sums and differences with a carry per lane, in VCC or, with VOP3, in scalar registers that are named."""
    codes, target = source_codes(instruction), Target(instruction, "u32")
    first, second = (source(instruction, index, codes[index], "u32") for index in range(2))
    carry_out = instruction.get("sdst", VCC) if instruction.form == "VOP3SD" else VCC
    carry_in = codes[2] if len(codes) > 2 else VCC
    name = instruction.name
    reads_carry = name in ("V_ADDC_CO_U32", "V_SUBB_CO_U32", "V_SUBBREV_CO_U32")

    def execute(active: Active) -> None:
        a, b = first(active).astype(np.int64), second(active).astype(np.int64)
        carry = active.mask_of(carry_in).astype(np.int64) if reads_carry else np.int64(0)
        exact = a + b + carry if name.startswith("V_ADD") else b - a - carry if "REV" in name else a - b - carry
        exact = whole(exact, active.count)
        target.write(active, exact.astype(np.uint32))
        active.set_mask(carry_out, ((exact < 0) | (exact >= 2**32)) & active.active_lanes())

    return execute


@implements("V_MAD_U64_U32", "V_MAD_I64_I32")
def _wide_multiply_add(instruction: Instruction, context: Context) -> Execute:
    """A 64-bit sum of a 32-bit product; its carry goes to scalar registers."""
    kind = instruction.name[6].lower()
    codes, target = source_codes(instruction), Target(instruction, kind + "64")
    first, second = (source(instruction, index, codes[index], kind + "32") for index in range(2))
    third = operands.vector(codes[2], kind + "64", instruction)
    wide, carry_out = np.dtype(np.int64 if kind == "i" else np.uint64), instruction["sdst"]

    def execute(active: Active) -> None:
        product = first(active).astype(wide) * second(active).astype(wide)
        addend = third(active).view(wide)
        total = whole(product + addend, active.count)
        overflow = total < product if kind == "u" else ((product ^ total) & (addend ^ total)) < 0
        target.write(active, total)
        active.set_mask(carry_out, np.broadcast_to(overflow, total.shape) & active.active_lanes())

    return execute
