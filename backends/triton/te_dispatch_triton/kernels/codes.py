# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Values to codes and back, bit for bit as te_dispatch.numerics.encodings defines them: round to nearest even, no
flush to zero, saturate (Inf too), NaN to the encoding's code.

The chip's conversion is used where it has one (`HARD`); everything else goes through integers: encodings that the chip
does not know, the `common` clamp, FP4, and Triton's interpreter, whose own conversions truncate.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def max_value(ENCODING, COMMON):
    """Where a cast saturates: the largest finite value, or the one that all vendors share."""
    if ENCODING == "e4m3fn":  # noqa: SIM116  (kernels have no dictionaries)
        return 448.0
    elif ENCODING == "e4m3fnuz":
        return 224.0 if COMMON else 240.0
    elif ENCODING == "e5m2fnuz":
        return 28672.0 if COMMON else 57344.0
    elif ENCODING == "e5m2":
        return 57344.0
    else:
        return 6.0


@triton.jit
def of_common_range(x, ENCODING: tl.constexpr, COMMON: tl.constexpr):
    """Values of which the chip's conversion to an OCP encoding makes our codes: in the `common` one what rounds to 0,
    by half of the smallest subnormal or less, is +0."""
    if COMMON and (ENCODING == "e4m3fn" or ENCODING == "e5m2"):
        half: tl.constexpr = 2.0**-10 if ENCODING == "e4m3fn" else 2.0**-17
        x = tl.where(tl.abs(x) <= half, 0.0, x)
    return x


@triton.jit
def encode(x, ENCODING: tl.constexpr, COMMON: tl.constexpr, HARD: tl.constexpr):
    """Codes (uint8) of fp32 values; e2m1 in the low nibble.

    HARD: the chip converts to this encoding; 2 where it saturates and has our code for NaN by itself, as NVIDIA's do
    (PTX ISA, ``cvt.rn.satfinite``).
    """
    if HARD and ENCODING != "e2m1":
        # Clamped first: AMD's conversion turns Inf into NaN. NaN passes, and has its code set.
        limit: tl.constexpr = max_value(ENCODING, COMMON)
        clamped = x if HARD == 2 else tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        clamped = of_common_range(clamped, ENCODING, COMMON)
        if ENCODING == "e4m3fn":
            code = clamped.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        elif ENCODING == "e5m2":
            code = clamped.to(tl.float8e5).to(tl.uint8, bitcast=True)
        elif ENCODING == "e4m3fnuz":
            code = clamped.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
        else:
            code = clamped.to(tl.float8e5b16).to(tl.uint8, bitcast=True)
        nan: tl.constexpr = 0x80 if ENCODING == "e4m3fnuz" or ENCODING == "e5m2fnuz" else 0x7F
        return code if HARD == 2 else tl.where(x != x, tl.full(x.shape, nan, tl.uint8), code)
    return _encode_integer(x, ENCODING, COMMON)


@triton.jit
def _encode_integer(x, ENCODING: tl.constexpr, COMMON: tl.constexpr):
    mantissa: tl.constexpr = 3 if ENCODING == "e4m3fn" or ENCODING == "e4m3fnuz" else (1 if ENCODING == "e2m1" else 2)
    bias: tl.constexpr = (
        7 if ENCODING == "e4m3fn"
        else 8 if ENCODING == "e4m3fnuz" else 15 if ENCODING == "e5m2" else 16 if ENCODING == "e5m2fnuz" else 1
    )  # fmt: skip
    fnuz: tl.constexpr = ENCODING == "e4m3fnuz" or ENCODING == "e5m2fnuz"
    sign: tl.constexpr = 8 if ENCODING == "e2m1" else 0x80
    nan: tl.constexpr = 0x80 if fnuz else (7 if ENCODING == "e2m1" else 0x7F)
    limit: tl.constexpr = max_value(ENCODING, COMMON)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # As integers, magnitudes compare as the values do; NaN is set right at the end.
    clamped = tl.minimum(magnitude, tl.full(x.shape, limit, tl.float32).to(tl.uint32, bitcast=True))
    shift: tl.constexpr = 23 - mantissa
    half: tl.constexpr = (1 << (shift - 1)) - 1
    rebias: tl.constexpr = (127 - bias) << mantissa
    normal = ((clamped + half + ((clamped >> shift) & 1)) >> shift) - rebias
    # Below the smallest normal, codes count the smallest subnormal: fp32's own rounding to 1.5 * 2^23 of it does it.
    step = tl.full(x.shape, (23 + 1 - bias - mantissa + 127) << 23 | 1 << 22, tl.uint32)
    magic = step.to(tl.float32, bitcast=True)
    subnormal = (clamped.to(tl.float32, bitcast=True) + magic).to(tl.uint32, bitcast=True) - step
    smallest: tl.constexpr = (128 - bias) << 23
    code = tl.where(clamped < smallest, subnormal, normal)
    if fnuz or COMMON:
        code = tl.where(((bits >> 31) != 0) & (code != 0), code | sign, code)
    else:
        code = tl.where((bits >> 31) != 0, code | sign, code)
    return tl.where(magnitude > 0x7F800000, nan, code).to(tl.uint8)


