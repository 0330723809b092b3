# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Conversions between number formats, FP8 in the chip's encoding included."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx_emulator import floats, fp8
from gfx_emulator.arrays import Array, whole
from gfx_emulator.decode import Instruction
from gfx_emulator.errors import NotImplementedInstruction
from gfx_emulator.instructions.simple import Row, arithmetic, fill, simple
from gfx_emulator.operands import VGPR
from gfx_emulator.registers import MODE_FP16_OVFL, Active
from gfx_emulator.registry import Builder, Context, Execute, add, implements
from gfx_emulator.vector_forms import Target, source, source_codes, sources


def _to_integer(
    lowest: int, highest: int, dtype: type, rounding: Callable[[Array], Array] = np.trunc
) -> Callable[[Array], Array]:
    """Floats to integers: saturated, NaN as zero."""

    def convert(value: Array) -> Array:
        whole = rounding(value.astype(np.float64))
        kept = np.where(np.isnan(whole), 0.0, np.clip(whole, lowest, highest))
        return np.asarray(kept.astype(dtype))

    return convert


def _byte(number: int) -> Callable[[Array], Array]:
    return lambda value: (value >> np.uint32(8 * number) & np.uint32(0xFF)).astype(np.float32)


def _floor_half_up(value: Array) -> Array:
    return np.floor(value + 0.5)


def _pair(low: Array, high: Array) -> Array:
    """Two 16-bit halves (uint16) as uint32."""
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def _toward_zero_16(value: Array) -> Array:
    """float32 to fp16's bits, rounded toward zero; Inf only from Inf."""
    bits = floats.half(value)
    back = bits.view(np.float16).astype(np.float32)
    too_far = (np.abs(back) > np.abs(value)) & np.isfinite(value)
    return np.where(too_far, bits - np.uint16(1), bits)


_INTEGERS: dict[str, Row] = {
    "V_CVT_U32_F32": ("u32", ("f32",), _to_integer(0, 2**32 - 1, np.uint32)),
    "V_CVT_I32_F32": ("i32", ("f32",), _to_integer(-(2**31), 2**31 - 1, np.int32)),
    "V_CVT_RPI_I32_F32": ("i32", ("f32",), _to_integer(-(2**31), 2**31 - 1, np.int32, _floor_half_up)),
    "V_CVT_FLR_I32_F32": ("i32", ("f32",), _to_integer(-(2**31), 2**31 - 1, np.int32, np.floor)),
    "V_CVT_U32_F64": ("u32", ("f64",), _to_integer(0, 2**32 - 1, np.uint32)),
    "V_CVT_I32_F64": ("i32", ("f64",), _to_integer(-(2**31), 2**31 - 1, np.int32)),
    "V_CVT_U16_F16": ("u16", ("f16",), _to_integer(0, 2**16 - 1, np.uint16)),
    "V_CVT_I16_F16": ("i16", ("f16",), _to_integer(-(2**15), 2**15 - 1, np.int16)),
    "V_CVT_F32_U32": ("f32", ("u32",), lambda a: a.astype(np.float32)),
    "V_CVT_F32_I32": ("f32", ("i32",), lambda a: a.astype(np.float32)),
    "V_CVT_F64_U32": ("f64", ("u32",), lambda a: a.astype(np.float64)),
    "V_CVT_F64_I32": ("f64", ("i32",), lambda a: a.astype(np.float64)),
    "V_CVT_F16_U16": ("f16", ("u16",), lambda a: a.astype(np.float16)),
    "V_CVT_F16_I16": ("f16", ("i16",), lambda a: a.astype(np.float16)),
    **{f"V_CVT_F32_UBYTE{i}": ("f32", ("u32",), _byte(i)) for i in range(4)},
    "V_CVT_PK_U16_U32": ("u32", ("u32", "u32"), lambda a, b: _pair(np.minimum(a, 0xFFFF), np.minimum(b, 0xFFFF))),
    "V_CVT_PK_BF16_F32": ("u32", ("f32", "f32"), lambda a, b: _pair(floats.bf16(a), floats.bf16(b))),
    "V_CVT_PK_F16_F32": ("u32", ("f32", "f32"), lambda a, b: _pair(floats.half(a), floats.half(b))),
    "V_CVT_PKRTZ_F16_F32": ("u32", ("f32", "f32"), lambda a, b: _pair(_toward_zero_16(a), _toward_zero_16(b))),
    "V_CVT_F32_BF16": ("f32", ("u16",), floats.from_bf16),
    "V_PACK_B32_F16": ("u32", ("u16", "u16"), _pair),
}  # fmt: skip
fill(_INTEGERS, simple)
_FLOATS: dict[str, Row] = {
    "V_CVT_F32_F16": ("f32", ("f16",), lambda a: a.astype(np.float32)),
    "V_CVT_F64_F32": ("f64", ("f32",), lambda a: a.astype(np.float64)),
    "V_CVT_F32_F64": ("f32", ("f64",), lambda a: a.astype(np.float32)),
}
fill(_FLOATS, arithmetic)


