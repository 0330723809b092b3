# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Floating-point arithmetic with one rounding, NaN as the chips give it, and conversions.

Everything here takes and gives NumPy arrays that broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from gfx_emulator.arrays import Array

#: What an invalid operation gives; x86 gives the negative one.
NAN_32, NAN_16 = 0x7FC00000, 0x7E00
_SMALLEST_NORMAL_32 = np.float32(2.0**-126)


def fused_odd(a: Array, b: Array, c: Array) -> Array:
    """a * b + c as float64, rounded to odd: rounding it once more, to fp32 or fp16, gives the fused result exactly.

    Operands hold fp32 or fp16 values, so that the product is exact in float64. Round to odd takes the neighbour with
    an odd last bit whenever the sum is not exact (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums:
    proved algorithms using rounding to odd", 2008).
    """
    product = a.astype(np.float64) * b
    addend = c.astype(np.float64)
    total = product + addend
    # The exact error of the sum (Knuth's TwoSum).
    other = total - product
    error = (product - (total - other)) + (addend - other)
    inexact = (error != 0) & np.isfinite(total)
    if not inexact.any():
        return total
    bits = np.ascontiguousarray(np.broadcast_to(total, inexact.shape)).view(np.int64)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact & (bits & 1 == 0), bits + towards, bits).view(np.float64)


def fused_32(a: Array, b: Array, c: Array) -> Array:
    """Fused multiply-add of float32."""
    total = a.astype(np.float64) * b + c
    result = np.asarray(total.astype(np.float32))
    bits = np.ascontiguousarray(total).view(np.int64)
    # A second rounding can only go wrong where the first one ended on a tie of fp32, or below its normal range. A sum
    # that is zero is exact: products of fp32 numbers lie far above what float64 loses.
    risky = (bits & 0x1FFFFFFF == 0x10000000) | (np.abs(total) < 2.0**-125) & (total != 0)
    if risky.any():
        first, second, third = (np.broadcast_to(one, total.shape)[risky] for one in (a, b, c))
        result[risky] = fused_odd(first, second, third).astype(np.float32)
    return result


def fused_64(a: Array, b: Array, c: Array, power: Array | None = None) -> Array:
    """(a * b + c) * 2^power of float64, rounded once.

    Where no intermediate result can overflow or be subnormal: by Boldo and Melquiond's algorithm (as in `fused_odd`).
    Elsewhere, and with powers: by rational arithmetic.
    """
    shape = np.broadcast_shapes(a.shape, b.shape, c.shape)
    operands = [np.broadcast_to(one, shape) for one in (a, b, c)]
    plain = np.array(operands[0] * operands[1] + operands[2])
    left = np.isfinite(operands[0]) & np.isfinite(operands[1]) & np.isfinite(operands[2])
    if power is None:
        usual = _usual(operands[0]) & _usual(operands[1]) & _usual(operands[2])
        plain[usual] = _fused_usual(*(one[usual] for one in operands))
        left &= ~usual
    powers = np.zeros(shape, np.int64) if power is None else np.broadcast_to(power, shape)
    for place in zip(*np.nonzero(left)):
        first, second, third = (Fraction(float(one[place])) for one in operands)
        exact = (first * second + third) * Fraction(2) ** int(powers[place])
        if exact:
            try:
                plain[place] = float(exact)
            except OverflowError:
                plain[place] = np.inf if exact > 0 else -np.inf
    return plain


def _usual(value: Array) -> Array:
    """Numbers whose products and sums, and the errors of those, are far from float64's ends, and zeros."""
    size = np.abs(value)
    return (size > 2.0**-400) & (size < 2.0**400) | (size == 0)


def _fused_usual(a: Array, b: Array, c: Array) -> Array:
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    rest = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    upper, lower = _sum_and_error(c, rest)
    total, error = _sum_and_error(product, upper)
    tail, tail_error = _sum_and_error(lower, error)
    # The tail, rounded to odd.
    bits = tail.view(np.int64)
    towards = np.where((tail_error > 0) == (tail > 0), 1, -1)
    tail = np.where((tail_error != 0) & (bits & 1 == 0), bits + towards, bits).view(np.float64)
    return total + tail


def _halves(value: Array) -> tuple[Array, Array]:
    """Numbers of 26 bits that add up to float64 (Dekker, "A floating-point technique for extending the available
    precision", 1971)."""
    scaled = value * 134217729.0
    high = scaled - (scaled - value)
    return high, value - high


