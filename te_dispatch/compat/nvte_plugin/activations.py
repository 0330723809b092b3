# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations and their gradients in high precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.compat.nvte_plugin.passing import floats, high_precision, require
from te_dispatch.ops.activation import CLAMPED_SWIGLU

_KINDS = ("gelu", "glu", "geglu", "qgelu", "qgeglu", "relu", "reglu", "silu", "srelu", "sreglu", "swiglu")
_WITH_DBIAS = ("gelu", "qgelu", "relu", "silu", "srelu")
_LIMIT, _ALPHA = CLAMPED_SWIGLU


def _forward(kind: str) -> Callable[..., torch.Tensor]:
    def forward(input: Any, quantizer: Any) -> torch.Tensor:
        high_precision(quantizer)
        floats(input)
        return ops.activation_fwd(input, kind=kind).out

    return forward


def _gradient(grad: Any, fwd_input: Any, quantizer: Any) -> None:
    """Pass on gradients that `activation_bwd` would give in another dtype, or not at all."""
    high_precision(quantizer)
    floats(grad, fwd_input)
    require(grad.dtype == fwd_input.dtype, f"a gradient of {grad.dtype} for an input of {fwd_input.dtype}")


def _backward(kind: str) -> Callable[..., torch.Tensor]:
    def backward(grad: Any, fwd_input: Any, quantizer: Any) -> torch.Tensor:
        _gradient(grad, fwd_input, quantizer)
        return ops.activation_bwd(grad, fwd_input, kind=kind).dx

    return backward


def _backward_with_dbias(kind: str) -> Callable[..., list[torch.Tensor]]:
    def backward(grad: Any, fwd_input: Any, quantizer: Any) -> list[torch.Tensor]:
        _gradient(grad, fwd_input, quantizer)
        result = ops.activation_bwd(grad, fwd_input, kind=kind, with_dbias=True)
        return [result.dbias, result.dx]

    return backward


def _offset(glu_linear_offset: float) -> None:
    """The operator adds 1 to the linear half, the default there."""
    require(glu_linear_offset == 1.0, "a glu_linear_offset other than 1")


def clamped_swiglu(
    input: Any, quantizer: Any, limit: float = _LIMIT, alpha: float = _ALPHA, glu_linear_offset: float = 1.0
) -> torch.Tensor:
    high_precision(quantizer)
    floats(input)
    _offset(glu_linear_offset)
    return ops.activation_fwd(input, kind="clamped_swiglu", params=(float(limit), float(alpha))).out


def clamped_dswiglu(
    grad: Any,
    fwd_input: Any,
    quantizer: Any,
    limit: float = _LIMIT,
    alpha: float = _ALPHA,
    glu_linear_offset: float = 1.0,
) -> torch.Tensor:
    _gradient(grad, fwd_input, quantizer)
    _offset(glu_linear_offset)
    return ops.activation_bwd(grad, fwd_input, kind="clamped_swiglu", params=(float(limit), float(alpha))).dx


ADAPTERS: dict[str, Callable[..., Any]] = {
    **{kind: _forward(kind) for kind in _KINDS},
    **{f"d{kind}": _backward(kind) for kind in _KINDS},
    **{f"dbias_d{kind}": _backward_with_dbias(kind) for kind in _WITH_DBIAS},
    "clamped_swiglu": clamped_swiglu,
    "clamped_dswiglu": clamped_dswiglu,
}
