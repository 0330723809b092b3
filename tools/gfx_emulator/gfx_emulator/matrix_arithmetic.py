# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The sums of matrix instructions, D = A B + C, in fp32.

AMD's manuals say which products are summed and not how. What is computed here is the published model of CDNA 3's units:
P. Xie, Y. Wang, F. Yang, M. Yang, "Bit-Accurate Modeling of GPU Matrix Multiply-Accumulate Units: Demystifying
Numerical Discrepancy and Accuracy" (arXiv:2511.10909), whose authors found it by tests on hardware and confirmed it bit
by bit. Of CDNA 4 (gfx950) nothing is published; its products are summed by the same model.

- fp32: a chain of fused multiply-adds in the order of k.
- bf16, fp16 and xf32, in groups of 8 (xf32: 4) products in the order of k: the exact products of a group are aligned to
  the largest exponent among them, where 24 fractional bits are kept, cut toward zero, and summed; that sum, with 32
  fractional bits, and the accumulator, with 24, are aligned to the larger of their exponents and cut downward; their
  sum is cut downward to 31 fractional bits and rounded to fp32, to nearest even.
- FP8, in groups of 16: as above, but products with even and odd k are summed apart, and those sums are aligned to the
  larger exponent, cut downward to 24 fractional bits, before they are added.

An exponent here is that of the factors, added; it is not normalized after the multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gfx_emulator import floats
from gfx_emulator.arrays import Array

_FRACTION, _WIDE = 24, 31
#: The exponent of a product that is zero: below every other.
_ZERO = -999
#: 2^24 over what a product is below the largest, as far as anything of it is kept.
_SCALES = np.exp2(_FRACTION - np.arange(64)).astype(np.float32)
#: Powers of two that `_power` is asked for, at most.
_LARGEST_POWER = 1022
#: Elements of the largest temporary arrays.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Format:
    """What the model needs of operands: exponents are those of the smallest normal number at least."""

    smallest_exponent: int
    group: int
    halves: bool = False


BF16 = Format(-126, 8)
FP16 = Format(-14, 8)
XF32 = Format(-126, 4)


def fp8_format(bias: int) -> Format:
    return Format(1 - bias, 16, halves=True)


def multiply_add(a: Array, b: Array, c: Array, format_a: Format, format_b: Format) -> Array:
    """a ``[w, m, k]`` and b ``[w, n, k]`` (float64) with c ``[w, m, n]`` (float32): float32 ``[w, m, n]``."""
    if not (np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all()):
        return _of_every(a, b, c, format_a, format_b)
    # Tiles reach beyond small matrices, where they are zero: what has a row or a column of zeros is c, and -0 is 0.
    result: Array = c + np.float32(0)
    rows, columns = (a != 0).any(axis=2), (b != 0).any(axis=2)
    waves = np.nonzero(rows.any(axis=1) & columns.any(axis=1))[0]
    if len(waves):
        down, across = np.nonzero(rows[waves].any(axis=0))[0], np.nonzero(columns[waves].any(axis=0))[0]
        part = np.ix_(waves, down, across)
        left, right = a[waves[:, None], down], b[waves[:, None], across]
        result[part] = _of_every(left, right, c[part], format_a, format_b)
    return result