@implements("V_CVT_F16_F32")
def _narrow(instruction: Instruction, context: Context) -> Execute:
    """To fp16; FP16_OVFL makes finite numbers saturate."""
    (read,), target = sources(instruction, ("f32",)), Target(instruction, "f16")

    def execute(active: Active) -> None:
        value = read(active)
        limited = np.where(np.isfinite(value), np.clip(value, -65504, 65504), value).astype(np.float32)
        target.write(active, floats.half(np.where(_saturates(active), limited, value)).view(np.float16))

    return execute


def _saturates(active: Active) -> Array:
    """MODE.FP16_OVFL: bool ``[n, 1]``."""
    return (active.batch.mode[active.rows] & np.uint32(MODE_FP16_OVFL) != 0)[:, None]


def _scale(value: Array) -> Array:
    """2 to the exponent of float32 scales, as float64: the significand is ignored."""
    return np.exp2((floats.exponent(value) - 127).astype(np.float64))


def _write_part(instruction: Instruction, width: int, place: int) -> Callable[[Active, Array], None]:
    """Writes `width` bits of the target at `place`; its other bits stay."""
    number = instruction["vdst"] - VGPR
    keep = np.uint32(~(((1 << width) - 1) << width * place) & 0xFFFFFFFF)

    def write(active: Active, value: Array) -> None:
        active.set_v(number, active.v(number) & keep | value << np.uint32(width * place))

    return write


def _encode_pair(kind: str, scaled: bool) -> Builder:
    """V_CVT_PK_FP8_F32 and its relative with a scale, which divides: two codes to one half of the target."""

    def build(instruction: Instruction, context: Context) -> Execute:
        code, codes = fp8.encoding(context.arch, kind), source_codes(instruction)
        first, second = (source(_without_opsel(instruction), i, codes[i], "f32") for i in range(2))
        scale = source(_without_opsel(instruction), 2, codes[2], "f32") if scaled else None
        write = _write_part(instruction, 16, instruction["opsel"] >> 3 & 1)

        def execute(active: Active) -> None:
            divisor = _scale(scale(active)) if scale is not None else None
            low, high = (read(active) if divisor is None else read(active) / divisor for read in (first, second))
            saturates = _saturates(active)
            write(
                active,
                code.encode(low, saturates).astype(np.uint32)
                | code.encode(high, saturates).astype(np.uint32) << np.uint32(8),
            )

        return execute

    return build


def _without_opsel(instruction: Instruction) -> Instruction:
    """For operands of which op_sel selects no half."""
    return Instruction(
        instruction.offset, instruction.size, instruction.name, instruction.form, {**instruction.fields, "opsel": 0}
    )


