# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""FP8 codes by integer arithmetic on the bits of float32, as the x1's conversion unit does it."""

from __future__ import annotations

from functools import cache

import numpy as np

from te_dispatch.numerics.encodings import encoding as find_encoding
from te_dispatch_acme.memory import F32, U8

_MANTISSA = 23
_BIAS = 127
_IMPLICIT = 1 << _MANTISSA


def encode(values: F32, encoding: str, max_value: float, keeps_negative_zero: bool) -> U8:
    """Codes of float32 values: nearest, ties to even, saturated at max_value, without flush to zero.

    A value is significand * 2^(exponent - 150). The code keeps its upper bits: as many fewer as the target's mantissa
    is shorter, and one fewer for each power of two below the target's smallest normal number, which is all that is
    special about subnormals. A carry out of the mantissa runs into the exponent field, as it should.
    """
    form = find_encoding(encoding)
    limit = int(np.float32(max_value).view(np.int32))
    bits = np.ascontiguousarray(values).view(np.int32)
    magnitude = bits & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    magnitude = np.minimum(magnitude, limit).astype(np.int64)

    exponent = magnitude >> _MANTISSA
    significand = (magnitude & (_IMPLICIT - 1)) | np.where(exponent > 0, _IMPLICIT, 0)
    smallest_normal = _BIAS + 1 - form.bias
    held = np.maximum(exponent, smallest_normal)
    # Beyond 30 bits nothing is left of a 24-bit significand, half a unit included.
    dropped = np.minimum(_MANTISSA - form.mantissa_bits + held - np.maximum(exponent, 1), 30)
    half_less_one = (np.int64(1) << (dropped - 1)) - 1
    kept = (significand + half_less_one + ((significand >> dropped) & 1)) >> dropped
    code = ((held - smallest_normal) << form.mantissa_bits) + kept

    negative = (bits < 0) & (keeps_negative_zero | (code != 0))
    code = code | np.where(negative, 0x80, 0)
    nan = form.max_code if form.nan_code is None else form.nan_code
    return np.where(is_nan, nan, code).astype(np.uint8)


@cache
def _values(encoding: str) -> F32:
    form = find_encoding(encoding)
    code = np.arange(256)
    field = (code >> form.mantissa_bits) & ((1 << form.exponent_bits) - 1)
    fraction = (code & ((1 << form.mantissa_bits) - 1)) / (1 << form.mantissa_bits)
    magnitude = np.ldexp(fraction + (field > 0), np.maximum(field, 1) - form.bias)
    values = np.where(code >= 0x80, -magnitude, magnitude)
    top = field == (1 << form.exponent_bits) - 1
    if form.infinity:
        values[top] = np.where(fraction[top] == 0, np.copysign(np.inf, values[top]), np.nan)
    elif form.negative_zero:
        values[[0x7F, 0xFF]] = np.nan
    else:
        values[0x80] = np.nan
    single: F32 = values.astype(np.float32)
    return single


def decode(codes: U8, encoding: str) -> F32:
    """The value of every code; exact in float32."""
    values: F32 = _values(encoding)[codes]
    return values
