# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Packed instructions (VOP3P): two results from two halves of the operands, and short dot products.

``op_sel`` says which half of an operand the lower result takes, ``op_sel_hi`` which the upper one; ``neg`` and
``neg_hi`` change signs. A half is 16 bits of a register, or, of packed fp32, one register of a pair.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx_emulator import floats, operands
from gfx_emulator.arrays import Array, whole
from gfx_emulator.decode import Instruction
from gfx_emulator.errors import NotImplementedInstruction
from gfx_emulator.instructions.simple import Function, computed
from gfx_emulator.operands import VGPR, Reader
from gfx_emulator.registers import Active
from gfx_emulator.registry import Builder, Context, Execute, add, implements


def _modifiers(instruction: Instruction) -> tuple[tuple[int, int], tuple[int, int]]:
    """((op_sel, neg) of the lower result, those of the upper one), a bit for each operand."""
    upper = instruction["opsel_hi"] | instruction["opsel_hi2"] << 2
    return (instruction["opsel"], instruction["neg"]), (upper, instruction["neg_hi"])


def _register(instruction: Instruction, index: int, upper: int) -> Reader:
    """One register of the pair that an operand of packed fp32 is; a constant is in both (compilers write it with either
    half selected)."""
    code = instruction[f"src{index}"]
    constant = operands.constant(code, "f32", instruction) is not None
    return operands.vector(code if constant else code + upper, "f32", instruction)


def _packed_32(function: Function, count: int) -> Builder:
    def build(instruction: Instruction, context: Context) -> Execute:
        target, flush = instruction["vdst"] - VGPR, context.flush_32
        halves = [
            [(_register(instruction, i, select >> i & 1), bool(negative >> i & 1)) for i in range(count)]
            for select, negative in _modifiers(instruction)
        ]

        def execute(active: Active) -> None:
            results = []
            for half in halves:
                values = [read(active).view(np.float32) for read, _ in half]
                values = [-value if negative else value for value, (_, negative) in zip(values, half)]
                results.append(computed(function, values, "f32", flush).view(np.uint32))
            for place, value in enumerate(results):
                active.set_v(target + place, value)

        return execute

    return build


add(["V_PK_ADD_F32"], _packed_32(lambda a, b: a + b, 2))
add(["V_PK_MUL_F32"], _packed_32(lambda a, b: a * b, 2))
add(["V_PK_FMA_F32"], _packed_32(floats.fused_32, 3))


@implements("V_PK_MOV_B32")
def _move(instruction: Instruction, context: Context) -> Execute:
    """The register of operand 0 that op_sel names, and that of operand 1."""
    select, target = instruction["opsel"], instruction["vdst"] - VGPR
    first = _register(instruction, 0, select & 1)
    second = _register(instruction, 1, select >> 1 & 1)

    def execute(active: Active) -> None:
        values = [whole(read(active), active.count).copy() for read in (first, second)]
        active.set_v(target, values[0])
        active.set_v(target + 1, values[1])

    return execute


@implements("V_MAD_MIX_F32", "V_MAD_MIXLO_F16", "V_MAD_MIXHI_F16")
def _mixed(instruction: Instruction, context: Context) -> Execute:
    """Fused multiply-adds of fp32 and fp16 operands (LLVM's V_FMA_MIX): op_sel_hi says which operand is a half, op_sel
    which half; neg_hi stands for absolute values."""
    (select, negative), (halves, absolute) = _modifiers(instruction)
    target, name = instruction["vdst"] - VGPR, instruction.name
    if instruction["clmp"]:
        raise NotImplementedInstruction(f"{instruction}: clamping")
    reads = []
    for index in range(3):
        is_half = bool(halves >> index & 1)
        read = operands.vector(instruction[f"src{index}"], "f16" if is_half else "f32", instruction)
        reads.append((_half(read, select >> index & 1) if is_half else read, is_half, 1 << index))

    def execute(active: Active) -> None:
        values = []
        for read, is_half, bit in reads:
            value = read(active).view(np.float16).astype(np.float32) if is_half else read(active).view(np.float32)
            value = np.abs(value) if absolute & bit else value
            values.append(-value if negative & bit else value)
        if name == "V_MAD_MIX_F32":
            active.set_v(target, computed(floats.fused_32, values, "f32", context.flush_32).view(np.uint32))
            return
        result = computed(floats.fused_odd, values, "f16", False).view(np.uint16).astype(np.uint32)
        old, upper = active.v(target), name == "V_MAD_MIXHI_F16"
        kept = old & np.uint32(0xFFFF if upper else 0xFFFF0000)
        active.set_v(target, kept | result << np.uint32(16 if upper else 0))

    return execute


