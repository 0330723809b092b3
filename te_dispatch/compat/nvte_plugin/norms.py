# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""LayerNorm and RMSNorm in high precision, on matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.compat.nvte_plugin.passing import floats, high_precision, require, torch_dtype


def _matrix(x: torch.Tensor, weights: tuple[torch.Tensor, ...], sm_margin: int) -> None:
    require(x.dim() == 2, f"an input of {x.dim()} dimensions")
    for weight in weights:
        require(weight.dtype in (x.dtype, torch.float32), f"a weight of {weight.dtype} for an input of {x.dtype}")
    require(sm_margin == 0, "an sm_margin")


def _output(ln_out: Any, quantizer: Any, otype: Any) -> torch.dtype:
    high_precision(quantizer)
    require(ln_out is None, "an ln_out to write to")
    return torch_dtype(otype)


def layernorm_fwd(
    input: Any,
    weight: Any,
    bias: Any,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    dtype = _output(ln_out, quantizer, otype)
    weights = (weight,) if bias is None else (weight, bias)
    floats(input, *weights)
    _matrix(input, weights, sm_margin)
    y, _, _, mean, rstd = ops.layernorm_fwd(
        input, weight, bias, eps=eps, zero_centered_gamma=zero_centered_gamma, out_dtype=dtype
    )
    return [y, mean, rstd]


def layernorm_bwd(
    dz: Any, x: Any, mu: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool
) -> list[Any]:
    floats(dz, x, mu, rsigma, gamma)
    _matrix(x, (gamma,), sm_margin)
    return list(ops.layernorm_bwd(dz, x, gamma, mu, rsigma, zero_centered_gamma=zero_centered_gamma))


def rmsnorm_fwd(
    input: Any,
    weight: Any,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    dtype = _output(ln_out, quantizer, otype)
    floats(input, weight)
    _matrix(input, (weight,), sm_margin)
    result = ops.rmsnorm_fwd(input, weight, eps=eps, zero_centered_gamma=zero_centered_gamma, out_dtype=dtype)
    return [result.y, None, result.rstd]


def rmsnorm_bwd(dz: Any, x: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool) -> list[Any]:
    return _rmsnorm_bwd(dz, x, None, rsigma, gamma, sm_margin, zero_centered_gamma)


def rmsnorm_bwd_add(
    dz: Any, x: Any, add: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool
) -> list[Any]:
    floats(add)
    return _rmsnorm_bwd(dz, x, add, rsigma, gamma, sm_margin, zero_centered_gamma)


def _rmsnorm_bwd(
    dz: Any, x: Any, add: Any, rsigma: Any, gamma: Any, sm_margin: int, zero_centered_gamma: bool
) -> list[Any]:
    floats(dz, x, rsigma, gamma)
    _matrix(x, (gamma,), sm_margin)
    result = ops.rmsnorm_bwd(dz, x, gamma, rsigma, zero_centered_gamma=zero_centered_gamma, add=add)
    return [result.dx, result.dgamma]


ADAPTERS: dict[str, Callable[..., Any]] = {
    "layernorm_fwd": layernorm_fwd,
    "layernorm_bwd": layernorm_bwd,
    "rmsnorm_fwd": rmsnorm_fwd,
    "rmsnorm_bwd": rmsnorm_bwd,
    "rmsnorm_bwd_add": rmsnorm_bwd_add,
}
