# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Steps of divisions in fp32 and fp64, of which compilers make one that is rounded correctly.

V_DIV_SCALE scales numerator and denominator, Newton's method finds the quotient, V_DIV_FMAS undoes the scaling, and
V_DIV_FIXUP puts in the special cases. The manuals' pseudocode contradicts itself: it undoes scalings of fp32 by 2^64
with 2^32, multiplies denominators next to overflow, and asks overflow of the denominator. Here the steps are those with
which the sequence that LLVM makes of a division is right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gfx_emulator import floats
from gfx_emulator.arrays import LANES, Array, whole
from gfx_emulator.decode import Instruction
from gfx_emulator.registers import VCC, Active
from gfx_emulator.registry import Context, Execute, implements
from gfx_emulator.vector_forms import Target, source, source_codes, sources


@dataclass(frozen=True)
class _Precision:
    """Attributes:
    fraction, bias: of the format.
    scale: the power of two that operands are scaled by.
    near_overflow: the difference of exponents from which on a quotient may overflow.
    tiny: the largest exponent of a numerator that is always scaled.
    lost: the difference of exponents below which a quotient is zero.
    """

    kind: str
    dtype: type
    fraction: int
    bias: int
    scale: int
    near_overflow: int
    tiny: int
    lost: int

    def exponent(self, value: Array) -> Array:
        """The biased exponent: int64."""
        bits = value.view(f"u{value.dtype.itemsize}")
        return (bits >> bits.dtype.type(self.fraction)).astype(np.int64) & (2 * self.bias + 1)


_SINGLE = _Precision("f32", np.float32, 23, 127, 64, 96, 23, -150)
_DOUBLE = _Precision("f64", np.float64, 52, 1023, 128, 768, 53, -1075)


def _precision(instruction: Instruction) -> _Precision:
    return _SINGLE if instruction.name.endswith("F32") else _DOUBLE


@implements("V_DIV_SCALE_F32", "V_DIV_SCALE_F64")
def _scale(instruction: Instruction, context: Context) -> Execute:
    """Scales operand 0, which is the denominator (operand 1) or the numerator (operand 2); a mask of lanes says where
    V_DIV_FMAS has to undo it."""
    form = _precision(instruction)
    codes, target = source_codes(instruction), Target(instruction, form.kind)
    first, second, third = (source(instruction, index, codes[index], form.kind) for index in range(3))
    flags = instruction["sdst"]

    def execute(active: Active) -> None:
        shape = (active.count, LANES)
        value, denominator, numerator = (np.broadcast_to(read(active), shape) for read in (first, second, third))
        result, undo = np.array(value), np.zeros(shape, np.bool_)
        above, below = form.exponent(numerator), form.exponent(denominator)
        near = near_limits(form, above, below)
        if near.any():
            result[near], undo[near] = _scaled(form, value[near], denominator[near], numerator[near])
        target.write(active, floats.with_nans(result, []))
        active.set_mask(flags, undo & active.active_lanes())

    return execute


def near_limits(form: _Precision, above: Array, below: Array) -> Array:
    """Whether numerators and denominators of these exponents may have to be scaled; others need not be looked at."""
    near = (above <= form.tiny) | (below == 0) | (below >= 2 * form.bias)
    return near | (above - below >= form.near_overflow) | (above - below < 3 - form.bias)


