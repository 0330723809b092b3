# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations and their gradients as values known within a bound. The formulas: `te_dispatch.ops.activation`.

Each is written as its fp32 operations, in the form that cancels most among those that the contract's formula suggests,
and the bound is what these operations add up to (`known`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from te_dispatch.conformance.bounds import elementary as e
from te_dispatch.conformance.bounds.known import Known
from te_dispatch.ops.activation import CLAMPED_SWIGLU, GATED

_FUNCTIONS: dict[str, Callable[[Known], Known]] = {
    "gelu": e.gelu,
    "qgelu": lambda x: e.gated_logistic(x, e.QGELU),
    "relu": e.relu,
    "srelu": lambda x: e.relu(x) * e.relu(x),
    "silu": lambda x: e.gated_logistic(x, 1.0),
    "logistic": e.logistic,
}
_DERIVATIVES: dict[str, Callable[[Known], Known]] = {
    "gelu": e.gelu_derivative,
    "qgelu": lambda x: e.gated_logistic_derivative(x, e.QGELU),
    "srelu": lambda x: e.relu(x) * 2.0,
    "silu": lambda x: e.gated_logistic_derivative(x, 1.0),
    "logistic": e.logistic_derivative,
}
_GATE = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu", "glu": "logistic"}


def _halves(x: Known) -> tuple[Known, Known]:
    (u, v), (du, dv) = x.value.chunk(2, -1), x.error.chunk(2, -1)
    return Known(u, du), Known(v, dv)


def forward(x: Known, kind: str, params: tuple[float, float] | None) -> Known:
    """act(x), or act(u) v of the halves."""
    if kind not in GATED:
        return _FUNCTIONS[kind](x)
    u, v = _halves(x)
    if kind != "clamped_swiglu":
        return _FUNCTIONS[_GATE[kind]](u) * v
    limit, alpha = params or CLAMPED_SWIGLU
    # Clamping moves no two values further apart.
    capped = Known(u.value.clamp_max(limit), u.error)
    return e.gated_logistic(capped, alpha) * (Known(v.value.clamp(-limit, limit), v.error) + 1.0)


def backward(dy: Known, x: Known, kind: str, params: tuple[float, float] | None) -> Known:
    """dy act'(x), or the gradients of both halves side by side."""
    if kind not in GATED:
        return _passed(kind, dy, x)
    u, v = _halves(x)
    if kind != "clamped_swiglu":
        gate = _GATE[kind]
        return _beside(_passed(gate, dy * v, u), dy * _FUNCTIONS[gate](u))
    limit, alpha = params or CLAMPED_SWIGLU
    capped, shifted = Known(u.value.clamp_max(limit), u.error), Known(v.value.clamp(-limit, limit), v.error) + 1.0
    du = dy * e.gated_logistic_derivative(capped, alpha) * shifted
    dv = dy * e.gated_logistic(capped, alpha)
    from_u, from_v = u.value - limit, v.value.abs() - limit
    return _beside(_cut(du, from_u > 0, from_u, u.error), _cut(dv, from_v > 0, from_v, v.error))


def _cut(found: Known, beyond: torch.Tensor, distance: torch.Tensor, error: torch.Tensor) -> Known:
    """Exactly 0 beyond a threshold, and as it is elsewhere, NaN included. Either, where the operand's distance from
    the threshold is no more than its error."""
    kept = found.part(~beyond)
    near = (error > 0) & (distance.abs() <= error)
    return Known(kept.value, torch.where(near, found.largest, kept.error))


def _passed(kind: str, dy: Known, x: Known) -> Known:
    """dy act'(x). Relu passes dy itself where x is not 0 or less, NaN included, and exactly 0 elsewhere."""
    return _cut(dy, x.value <= 0, x.value, x.error) if kind == "relu" else dy * _DERIVATIVES[kind](x)


def _beside(u: Known, v: Known) -> Known:
    return Known(torch.cat((u.value, v.value), -1), torch.cat((u.error, v.error), -1))