def _sum_and_error(a: Array, b: Array) -> tuple[Array, Array]:
    """A sum and its exact error (Knuth's TwoSum)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def with_nans(value: Array, sources: Sequence[Array]) -> Array:
    """A float32 or float64 result whose NaN are the chips': the first operand that is NaN, quieted, or, where none is,
    the positive default."""
    wrong = np.isnan(value)
    if not wrong.any():
        return value
    unsigned = np.dtype(f"u{value.dtype.itemsize}").type
    quiet_bit, default = (1 << 22, NAN_32) if value.dtype.itemsize == 4 else (1 << 51, 0x7FF8000000000000)
    bits = np.full(wrong.shape, default, unsigned)
    for source in reversed(sources):
        if source.dtype == value.dtype:
            bits = np.where(np.isnan(source), source.view(unsigned) | unsigned(quiet_bit), bits)
    return np.where(wrong, bits, np.ascontiguousarray(value).view(unsigned)).view(value.dtype)


def flushed(value: Array) -> Array:
    """float32 with subnormal numbers as zeros of their sign."""
    small = np.abs(value) < _SMALLEST_NORMAL_32
    return np.where(small, np.copysign(np.float32(0), value), value)


def half(value: Array) -> Array:
    """float32 or float64 to fp16's bits (uint16), rounded to nearest even; NaN keep the top of their payload."""
    bits = value.astype(np.float16).view(np.uint16)
    wrong = np.isnan(value)
    if not wrong.any():
        return np.asarray(bits)
    source = value.astype(np.float32).view(np.uint32)
    payload = (
        (source >> np.uint32(13) & np.uint32(0x3FF)) | np.uint32(0x7E00) | (source >> np.uint32(16) & np.uint32(0x8000))
    )
    return np.where(wrong, payload.astype(np.uint16), bits)


def bf16(value: Array) -> Array:
    """float32 to bfloat16's bits (uint16), rounded to nearest even; NaN are quieted."""
    bits = value.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    quiet = bits >> np.uint32(16) | np.uint32(0x40)
    return np.where(np.isnan(value), quiet, rounded).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """bfloat16's bits to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def minimum(first: Array, second: Array, largest: bool, ieee: bool) -> Array:
    """V_MIN and V_MAX of float16, float32 or float64: the number where the other operand is NaN, -0 below +0; signaling
    NaN are quieted and win where IEEE mode is on."""
    value = np.asarray((np.maximum if largest else np.minimum)(first, second))
    if not np.isnan(value).any():
        zeros = (first == 0) & (second == 0)
        if zeros.any():
            bits = np.dtype(f"u{value.dtype.itemsize}")
            a, b = (np.ascontiguousarray(one).view(bits) for one in (first, second))
            value = np.where(zeros, (a & b if largest else a | b).view(value.dtype), value)
        return value
    return _minimum_of_any(first, second, largest, ieee)


def _minimum_of_any(first: Array, second: Array, largest: bool, ieee: bool) -> Array:
    """The same, where there are NaN."""
    size = first.dtype.itemsize
    signed = np.dtype(f"i{size}").type
    a, b = (np.ascontiguousarray(one).view(signed) for one in (first, second))
    top = signed(np.iinfo(signed).max)
    a_key, b_key = (x ^ ((x >> signed(8 * size - 1)) & top) for x in (a, b))
    chosen = np.where((a_key >= b_key) if largest else (a_key <= b_key), a, b)
    a_nan, b_nan = np.isnan(first), np.isnan(second)
    if a_nan.any() or b_nan.any():
        quiet = signed({2: 1 << 9, 4: 1 << 22, 8: 1 << 51}[size])
        chosen = np.where(b_nan, a, chosen)
        chosen = np.where(a_nan, b, chosen)
        if ieee:
            chosen = np.where(a_nan & b_nan, b | quiet, chosen)
            chosen = np.where(b_nan & (b & quiet == 0), b | quiet, chosen)
            chosen = np.where(a_nan & (a & quiet == 0), a | quiet, chosen)
    return np.asarray(chosen).view(first.dtype)


def exponent(value: Array) -> Array:
    """The biased exponent of float32: int32."""
    return (value.view(np.uint32) >> np.uint32(23) & np.uint32(0xFF)).astype(np.int32)
