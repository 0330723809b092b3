# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations and their derivatives of fp32 values; formulas in te_dispatch/ops/activation.py.

FUNCTION names an activation of one value: gelu, qgelu, relu, srelu, silu, logistic (glu's) or clamped (that of
clamped_swiglu). exp is held within 2 ulp and quotients within 1 or 2, as te_dispatch/conformance/bounds/elementary.py
asks. PTX: compiled for NVIDIA, whose approximations of 2^x and 1 / x are that good; Triton's own spellings of them take
more instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _exp2(x, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _reciprocal(x, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def _exp(x, PTX: tl.constexpr):
    """exp of -87 <= x <= 88: 2^n of the nearest whole n, times 2^ of a rest that is exact to a rounding (Cody and
    Waite, "Software Manual for the Elementary Functions", 1980). The product of x and log2(e) alone, which fast
    exponentials take the power of, has lost as many bits as x has before the point."""
    shifted = tl.fma(x, 1.4426950408889634, 12582912.0)  # 1.5 * 2^23: rounds to a whole number, kept in the low bits
    whole = shifted - 12582912.0
    rest = tl.fma(whole, -0.693359375, x)  # exact: ln 2 to 9 bits
    rest = tl.fma(whole, 2.12194440e-4, rest)
    power = _exp2(rest * 1.4426950408889634, PTX)
    return (power.to(tl.uint32, bitcast=True) + (shifted.to(tl.uint32, bitcast=True) << 23)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def logistic(t, PTX: tl.constexpr):
    """1 / (1 + exp(-t)), a number for NaN too: multiply by what is NaN, or select. 0 instead of a subnormal number:
    whatever it is multiplied by."""
    bounded = tl.minimum(tl.maximum(-t, -87.0), 88.0)
    found = _reciprocal(1.0 + _exp(bounded, PTX), PTX)
    if PTX:
        return found  # the instruction flushes
    return tl.where(t < -87.4, 0.0, found)


@triton.jit
def _gelu_logistic(x, PTX: tl.constexpr):
    """s(2 t) of t = sqrt(2 / pi) (x + 0.044715 x^3), with which 0.5 x (1 + tanh t) = x s(2 t) does not cancel. The
    argument is rounded several times itself, so that exp may be 2^ of one more product."""
    # -2 sqrt(2 / pi) log2(e), and 0.044715 of it.
    power = x * tl.fma(x * x, -0.1029432395800235, -2.302208198144325)
    return _reciprocal(1.0 + _exp2(power, PTX), PTX)


@triton.jit
def _relu(x):
    """NaN stays NaN."""
    return tl.where(x <= 0.0, 0.0, x)


@triton.jit
def value_of(x, alpha, FUNCTION: tl.constexpr, PTX: tl.constexpr):
    """act(x)."""
    if FUNCTION == "gelu":
        return x * _gelu_logistic(x, PTX)
    elif FUNCTION == "relu":
        return _relu(x)
    elif FUNCTION == "srelu":
        return _relu(x) * _relu(x)
    elif FUNCTION == "qgelu":
        return x * logistic(1.702 * x, PTX)
    elif FUNCTION == "silu":
        return x * logistic(x, PTX)
    elif FUNCTION == "clamped":
        return x * logistic(alpha * x, PTX)
    else:
        return tl.where(x != x, x, logistic(x, PTX))


@triton.jit
def point_of(x, alpha, FUNCTION: tl.constexpr, PTX: tl.constexpr):
    """(act(x), act'(x)), from one exponential."""
    if FUNCTION == "gelu":
        s = _gelu_logistic(x, PTX)
        bell = s * (1.0 - s)
        # 2 sqrt(2 / pi) (1 + 3 * 0.044715 x^2), which may be infinite where the bell is 0.
        slope = tl.fma(x * x, 0.21406444881780076, 1.5957691216057308)
        return x * s, tl.where(bell == 0.0, s, tl.fma(x * bell, slope, s))
    elif FUNCTION == "relu":
        return _relu(x), tl.where(x <= 0.0, 0.0, 1.0)
    elif FUNCTION == "srelu":
        return _relu(x) * _relu(x), 2.0 * _relu(x)
    elif FUNCTION == "logistic":
        s = tl.where(x != x, x, logistic(x, PTX))
        return s, s * (1.0 - s)
    else:
        # The bell is multiplied first: factor x may overflow where it is 0.
        if FUNCTION == "qgelu":
            s = logistic(1.702 * x, PTX)
            bell = 1.702 * (s * (1.0 - s))
        elif FUNCTION == "clamped":
            s = logistic(alpha * x, PTX)
            bell = alpha * (s * (1.0 - s))
        else:
            s = logistic(x, PTX)
            bell = s * (1.0 - s)
        return x * s, tl.fma(x, bell, s)


@triton.jit
def forward(u, v, limit, alpha, FUNCTION: tl.constexpr, GATED: tl.constexpr, PTX: tl.constexpr):
    """act(u), or act(u) v. v is not used where it is not gated."""
    if FUNCTION == "clamped":
        u = tl.where(u > limit, limit, u)
        v = tl.where(v > limit, limit, tl.where(v < -limit, -limit, v)) + 1.0
    found = value_of(u, alpha, FUNCTION, PTX)
    if GATED:
        found = found * v
    return found


@triton.jit
def backward(dy, u, v, limit, alpha, FUNCTION: tl.constexpr, GATED: tl.constexpr, PTX: tl.constexpr):
    """The gradients of u and of v; where it is not gated the second means nothing. Relu passes dy, whatever it is."""
    capped, factor = u, v
    if FUNCTION == "clamped":
        capped = tl.where(u > limit, limit, u)
        factor = tl.where(v > limit, limit, tl.where(v < -limit, -limit, v)) + 1.0
    value, slope = point_of(capped, alpha, FUNCTION, PTX)
    through = dy
    if GATED:
        through = dy * factor
    if FUNCTION == "relu":
        du = tl.where(u <= 0.0, 0.0, through)
    else:
        du = through * slope
    dv = dy * value
    if FUNCTION == "clamped":
        du = tl.where(u > limit, 0.0, du)
        dv = tl.where((v > limit) | (v < -limit), 0.0, dv)
    return du, dv
