# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations and their derivatives in float64 (`te_dispatch.ops.activation` gives the formulas and sources)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.activation import CLAMPED_SWIGLU, GATED
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import ActivationBackward, ActivationForward
from te_dispatch_reference import casts, host
from te_dispatch_reference.host import F64

_C = np.sqrt(2 / np.pi)
_QUICK = 1.702


def logistic(x: F64) -> F64:
    # exp(-x) overflows to Inf for x below -709, where 1 / (1 + Inf) = 0 is right.
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _gelu(x: F64) -> F64:
    """0.5 (1 + tanh(t)) = s(2t), which does not cancel where tanh nears -1."""
    return x * logistic(2 * _C * (x + 0.044715 * x**3))


def _gelu_derivative(x: F64) -> F64:
    s = logistic(2 * _C * (x + 0.044715 * x**3))
    return s + x * s * (1 - s) * 2 * _C * (1 + 3 * 0.044715 * x**2)


def _sigmoid_product_derivative(x: F64, alpha: float) -> F64:
    """Of x s(alpha x)."""
    s = logistic(alpha * x)
    return s * (1 + alpha * x * (1 - s))


#: The elementwise functions, and the one applied to the first half by gated kinds.
FUNCTIONS: dict[str, Callable[[F64], F64]] = {
    "gelu": _gelu,
    "qgelu": lambda x: x * logistic(_QUICK * x),
    "relu": lambda x: np.maximum(x, 0),
    "srelu": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x * logistic(x),
    "sigmoid": logistic,
}
DERIVATIVES: dict[str, Callable[[F64], F64]] = {
    "gelu": _gelu_derivative,
    "qgelu": lambda x: _sigmoid_product_derivative(x, _QUICK),
    "srelu": lambda x: 2 * np.maximum(x, 0),
    "silu": lambda x: _sigmoid_product_derivative(x, 1.0),
    "sigmoid": lambda x: logistic(x) * (1 - logistic(x)),
}
_GATE = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "sigmoid"}


def _forward(x: F64, kind: str, params: tuple[float, float]) -> F64:
    if kind not in GATED:
        return FUNCTIONS[kind](x)
    u, v = np.split(x, 2, axis=-1)
    if kind == "clamped_swiglu":
        limit, alpha = params
        capped = np.minimum(u, limit)
        return capped * logistic(alpha * capped) * (np.clip(v, -limit, limit) + 1)
    return FUNCTIONS[_GATE[kind]](u) * v


def _passed(dy: F64, x: F64, kind: str) -> F64:
    """dy act'(x). Relu selects: what it cuts off gets 0 whatever dy is, and a NaN of x passes dy."""
    if kind == "relu":
        return np.where(x <= 0, 0.0, dy)
    return dy * DERIVATIVES[kind](x)


def _backward(dy: F64, x: F64, kind: str, params: tuple[float, float]) -> F64:
    if kind not in GATED:
        return _passed(dy, x, kind)
    u, v = np.split(x, 2, axis=-1)
    if kind == "clamped_swiglu":
        limit, alpha = params
        capped = np.minimum(u, limit)
        du = dy * _sigmoid_product_derivative(capped, alpha) * (np.clip(v, -limit, limit) + 1)
        du = np.where(u > limit, 0.0, du)
        dv = np.where(np.abs(v) > limit, 0.0, dy * capped * logistic(alpha * capped))
    else:
        du = _passed(dy * v, u, _GATE[kind])
        dv = dy * FUNCTIONS[_GATE[kind]](u)
    return np.concatenate([du, dv], axis=-1)


def _values(x: torch.Tensor | Quantized) -> F64:
    """Those of a record rounded to fp32: at a limit of `clamped_swiglu` that rounding decides."""
    return casts.single_values(x).astype(np.float64) if isinstance(x, Quantized) else casts.values_of(x, "x")


def activation_fwd(
    x: torch.Tensor | Quantized,
    *,
    kind: str,
    params: tuple[float, float] | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_out: bool = False,
    out_dtype: torch.dtype | None = None,
) -> ActivationForward:
    checks.activation_fwd(x, kind, params, quantizer, usage, out_dtype)
    used = params or CLAMPED_SWIGLU
    dtype = out_dtype or x.dtype
    with np.errstate(all="ignore"):
        y = _forward(_values(x), kind, used)
        single = y.astype(np.float32)
    out = host.result("out", y, dtype, x.device) if quantizer is None or with_out else None
    made = None
    if quantizer is not None:
        made = casts.quantized(single, single.shape, quantizer, usage, dtype, x.device)
    return ActivationForward(out, made)


def activation_bwd(
    dy: torch.Tensor,
    x: torch.Tensor | Quantized,
    *,
    kind: str,
    params: tuple[float, float] | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_dx: bool = False,
    with_dbias: bool = False,
) -> ActivationBackward:
    checks.activation_bwd(dy, x, kind, params, quantizer, usage)
    used = params or CLAMPED_SWIGLU
    with np.errstate(all="ignore"):
        grad = _backward(host.double(dy), _values(x), kind, used)
        single = grad.astype(np.float32)
        sums = grad.reshape(single.size // max(grad.shape[-1], 1), grad.shape[-1]).sum(0) if with_dbias else None
    dx = host.result("dx", grad, dy.dtype, x.device) if quantizer is None or with_dx else None
    made = None
    if quantizer is not None:
        made = casts.quantized(single, single.shape, quantizer, usage, dy.dtype, x.device)
    return ActivationBackward(dx, made, None if sums is None else host.result("dbias", sums, dy.dtype, x.device))