def _half(read: Reader, upper: int) -> Reader:
    shift = np.uint32(16 * upper)
    return lambda active: (read(active) >> shift).astype(np.uint16)


def _packed_16(kind: str, function_of: Callable[[Context], Function], count: int) -> Builder:
    """Halves of 16 bits: ``u16``, ``i16`` or ``f16``.

    Args:
        function_of: (context) -> a function of `count` arrays of that type, which gives another.
    """
    dtype = {"u16": np.uint16, "i16": np.int16, "f16": np.float16}[kind]

    def build(instruction: Instruction, context: Context) -> Execute:
        if instruction["clmp"]:
            raise NotImplementedInstruction(f"{instruction}: clamping packed halves")
        target, function = instruction["vdst"] - VGPR, function_of(context)
        whole = [operands.vector(instruction[f"src{i}"], kind, instruction) for i in range(count)]
        halves = [
            [(_half(whole[i], select >> i & 1), kind == "f16" and bool(negative >> i & 1)) for i in range(count)]
            for select, negative in _modifiers(instruction)
        ]

        def execute(active: Active) -> None:
            words = []
            for half in halves:
                values = [read(active).view(dtype) for read, _ in half]
                values = [-value if negative else value for value, (_, negative) in zip(values, half)]
                words.append(np.asarray(function(*values)).view(np.uint16).astype(np.uint32))
            active.set_v(target, words[0] | words[1] << np.uint32(16))

        return execute

    return build


def _rounded(function: Function) -> Function:
    return lambda *values: computed(function, list(values), "f16", False)


def _always(function: Function) -> Callable[[Context], Function]:
    return lambda context: function


def _ordered(largest: bool) -> Callable[[Context], Function]:
    """A minimum or maximum: MODE says what it gives for NaN."""
    return lambda context: lambda a, b: floats.minimum(a, b, largest, context.ieee)


def _shift_count(value: Array) -> Array:
    return value & value.dtype.type(15)


for _name, _kind, _function, _count in (
    ("V_PK_ADD_F16", "f16", lambda a, b: a + b, 2),
    ("V_PK_MUL_F16", "f16", lambda a, b: a * b, 2),
    ("V_PK_FMA_F16", "f16", floats.fused_odd, 3),
    ("V_PK_ADD_U16", "u16", lambda a, b: a + b, 2),
    ("V_PK_SUB_U16", "u16", lambda a, b: a - b, 2),
    ("V_PK_ADD_I16", "i16", lambda a, b: a + b, 2),
    ("V_PK_SUB_I16", "i16", lambda a, b: a - b, 2),
    ("V_PK_MUL_LO_U16", "u16", lambda a, b: a * b, 2),
    ("V_PK_MAD_U16", "u16", lambda a, b, c: a * b + c, 3),
    ("V_PK_MAD_I16", "i16", lambda a, b, c: a * b + c, 3),
    ("V_PK_MIN_U16", "u16", np.minimum, 2),
    ("V_PK_MAX_U16", "u16", np.maximum, 2),
    ("V_PK_MIN_I16", "i16", np.minimum, 2),
    ("V_PK_MAX_I16", "i16", np.maximum, 2),
    ("V_PK_LSHLREV_B16", "u16", lambda a, b: b << _shift_count(a), 2),
    ("V_PK_LSHRREV_B16", "u16", lambda a, b: b >> _shift_count(a), 2),
    ("V_PK_ASHRREV_I16", "i16", lambda a, b: b >> _shift_count(a), 2),
):
    add([_name], _packed_16(_kind, _always(_rounded(_function) if _kind == "f16" else _function), _count))
add(["V_PK_MIN_F16"], _packed_16("f16", _ordered(largest=False), 2))
add(["V_PK_MAX_F16"], _packed_16("f16", _ordered(largest=True), 2))
