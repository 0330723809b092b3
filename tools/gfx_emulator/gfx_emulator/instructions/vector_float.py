# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Vector instructions on floats.

Sums, products and fused multiply-adds are rounded once, to nearest even. The manuals promise of the transcendental
functions (reciprocal, square roots, exponential, logarithm, sine and cosine) an error of one unit in the last place and
not which result it is: here it is the exact one, rounded. All of them but V_RCP_F32 treat subnormal numbers as zero, in
and out, which is what LLVM assumes of them.
"""

from __future__ import annotations

import numpy as np

from gfx_emulator import floats
from gfx_emulator.arrays import Array
from gfx_emulator.decode import Instruction
from gfx_emulator.instructions.simple import Function, Row, arithmetic, computed, fill, simple
from gfx_emulator.operands import VGPR
from gfx_emulator.registers import Active
from gfx_emulator.registry import Context, Execute, add, implements
from gfx_emulator.vector_forms import Target, source, source_codes, sources

_F32, _F16, _F64 = ("f32",), ("f16",), ("f64",)


def _fused_16(a: Array, b: Array, c: Array) -> Array:
    return floats.fused_odd(a, b, c)


def _fract(value: Array) -> Array:
    """At most the largest number below one, also for small negative numbers (manual, "V_FRACT_F32")."""
    return np.where(
        np.isinf(value), np.float32(0), np.minimum(value - np.floor(value), np.nextafter(np.float32(1), np.float32(0)))
    )


def _ldexp(value: Array, power: Array) -> Array:
    # Beyond these powers the result is the same for every number, and float64 holds what comes before rounding.
    wide = np.ldexp(value.astype(np.float64), np.clip(power, -600, 600))
    return wide.astype(np.float32)


def _ldexp_64(value: Array, power: Array) -> Array:
    return np.ldexp(value, np.clip(power, -4400, 4400))


def _fract_64(value: Array) -> Array:
    return np.where(np.isinf(value), 0.0, np.minimum(value - np.floor(value), np.nextafter(1.0, 0.0)))


_ARITHMETIC: dict[str, Row] = {
    "V_ADD_F32": ("f32", _F32 * 2, lambda a, b: a + b),
    "V_SUB_F32": ("f32", _F32 * 2, lambda a, b: a - b),
    "V_SUBREV_F32": ("f32", _F32 * 2, lambda a, b: b - a),
    "V_MUL_F32": ("f32", _F32 * 2, lambda a, b: a * b),
    "V_FMA_F32": ("f32", _F32 * 3, floats.fused_32),
    "V_FMA_F64": ("f64", _F64 * 3, floats.fused_64),
    "V_ADD_F64": ("f64", _F64 * 2, lambda a, b: a + b),
    "V_MUL_F64": ("f64", _F64 * 2, lambda a, b: a * b),
    "V_ADD_F16": ("f16", _F16 * 2, lambda a, b: a + b),
    "V_SUB_F16": ("f16", _F16 * 2, lambda a, b: a - b),
    "V_SUBREV_F16": ("f16", _F16 * 2, lambda a, b: b - a),
    "V_MUL_F16": ("f16", _F16 * 2, lambda a, b: a * b),
    "V_TRUNC_F32": ("f32", _F32, np.trunc),
    "V_CEIL_F32": ("f32", _F32, np.ceil),
    "V_FLOOR_F32": ("f32", _F32, np.floor),
    "V_RNDNE_F32": ("f32", _F32, np.rint),
    "V_FRACT_F32": ("f32", _F32, _fract),
    "V_LDEXP_F32": ("f32", ("f32", "i32"), _ldexp),
    "V_TRUNC_F64": ("f64", _F64, np.trunc),
    "V_CEIL_F64": ("f64", _F64, np.ceil),
    "V_FLOOR_F64": ("f64", _F64, np.floor),
    "V_RNDNE_F64": ("f64", _F64, np.rint),
    "V_FRACT_F64": ("f64", _F64, _fract_64),
    "V_LDEXP_F64": ("f64", ("f64", "i32"), _ldexp_64),
    "V_RCP_F64": ("f64", _F64, lambda a: 1 / a),
    "V_RCP_F32": ("f32", _F32, lambda a: np.float32(1) / a),
    "V_RCP_IFLAG_F32": ("f32", _F32, lambda a: np.float32(1) / a),
}  # fmt: skip
fill(_ARITHMETIC, arithmetic)
add(["V_FMA_F16"], arithmetic("f16", _F16 * 3, _fused_16, keep_upper=True))

_TRANSCENDENTAL = {
    "V_EXP_F32": np.exp2,
    "V_LOG_F32": np.log2,
    "V_SQRT_F32": np.sqrt,
    "V_RSQ_F32": lambda a: 1 / np.sqrt(a),
    "V_SIN_F32": lambda a: np.sin(2 * np.pi * a),
    "V_COS_F32": lambda a: np.cos(2 * np.pi * a),
}
for _name, _function in _TRANSCENDENTAL.items():
    add([_name], arithmetic(
        "f32", _F32,
        lambda a, f=_function: floats.flushed(f(floats.flushed(a).astype(np.float64)).astype(np.float32)),
    ))  # fmt: skip


def _ordered(name: str, kind: str, largest: bool, count: int) -> None:
    """V_MIN, V_MAX and their forms with three operands: NaN are the functions' own matter."""

    def build(instruction: Instruction, context: Context) -> Execute:
        reads, target = sources(instruction, (kind,) * count), Target(instruction, kind)

        def execute(active: Active) -> None:
            value, *others = (read(active) for read in reads)
            for other in others:
                value = floats.minimum(value, other, largest, context.ieee)
            target.write(active, floats.flushed(value) if context.flush_32 and kind == "f32" else value)

        return execute

    add([name], build)