def _of_every(a: Array, b: Array, c: Array, format_a: Format, format_b: Format) -> Array:
    """The same, element by element."""
    group = min(format_a.group, a.shape[2])
    step = max(1, _CHUNK // (a.shape[1] * b.shape[1] * group))
    result = np.empty(c.shape, np.float32)
    for first in range(0, len(a), step):
        part = slice(first, first + step)
        total = c[part]
        for start in range(0, a.shape[2], group):
            terms = slice(start, start + group)
            total = _group(a[part, :, terms], b[part, :, terms], total, format_a, format_b)
        result[part] = total
    return result


def multiply_add_32(a: Array, b: Array, c: Array) -> Array:
    """The same for fp32 operands (float32), by fused multiply-adds."""
    total = c
    for k in range(a.shape[2]):
        first, second = np.broadcast_arrays(a[:, :, None, k], b[:, None, :, k])
        total = floats.fused_32(first, second, total)
    return total


def _exponents(value: Array, smallest: int) -> Array:
    _, power = np.frexp(value)
    found = np.maximum(power.astype(np.int16) - 1, smallest)
    return np.where(value == 0, np.int16(_ZERO), found).astype(np.int16)


def _group(a: Array, b: Array, c: Array, format_a: Format, format_b: Format) -> Array:
    """One group of products, added to c."""
    first, second = (_exponents(one, kind.smallest_exponent) for one, kind in ((a, format_a), (b, format_b)))
    # Products lie below 2^(the sum of exponents + 2).
    ordinary = int(first.max()) + int(second.max()) + 2 <= 128
    if not (ordinary and np.isfinite(a).all() and np.isfinite(b).all() and np.isfinite(c).all()):
        return _group_of_any(a, b, c, format_a, format_b)
    if not (a.any() and b.any()):
        return np.asarray(c + np.float32(0))
    left, right = _Factors(a, first), _Factors(b, second)
    if format_a.halves:
        even, even_exponent = _fixed_sum(left, right, range(0, a.shape[2], 2))
        odd, odd_exponent = _fixed_sum(left, right, range(1, a.shape[2], 2))
        exponent = np.maximum(even_exponent, odd_exponent)
        dot = _cut(even, exponent, _FRACTION) + _cut(odd, exponent, _FRACTION)
    else:
        dot, exponent = _fixed_sum(left, right, range(a.shape[2]))
    return _added(dot, exponent, c, format_a.halves)


class _Factors:
    """An operand ``[w, rows, k]`` as significands (float32) and exponents (int16), ``[k, w, rows]`` each."""

    def __init__(self, value: Array, exponents: Array) -> None:
        significands = value * _power(-np.maximum(exponents, -_LARGEST_POWER))
        self.significands = np.ascontiguousarray(significands.astype(np.float32).transpose(2, 0, 1))
        self.exponents = np.ascontiguousarray(exponents.transpose(2, 0, 1))


def _fixed_sum(left: _Factors, right: _Factors, terms: range) -> tuple[Array, Array]:
    """`_aligned_sum` of finite products, term by term: aligned products have at most 26 bits and a sign, which integers
    of 32 bits hold eight of, and significands of a product 22 bits, which fp32 holds."""
    exponents = [left.exponents[k][:, :, None] + right.exponents[k][:, None, :] for k in terms]
    largest = np.maximum(exponents[0], np.int16(_ZERO))
    for one in exponents[1:]:
        np.maximum(largest, one, out=largest)
    total = np.zeros(largest.shape, np.int32)
    for k, exponent in zip(terms, exponents):
        scale = _SCALES[np.minimum(largest - exponent, len(_SCALES) - 1)]
        scale *= left.significands[k][:, :, None] * right.significands[k][:, None, :]
        total += scale.astype(np.int32)
    wide = largest.astype(np.int64)
    return total * _power(wide - _FRACTION), wide


def _group_of_any(a: Array, b: Array, c: Array, format_a: Format, format_b: Format) -> Array:
    """The same, of numbers that may be Inf or NaN or have such products."""
    # A zero's exponent makes every sum with it lower than those of other numbers, and that is all that is asked of it.
    exponents = (
        _exponents(a, format_a.smallest_exponent)[:, :, None, :]
        + _exponents(b, format_b.smallest_exponent)[:, None, :, :]
    )
    products = a[:, :, None, :] * b[:, None, :, :]
    # A product beyond fp32 is Inf before it is summed.
    products = np.where(np.abs(products) >= 2.0**128, np.copysign(np.inf, products), products)
    if format_a.halves:
        even, even_exponent = _aligned_sum(products[..., ::2], exponents[..., ::2])
        odd, odd_exponent = _aligned_sum(products[..., 1::2], exponents[..., 1::2])
        exponent = np.maximum(even_exponent, odd_exponent)
        dot = _cut(even, exponent, _FRACTION) + _cut(odd, exponent, _FRACTION)
    else:
        dot, exponent = _aligned_sum(products, exponents)
    return _added(dot, exponent, c, format_a.halves)


def _added(dot: Array, exponent: Array, c: Array, halves: bool) -> Array:
    """The sum of a group's products, whose largest exponent is given, added to the accumulator."""
    addend = c.astype(np.float64)
    _, power = np.frexp(addend)
    own = np.where(addend == 0, -126, np.maximum(power - 1, -126))
    largest = np.maximum(exponent, own)
    rest = _cut(addend, largest, _FRACTION)
    if halves:
        # What of the accumulator is far below the products is lost altogether, not cut downward.
        rest = np.where(own < largest - _FRACTION - 1, 0.0, rest)
    total = _cut(dot, largest, _WIDE + 1) + rest
    _, power = np.frexp(total)
    total = _cut(total, np.where(total == 0, -126, np.maximum(power - 1, -126)), _WIDE)
    return floats.with_nans(total.astype(np.float32), [])


def _aligned_sum(products: Array, exponents: Array) -> tuple[Array, Array]:
    """(the sum of what is left of products aligned to the largest exponent, that exponent)."""
    largest = np.maximum(exponents.max(axis=-1), np.int16(_ZERO)).astype(np.int64)
    scale = np.exp2((_FRACTION - largest).astype(np.float64))
    # Sums of so few numbers of so few bits are exact in float64.
    return np.trunc(products * scale[..., None]).sum(axis=-1) / scale, largest


def _cut(value: Array, exponent: Array, bits: int) -> Array:
    """Cut downward to a number of fractional bits below an exponent."""
    scale = _power(bits - exponent)
    return np.floor(value * scale) / scale


def _power(exponent: Array) -> Array:
    """2^exponent of integers within float64's normal range."""
    return (exponent.astype(np.int64) + 1023 << 52).view(np.float64)
