# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Encodings in NumPy: decode tables and the one encoder.

Both are built from an encoding's field widths and bias alone, so they are independent of any library's float8 type.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from te_dispatch.numerics.encodings import Encoding, encoding

Codes = NDArray[np.uint8]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@cache
def decode_table(name: str) -> F64:
    """The value of every code of an encoding: float64 (2 ** bits,).

    A code with sign s, exponent field e and mantissa field m of width w reads (-1)^s 2^(e - bias) (1 + m / 2^w), or
    (-1)^s 2^(1 - bias) m / 2^w where e is 0; then the encoding's special codes replace some.
    """
    form = encoding(name)
    codes = np.arange(2**form.bits)
    sign = np.where(codes >> (form.bits - 1), -1.0, 1.0)
    exponent = (codes >> form.mantissa_bits) & (2**form.exponent_bits - 1)
    mantissa = (codes & (2**form.mantissa_bits - 1)) / 2**form.mantissa_bits
    subnormal = exponent == 0
    values: F64 = sign * np.ldexp(np.where(subnormal, 0.0, 1.0) + mantissa, np.maximum(exponent, 1) - form.bias)
    if form.fnuz:
        values[0x80] = np.nan
    elif form.infinity:
        top = exponent == 2**form.exponent_bits - 1
        values[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    elif form.nan_code is not None:
        values[[form.nan_code, form.nan_code | 0x80]] = np.nan
    values.setflags(write=False)
    return values


def decode(codes: Codes, name: str) -> F64:
    """Values of 8-bit codes, exactly."""
    return decode_table(name)[codes]


@cache
def _midpoints(name: str) -> F64:
    positive = decode_table(name)[: encoding(name).max_code + 1]
    return (positive[:-1] + positive[1:]) / 2


def encode(values: F32, form: Encoding, max_value: float, keeps_negative_zero: bool) -> Codes:
    """Codes of float32 values: nearest, ties to the even code, saturated at `max_value`, no flush to zero.

    Non-negative codes are ordered as their values are, and a tie lies between an odd and an even code, so rounding is
    a search among the midpoints. +-Inf saturates. NaN gives the encoding's NaN code without a sign, or the largest
    value where it has none. What rounds to -0 becomes +0 unless `keeps_negative_zero`.
    """
    with np.errstate(invalid="ignore"):  # signalling NaNs
        magnitude = np.minimum(np.abs(values.astype(np.float64)), max_value)
    below = np.searchsorted(_midpoints(form.name), magnitude, side="left")
    above = np.searchsorted(_midpoints(form.name), magnitude, side="right")
    code = np.where(above % 2 == 0, above, below)  # they differ on ties only, by one
    negative = np.signbit(values) & (keeps_negative_zero | (code != 0))
    code = code | (negative.astype(code.dtype) << (form.bits - 1))
    nan_code = form.max_code if form.nan_code is None else form.nan_code
    return np.where(np.isnan(values), nan_code, code).astype(np.uint8)


def stochastic(values: F32, form: Encoding, max_value: float, draws: F64) -> F32:
    """Values of an encoding: of the two that a magnitude lies between, the larger one where its position between them
    exceeds the draw, uniform in [0, 1). Saturated at `max_value`; a NaN stays one."""
    points = decode_table(form.name)[: form.max_code + 1]
    with np.errstate(invalid="ignore"):  # signalling NaNs
        magnitude = np.minimum(np.abs(values.astype(np.float64)), max_value)
    known = np.where(np.isnan(magnitude), 0.0, magnitude)
    low = np.minimum(np.searchsorted(points, known, side="right") - 1, form.max_code - 1)
    position = (known - points[low]) / (points[low + 1] - points[low])
    found = np.where(np.isnan(magnitude), np.nan, points[low + (position > draws)])
    return np.copysign(found, values).astype(np.float32)


def pack_nibbles(codes: Codes) -> Codes:
    """(..., K) 4-bit codes -> (..., ceil(K / 2)) bytes, the even column in the low nibble, an odd end 0."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), np.uint8)], axis=-1)
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def unpack_nibbles(packed: Codes, columns: int) -> Codes:
    """The inverse of `pack_nibbles`: (..., ceil(columns / 2)) bytes -> (..., columns) codes."""
    pairs = np.stack([packed & 0xF, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])[..., :columns]
