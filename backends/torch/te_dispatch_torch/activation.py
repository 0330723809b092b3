# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations and their gradients, in fp32 with one rounding. Formulas and contracts: `te_dispatch.ops.activation`."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, relu, silu

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.activation import CLAMPED_SWIGLU, GATED
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import ActivationBackward, ActivationForward
from te_dispatch.ops.shapes import rows_of
from te_dispatch_torch.quantize import cast, dequantize

_QGELU = 1.702

#: The ungated function of each gated kind.
_GATE = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "sigmoid"}


#: Beyond it the derivatives of gelu and of x s(x) are 0 or 1 in fp32, while the terms of their formulas overflow.
_FLAT = 128.0


def gelu_grad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy * gelu'(x), tanh form."""
    return torch.ops.aten.gelu_backward(dy, x.clamp(-_FLAT, _FLAT), approximate="tanh")


def _quick_derivative(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """The derivative of x s(alpha x)."""
    t = (alpha * x).clamp(-_FLAT, _FLAT)
    s = torch.sigmoid(t)
    return s * (1.0 + t * (1.0 - s))


#: PyTorch 2.9 compiles aten's operation into steps that round differently: there it is steps in eager too.
_SILU_BACKWARD_TAKEN_APART = torch.__version__ < (2, 10)


def _apply(kind: str, x: torch.Tensor) -> torch.Tensor:
    if kind == "gelu":
        return gelu(x, approximate="tanh")
    if kind == "qgelu":
        return x * torch.sigmoid(_QGELU * x)
    if kind == "relu":
        return relu(x)
    if kind == "srelu":
        return relu(x).square()
    if kind == "silu":
        return silu(x)
    return torch.sigmoid(x)


def _grad(kind: str, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy * act'(x)."""
    if kind == "gelu":
        return gelu_grad(dy, x)
    if kind == "qgelu":
        return dy * _quick_derivative(x, _QGELU)
    if kind == "relu":
        return torch.ops.aten.threshold_backward(dy, x, 0)
    if kind == "srelu":
        return dy * (2.0 * relu(x))
    if kind == "silu" and not _SILU_BACKWARD_TAKEN_APART:
        return torch.ops.aten.silu_backward(dy, x)
    if kind == "silu":
        return dy * _quick_derivative(x, 1.0)
    s = torch.sigmoid(x)
    return dy * (s * (1.0 - s))


def _forward(kind: str, x: torch.Tensor, params: tuple[float, float] | None) -> torch.Tensor:
    if kind not in GATED:
        return _apply(kind, x)
    u, v = x.chunk(2, -1)
    if kind == "clamped_swiglu":
        limit, alpha = params or CLAMPED_SWIGLU
        u = u.clamp_max(limit)
        return u * torch.sigmoid(alpha * u) * (v.clamp(-limit, limit) + 1.0)
    return _apply(_GATE[kind], u) * v


def _backward(kind: str, dy: torch.Tensor, x: torch.Tensor, params: tuple[float, float] | None) -> torch.Tensor:
    if kind not in GATED:
        return _grad(kind, dy, x)
    u, v = x.chunk(2, -1)
    if kind == "clamped_swiglu":
        limit, alpha = params or CLAMPED_SWIGLU
        outside_u, outside_v = u > limit, v.abs() > limit  # NaN is neither
        u, v = u.clamp_max(limit), v.clamp(-limit, limit) + 1.0
        du = (dy * v * _quick_derivative(u, alpha)).masked_fill(outside_u, 0.0)
        dv = (dy * (u * torch.sigmoid(alpha * u))).masked_fill(outside_v, 0.0)
        return torch.cat((du, dv), -1)
    return torch.cat((_grad(_GATE[kind], dy * v, u), dy * _apply(_GATE[kind], u)), -1)


def _values(x: torch.Tensor | Quantized) -> torch.Tensor:
    return dequantize(x, dtype=torch.float32) if isinstance(x, Quantized) else x.float()


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
    """Any activation, with an optional cast from fp32."""
    checks.activation_fwd(x, kind, params, quantizer, usage, out_dtype)
    dtype = out_dtype or x.dtype
    if quantizer is None and kind in ("gelu", "relu", "silu") and isinstance(x, torch.Tensor) and dtype == x.dtype:
        return ActivationForward(_apply(kind, x), None)  # these compute in fp32 and round once by themselves
    out = _forward(kind, _values(x), params)
    quantized = None if quantizer is None else cast(out, quantizer, usage, dtype)
    return ActivationForward(out.to(dtype) if quantizer is None or with_out else None, quantized)


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
    """Any activation's gradient, with an optional cast and bias gradient from fp32."""
    checks.activation_bwd(dy, x, kind, params, quantizer, usage)
    dx = _backward(kind, dy.float(), _values(x), params)
    dbias = dx.reshape(rows_of(tuple(dx.shape)), dx.shape[-1]).sum(0).to(dy.dtype) if with_dbias else None
    quantized = None if quantizer is None else cast(dx, quantizer, usage, dy.dtype)
    return ActivationBackward(dx.to(dy.dtype) if quantizer is None or with_dx else None, quantized, dbias)