@triton.jit
def decode(code, ENCODING: tl.constexpr):
    """Values (fp32) of codes (uint8; e2m1 in the low nibble), exact, by integer arithmetic alone."""
    mantissa: tl.constexpr = 3 if ENCODING == "e4m3fn" or ENCODING == "e4m3fnuz" else (1 if ENCODING == "e2m1" else 2)
    bias: tl.constexpr = (
        7 if ENCODING == "e4m3fn"
        else 8 if ENCODING == "e4m3fnuz" else 15 if ENCODING == "e5m2" else 16 if ENCODING == "e5m2fnuz" else 1
    )  # fmt: skip
    sign: tl.constexpr = 8 if ENCODING == "e2m1" else 0x80
    wide = code.to(tl.uint32)
    magnitude = wide & (sign - 1)
    # A normal code's exponent counts from 2^-bias, fp32's from 2^-127; subnormal codes are multiples of the smallest.
    rebias: tl.constexpr = (127 - bias) << mantissa
    normal = ((magnitude + rebias) << (23 - mantissa)).to(tl.float32, bitcast=True)
    smallest = tl.full(code.shape, (1 - bias - mantissa + 127) << 23, tl.uint32).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < (1 << mantissa), magnitude.to(tl.float32) * smallest, normal)
    bits = value.to(tl.uint32, bitcast=True) | tl.where((wide & sign) != 0, 0x80000000, 0).to(tl.uint32)
    if ENCODING == "e4m3fn":
        bits = tl.where(magnitude == 0x7F, 0x7FFFFFFF, bits)
    elif ENCODING == "e5m2":
        infinity = 0x7F800000 | (bits & 0x80000000)
        bits = tl.where(magnitude == 0x7C, infinity, tl.where(magnitude > 0x7C, 0x7FFFFFFF, bits))
    elif ENCODING != "e2m1":
        bits = tl.where(wide == 0x80, 0x7FFFFFFF, bits)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def magnitude_of(x):
    """|x| as fp32 for a maximum: NaN counts as 0, Inf is kept."""
    x = x.to(tl.float32)
    return tl.where(x == x, tl.abs(x), 0.0)


@triton.jit
def scale_from_amax(amax, limit, epsilon, POWER_OF_TWO: tl.constexpr):
    """RN32(limit / max(amax, epsilon)): 1 where the amax is 0, Inf or NaN; the largest fp32 where that is infinite;
    rounded down to a power of two on request (te_dispatch.numerics.quantizers.CurrentQuantizer)."""
    floored = tl.where(amax < epsilon, epsilon, amax)  # keeps NaN
    usable = (floored > 0.0) & (floored < float("inf"))
    scale = tl.math.div_rn(limit + tl.zeros_like(floored), tl.where(usable, floored, 1.0))
    scale = tl.minimum(scale, 3.4028234663852886e38)
    if POWER_OF_TWO:
        scale = (scale.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(usable, scale, 1.0)


@triton.jit
def narrow(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """fp32 values in another floating dtype, rounded to nearest even; Triton's interpreter truncates to bf16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def widen(x):
    """Values of any floating dtype as fp32, exact.

    bf16 is widened by a shift, not by `.to`: Triton's interpreter loses bf16's subnormals, and LLVM makes products of
    such values in fp16 where fp16 is asked for (`te_dispatch_triton.miscompiled`).
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)