def _encode_stochastic(kind: str) -> Builder:
    """V_CVT_SR_FP8_F32: random bits are added below the code's last place, then what is below is cut."""

    def build(instruction: Instruction, context: Context) -> Execute:
        code, codes = fp8.encoding(context.arch, kind), source_codes(instruction)
        value = source(_without_opsel(instruction), 0, codes[0], "f32")
        random = source(_without_opsel(instruction), 1, codes[1], "u32")
        write = _write_part(instruction, 8, instruction["opsel"] >> 2 & 3)
        dropped = 23 - code.mantissa

        def execute(active: Active) -> None:
            given = value(active)
            bits = given.view(np.uint32) + (random(active) >> np.uint32(32 - dropped))
            cut = (bits & np.uint32(~((1 << dropped) - 1) & 0xFFFFFFFF)).view(np.float32)
            if (np.isfinite(given) & (np.abs(given) < 2.0 ** (1 - code.bias))).any():
                raise NotImplementedInstruction(f"{instruction.name} of a number below the encoding's normal range")
            write(active, code.encode(np.where(np.isfinite(given), cut, given), _saturates(active)).astype(np.uint32))

        return execute

    return build


def _decode_one(kind: str) -> Builder:
    """V_CVT_F32_FP8: the byte that SDWA or op_sel names."""

    def build(instruction: Instruction, context: Context) -> Execute:
        code, byte = fp8.encoding(context.arch, kind), _named_part(instruction)
        read = source(_without_opsel(_whole(instruction)), 0, source_codes(instruction)[0], "u32")
        number = instruction["vdst"] - VGPR
        return lambda active: active.set_v(
            number, code.decode(read(active) >> np.uint32(8 * byte) & np.uint32(0xFF)).view(np.uint32)
        )

    return build


def _decode_pair(kind: str, scaled: bool) -> Builder:
    """V_CVT_PK_F32_FP8 and its relative with a scale, which multiplies: the codes of one half to two registers."""

    def build(instruction: Instruction, context: Context) -> Execute:
        code, half = fp8.encoding(context.arch, kind), _named_part(instruction) & 1
        codes = source_codes(instruction)
        read = source(_without_opsel(_whole(instruction)), 0, codes[0], "u32")
        scale = source(_without_opsel(instruction), 1, codes[1], "f32") if scaled else None
        number = instruction["vdst"] - VGPR

        def execute(active: Active) -> None:
            bits = whole(read(active), active.count)
            factor = _scale(scale(active)) if scale is not None else None
            found = [code.decode(bits >> np.uint32(16 * half + shift) & np.uint32(0xFF)) for shift in (0, 8)]
            for place, value in enumerate(found):
                if factor is not None:
                    value = (value * factor).astype(np.float32)
                active.set_v(number + place, value.view(np.uint32))

        return execute

    return build


def _named_part(instruction: Instruction) -> int:
    """The byte (or, for pairs, the word) that is converted: SDWA's selection, or op_sel of VOP3."""
    if "SDWA" in instruction.form:
        selection = instruction["src0_sel"]
        return selection - 4 if selection in (4, 5) else 0 if selection == 6 else selection
    if instruction.form.startswith("VOP3"):
        opsel = instruction["opsel"]
        return (opsel & 1) << 1 | opsel >> 1 & 1 if "_PK_" not in instruction.name else opsel & 1
    return 0


def _whole(instruction: Instruction) -> Instruction:
    """With SDWA's selection of an operand undone."""
    if "SDWA" not in instruction.form:
        return instruction
    return Instruction(
        instruction.offset, instruction.size, instruction.name, instruction.form, {**instruction.fields, "src0_sel": 6}
    )


for _kind in ("FP8", "BF8"):
    add([f"V_CVT_PK_{_kind}_F32"], _encode_pair(_kind, False))
    add([f"V_CVT_SCALEF32_PK_{_kind}_F32"], _encode_pair(_kind, True))
    add([f"V_CVT_SR_{_kind}_F32"], _encode_stochastic(_kind))
    add([f"V_CVT_F32_{_kind}"], _decode_one(_kind))
    add([f"V_CVT_PK_F32_{_kind}"], _decode_pair(_kind, False))
    add([f"V_CVT_SCALEF32_PK_F32_{_kind}"], _decode_pair(_kind, True))
