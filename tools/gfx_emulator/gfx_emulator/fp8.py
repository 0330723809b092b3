# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The FP8 encodings: FNUZ, which gfx942's instructions mean, and OCP, which gfx950's mean.

Sources: OCP "8-bit Floating Point Specification"; AMD "CDNA 3 Instruction Set Architecture", "FP8 and BF8 data
formats".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gfx_emulator.arrays import Array


@dataclass(frozen=True)
class Encoding:
    """An 8-bit format.

    Attributes:
        mantissa: bits of the significand that are stored.
        bias: of the exponent.
        infinite: whether the largest exponent holds Inf and NaN as IEEE has it (OCP E5M2).
        fnuz: whether there is no negative zero, whose code 0x80 is the only NaN.
    """

    mantissa: int
    bias: int
    infinite: bool
    fnuz: bool

    @cached_property
    def values(self) -> Array:
        """float32 ``[256]``, the value of each code."""
        codes = np.arange(256)
        exponent, fraction = codes >> self.mantissa & (0x7F >> self.mantissa), codes & ((1 << self.mantissa) - 1)
        subnormal = exponent == 0
        significand = np.where(subnormal, fraction, fraction + (1 << self.mantissa)).astype(np.float64)
        power = np.where(subnormal, 1, exponent) - self.bias - self.mantissa
        value = np.where(codes & 0x80, -1.0, 1.0) * significand * np.exp2(power.astype(np.float64))
        if self.fnuz:
            value[0x80] = np.nan
        elif self.infinite:
            value[[0x7C, 0xFC]] = np.inf, -np.inf
            value[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
        else:
            value[[0x7F, 0xFF]] = np.nan
        return value.astype(np.float32)

    @cached_property
    def largest(self) -> float:
        return float(np.nanmax(np.where(np.isinf(self.values), np.nan, self.values)))

    @property
    def _nan(self) -> int:
        return 0x80 if self.fnuz else 0x7F

    def decode(self, codes: Array) -> Array:
        """Codes to float32."""
        value: Array = self.values[codes]
        return value

    def encode(self, value: Array, saturate: bool | Array) -> Array:
        """float32 or float64 to codes (uint8), rounded to nearest even.

        Args:
            saturate: whether finite numbers beyond the largest one become that number; else they become Inf, or NaN
                where there is none, as true Inf always do. Broadcasts with the value.
        """
        magnitude = np.abs(value).astype(np.float64)
        finite = np.isfinite(magnitude)
        _, power = np.frexp(np.where(finite, magnitude, 0))
        # The unit of the last place, which stays the subnormals' below the normal range.
        unit = np.exp2((np.maximum(power - 1, 1 - self.bias) - self.mantissa).astype(np.float64))
        rounded = np.rint(np.where(finite, magnitude, 0) / unit) * unit
        positive = self.values[:128].astype(np.float64)
        ends = positive[np.isfinite(positive)]
        code = np.searchsorted(ends, np.minimum(rounded, self.largest)).astype(np.uint8)
        beyond = ~finite | (rounded > self.largest)
        overflow = np.uint8(0x7C) if self.infinite else np.uint8(self._nan)
        top = np.uint8(len(ends) - 1)
        code = np.where(beyond, np.where(finite & saturate, top, overflow), code)
        sign = np.where(np.signbit(value), np.uint8(0x80), np.uint8(0))
        if self.fnuz:
            sign = np.where((code == 0) | (code == 0x80), np.uint8(0), sign)
        code = code | sign
        return np.where(np.isnan(value), np.uint8(self._nan), code).astype(np.uint8)


E4M3_FNUZ = Encoding(3, 8, False, True)
E5M2_FNUZ = Encoding(2, 16, False, True)
E4M3_OCP = Encoding(3, 7, False, False)
E5M2_OCP = Encoding(2, 15, True, False)


def encoding(arch: str, kind: str) -> Encoding:
    """What ``FP8`` (E4M3) or ``BF8`` (E5M2) in a mnemonic means on a chip."""
    if arch == "gfx942":
        return E4M3_FNUZ if kind == "FP8" else E5M2_FNUZ
    return E4M3_OCP if kind == "FP8" else E5M2_OCP