def _scaled(form: _Precision, value: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """(operand 0, scaled where it has to be, whether V_DIV_FMAS has to undo it), of arrays with one axis."""
    shape, smallest = value.shape, 2.0 ** (1 - form.bias)
    is_denominator, is_numerator = value == denominator, value == numerator
    ratio = np.abs(numerator.astype(np.float64) / denominator)
    tiny_inverse = np.isfinite(denominator) & (form.exponent(denominator) >= 2 * form.bias)
    tiny_inverse &= np.abs(denominator) > 2.0 ** (form.bias - 1)
    tiny_ratio = (ratio < smallest) & (numerator != 0) & np.isfinite(denominator)
    subnormal = (form.exponent(denominator) == 0) & (denominator != 0)
    up, down = (value * form.dtype(2.0**power) for power in (form.scale, -form.scale))
    difference = form.exponent(numerator) - form.exponent(denominator)
    cases = [
        ((numerator == 0) | (denominator == 0), np.full(shape, np.nan, form.dtype), False),
        (difference >= form.near_overflow, np.where(is_denominator, up, value), True),
        (subnormal, up, False),
        (tiny_inverse & tiny_ratio, np.where(is_denominator, down, value), True),
        (tiny_inverse, down, False),
        (tiny_ratio, np.where(is_numerator, up, value), True),
        (form.exponent(numerator) <= form.tiny, up, False),
    ]  # fmt: skip
    conditions = [condition for condition, _, _ in cases]
    result = np.select(conditions, [scaled for _, scaled, _ in cases], value)
    undo = np.select(conditions, [np.full(shape, flag) for _, _, flag in cases], False)
    return result, undo.astype(np.bool_)


@implements("V_DIV_FMAS_F32", "V_DIV_FMAS_F64")
def _fused(instruction: Instruction, context: Context) -> Execute:
    """A fused multiply-add whose result is scaled where VCC says so, and rounded once: up where the scaling made the
    quotient (operand 2) small, down where it made it large."""
    form = _precision(instruction)
    reads, target = sources(instruction, (form.kind,) * 3), Target(instruction, form.kind)

    def execute(active: Active) -> None:
        values = [whole(read(active), active.count) for read in reads]
        grows = form.exponent(values[2]) > form.bias
        power = np.where(active.mask_of(VCC), np.where(grows, form.scale, -form.scale), 0)
        if form is _SINGLE:
            result = (floats.fused_odd(*values) * np.exp2(power.astype(np.float64))).astype(np.float32)
        else:
            result = floats.fused_64(values[0], values[1], values[2], power)
        target.write(active, floats.with_nans(result, values))

    return execute


@implements("V_DIV_FIXUP_F32", "V_DIV_FIXUP_F64")
def _fixup(instruction: Instruction, context: Context) -> Execute:
    """Operand 0 is the quotient, 1 the denominator, 2 the numerator. A quotient that is Inf or NaN although neither of
    the others is has overflowed."""
    form = _precision(instruction)
    reads, target = sources(instruction, (form.kind,) * 3), Target(instruction, form.kind)
    unsigned = np.dtype(f"u{np.dtype(form.dtype).itemsize}").type
    quiet = unsigned(1 << (form.fraction - 1))
    invalid = unsigned((1 << 2 * np.dtype(form.dtype).itemsize * 4) - (1 << (form.fraction - 1)))

    def execute(active: Active) -> None:
        quotient, denominator, numerator = (whole(read(active), active.count) for read in reads)
        negative = np.signbit(denominator) ^ np.signbit(numerator)
        infinite_d, infinite_n = np.isinf(denominator), np.isinf(numerator)
        zero_d, zero_n = denominator == 0, numerator == 0
        overflowed = form.exponent(quotient) == 2 * form.bias + 1
        far = form.exponent(numerator) - form.exponent(denominator) < form.lost
        magnitude = np.select(
            [zero_d | infinite_n, infinite_d | zero_n | far, overflowed],
            [form.dtype(np.inf), form.dtype(0), form.dtype(np.inf)],
            np.abs(quotient),
        )
        signed = np.where(negative, -magnitude, magnitude).astype(form.dtype)
        bits = np.select(
            [np.isnan(numerator), np.isnan(denominator), (zero_d & zero_n) | (infinite_d & infinite_n)],
            [numerator.view(unsigned) | quiet, denominator.view(unsigned) | quiet, invalid],
            signed.view(unsigned),
        )
        target.write(active, bits.astype(unsigned).view(form.dtype))

    return execute
