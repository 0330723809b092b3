# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations in fp32. Contracts and formulas: `te_dispatch.ops.activation`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import ActivationBackward, ActivationForward
from te_dispatch_acme import memory
from te_dispatch_acme.memory import F32

_SLOPE = np.float32(2 * np.sqrt(2 / np.pi))
_CUBE = np.float32(0.044715)

#: Gated kind -> the function of its first half. The manifest lists these kinds and those of `_FUNCTIONS`.
_GATES = {"geglu": "gelu", "reglu": "relu", "swiglu": "silu"}


def activation_fwd(
    x: torch.Tensor,
    *,
    kind: str,
    params: tuple[float, float] | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_out: bool = False,
    out_dtype: torch.dtype | None = None,
) -> ActivationForward:
    """act(x), or act(first half) * second half."""
    checks.activation_fwd(x, kind, params, quantizer, usage, out_dtype)
    values = memory.single("x", x)
    if kind in _GATES:
        u, v = np.split(values, 2, axis=-1)
        y = _FUNCTIONS[_GATES[kind]](u)[0] * v
    else:
        y = _FUNCTIONS[kind](values)[0]
    return ActivationForward(memory.result("out", y, memory.dtype_of("out_dtype", out_dtype, x.dtype), x.device), None)


def activation_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    *,
    kind: str,
    params: tuple[float, float] | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_dx: bool = False,
    with_dbias: bool = False,
) -> ActivationBackward:
    """dy * act'(x); for gated kinds both halves' gradients side by side."""
    checks.activation_bwd(dy, x, kind, params, quantizer, usage)
    values, grad = memory.single("x", x), memory.single("dy", dy)
    if kind in _GATES:
        u, v = np.split(values, 2, axis=-1)
        y, slope = _FUNCTIONS[_GATES[kind]](u)
        dx = np.concatenate([_along(_GATES[kind], slope, grad * v), grad * y], axis=-1)
    else:
        dx = _along(kind, _FUNCTIONS[kind](values)[1], grad)
    return ActivationBackward(memory.result("dx", dx, dy.dtype, x.device), None, None)


def _along(kind: str, slope: F32, grad: F32) -> F32:
    """slope * grad; relu's is a choice, which leaves nothing of a NaN or Inf."""
    return np.where(slope != 0, grad, np.float32(0)) if kind == "relu" else slope * grad


def _logistic(x: F32) -> F32:
    # exp overflows to Inf for very negative x, where 1 / (1 + Inf) = 0 is right.
    with np.errstate(over="ignore"):
        s: F32 = np.float32(1) / (np.float32(1) + np.exp(-x))
    return s


def _gelu(x: F32) -> tuple[F32, F32]:
    """0.5 (1 + tanh(t)) is the logistic function of 2t, which does not cancel where tanh nears -1."""
    with np.errstate(over="ignore", invalid="ignore"):
        s = _logistic(_SLOPE * (x + _CUBE * x * x * x))
        bend = x * s * (1 - s) * _SLOPE * (1 + 3 * _CUBE * x * x)
        return x * s, s + np.where((s == 0) | (s == 1), np.float32(0), bend)  # where x * x overflows, too


def _relu(x: F32) -> tuple[F32, F32]:
    return np.maximum(x, 0), (~(x <= 0)).astype(np.float32)


def _silu(x: F32) -> tuple[F32, F32]:
    s = _logistic(x)
    return x * s, s * (1 + x * (1 - s))


#: x -> (value, derivative).
_FUNCTIONS: dict[str, Callable[[F32], tuple[F32, F32]]] = {"gelu": _gelu, "relu": _relu, "silu": _silu}