for _kind in ("f16", "f32", "f64"):
    for _verb, _largest in (("MIN", False), ("MAX", True)):
        _ordered(f"V_{_verb}_{_kind.upper()}", _kind, _largest, 2)
        if _kind != "f64":
            _ordered(f"V_{_verb}3_{_kind.upper()}", _kind, _largest, 3)


@implements("V_MED3_F32")
def _median(instruction: Instruction, context: Context) -> Execute:
    reads, target = sources(instruction, _F32 * 3), Target(instruction, "f32")

    def execute(active: Active) -> None:
        a, b, c = (read(active) for read in reads)

        def pick(x: Array, y: Array, largest: bool) -> Array:
            return floats.minimum(x, y, largest, context.ieee)

        largest = pick(pick(a, b, True), c, True)
        middle = np.where(largest == a, pick(b, c, True), np.where(largest == b, pick(a, c, True), pick(a, b, True)))
        with_nan = pick(pick(a, b, False), c, False)
        wrong = np.isnan(a) | np.isnan(b) | np.isnan(c)
        target.write(active, np.where(wrong, with_nan, middle))

    return execute


def _propagating(largest: bool) -> Function:
    """IEEE 754-2019 minimum and maximum: NaN if there is one, -0 below +0."""

    def function(a: Array, b: Array, c: Array) -> Array:
        value = floats.minimum(floats.minimum(a, b, largest, False), c, largest, False)
        return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), np.float32(np.nan), value)

    return function


add(["V_MAXIMUM3_F32"], arithmetic("f32", _F32 * 3, _propagating(True)))
add(["V_MINIMUM3_F32"], arithmetic("f32", _F32 * 3, _propagating(False)))


@implements("V_FMAC_F64")
def _accumulate_64(instruction: Instruction, context: Context) -> Execute:
    reads, target = sources(instruction, _F64 * 2), Target(instruction, "f64")
    number = instruction["vdst"] - VGPR

    def execute(active: Active) -> None:
        values = [*(read(active) for read in reads), active.v64(number).view(np.float64)]
        target.write(active, computed(floats.fused_64, values, "f64", False))

    return execute


@implements("V_FMAC_F32", "V_FMAMK_F32", "V_FMAAK_F32")
def _accumulate(instruction: Instruction, context: Context) -> Execute:
    """Fused multiply-adds of VOP2: the addend is the target, or one operand a literal."""
    codes, target = source_codes(instruction), Target(instruction, "f32")
    name = instruction.name
    first, second = (source(instruction, index, codes[index], "f32") for index in range(2))
    number = instruction["vdst"] - VGPR
    literal = np.asarray(instruction.get("literal"), np.uint32).view(np.float32)

    def execute(active: Active) -> None:
        a, b = first(active), second(active)
        if name == "V_FMAC_F32":
            values = [a, b, active.v(number).view(np.float32)]
        else:
            values = [a, literal, b] if name == "V_FMAMK_F32" else [a, b, literal]
        target.write(active, computed(floats.fused_32, values, "f32", context.flush_32))

    return execute


def _frexp_exponent(value: Array) -> Array:
    _, power = np.frexp(value)
    return np.where(np.isfinite(value), power, 0).astype(np.int32)


def _frexp_mantissa(value: Array) -> Array:
    fraction, _ = np.frexp(value)
    return np.where(np.isfinite(value), fraction, value)


add(["V_FREXP_EXP_I32_F32"], simple("i32", _F32, _frexp_exponent))
add(["V_FREXP_MANT_F32"], arithmetic("f32", _F32, _frexp_mantissa))
