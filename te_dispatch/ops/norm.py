# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""LayerNorm and RMSNorm, with residual add and quantization fused where an implementation can."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_dispatch.core.facts import CallFacts, Derived, fact
from te_dispatch.core.operator import operator
from te_dispatch.ops.results import NormBackward, NormForward
from te_dispatch.ops.shapes import USAGES, empty_quantized

if TYPE_CHECKING:
    import torch

    from te_dispatch.numerics.quantizers import Quantizer


def _layernorm_shape(
    x: Any,
    gamma: Any,
    beta: Any = None,
    *,
    residual: Any = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_y: bool = False,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> NormForward:
    import torch

    dtype = out_dtype or x.dtype
    mean = torch.empty(tuple(x.shape[:-1]), dtype=torch.float32, device=x.device)
    quantized = None
    if quantizer is not None:
        quantized = empty_quantized(tuple(x.shape), quantizer, usage, dtype, x.device)
    y = torch.empty(x.shape, dtype=dtype, device=x.device) if quantizer is None or with_y else None
    residual_out = torch.empty_like(x) if residual is not None else None
    return NormForward(y, quantized, residual_out, mean, torch.empty_like(mean))


def _rmsnorm_shape(x: Any, gamma: Any, **options: Any) -> NormForward:
    return _layernorm_shape(x, gamma, **options)._replace(mean=None)


def _backward_facts(call: CallFacts) -> CallFacts:
    same = {name: fact(name) for name in ("x.dtype", "gamma.dtype", "zero_centered_gamma", "hidden")}
    return Derived(call, {**same, "dy.dtype": fact("out_dtype", "x.dtype")})


@operator(
    family="norm",
    version=1,
    shape=_layernorm_shape,
    device="x.device",
    words={"usage": USAGES},
    sizes={"hidden": "x.shape[-1]"},
    companion="layernorm_bwd",
    companion_facts=_backward_facts,
    mutates=("quantizer.amax",),
)
def layernorm_fwd(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_y: bool = False,
    out_dtype: torch.dtype | None = None,
) -> NormForward:
    """y = (x - mean) * rstd * gamma + beta over the last dimension, with rstd = 1 / sqrt(var + eps).

    The variance is the biased one (divided by N), as in Ba et al., "Layer Normalization" (2016). Arithmetic is fp32.

    Args:
        x: (..., N) float32, bfloat16 or float16.
        gamma, beta: (N,), of x's dtype or float32; beta None for no shift.
        eps: added to the variance.
        zero_centered_gamma: the factor is 1 + gamma.
        residual: like x: the norm is of x + residual, rounded to x's dtype, which is returned as `residual_out`.
        quantizer, usage: also cast y (from fp32, without rounding to `out_dtype` first) as `quantize` would.
        with_y: return y beside y_quantized; without a quantizer y is always returned.
        out_dtype: dtype of y and nominal dtype of y_quantized; None for x's.

    Returns:
        y, y_quantized, residual_out, mean (...,) fp32, rstd (...,) fp32.
    """
    raise NotImplementedError


@operator(
    family="norm",
    version=1,
    shape=_rmsnorm_shape,
    device="x.device",
    words={"usage": USAGES},
    sizes={"hidden": "x.shape[-1]"},
    companion="rmsnorm_bwd",
    companion_facts=_backward_facts,
    mutates=("quantizer.amax",),
)
def rmsnorm_fwd(
    x: torch.Tensor,
    gamma: torch.Tensor,
    *,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_y: bool = False,
    out_dtype: torch.dtype | None = None,
) -> NormForward:
    """y = x * rstd * gamma with rstd = 1 / sqrt(mean(x^2) + eps) (Zhang and Sennrich, 2019).

    Arithmetic is fp32.

    Args:
        x: (..., N) float32, bfloat16 or float16.
        gamma: (N,), of x's dtype or float32.
        eps: added to the mean of the squares.
        zero_centered_gamma: the factor is 1 + gamma.
        residual: like x: the norm is of x + residual, rounded to x's dtype, which is returned as `residual_out`.
        quantizer, usage: also cast y (from fp32, without rounding to `out_dtype` first) as `quantize` would.
        with_y: return y beside y_quantized; without a quantizer y is always returned.
        out_dtype: dtype of y and nominal dtype of y_quantized; None for x's.

    Returns:
        y, y_quantized, residual_out, mean (None), rstd (...,) fp32.
    """
    raise NotImplementedError


def _rmsnorm_bwd_shape(dy: Any, x: Any, gamma: Any, *_: Any, **__: Any) -> NormBackward:
    import torch

    return NormBackward(torch.empty_like(x), torch.empty_like(gamma), None)


def _layernorm_bwd_shape(dy: Any, x: Any, gamma: Any, *_: Any, **__: Any) -> NormBackward:
    import torch

    return _rmsnorm_bwd_shape(dy, x, gamma)._replace(dbeta=torch.empty_like(gamma))


@operator(
    family="norm",
    version=1,
    shape=_layernorm_bwd_shape,
    device="x.device",
    sizes={"hidden": "x.shape[-1]"},
    companion="layernorm_fwd",
    backward=True,
)
def layernorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward:
    """Gradients of `layernorm_fwd`.

    Args:
        dy: (..., N), gradient of y.
        x: what was normalized (`residual_out` where there was a residual).
        mean, rstd: from the forward.
        add: like x: the residual branch's gradient, added to dx before it is rounded.

    Returns:
        dx like x; dgamma and dbeta like gamma, summed in fp32 over all rows (dbeta also where beta was None: ignore
        it there).
    """
    raise NotImplementedError


@operator(
    family="norm",
    version=1,
    shape=_rmsnorm_bwd_shape,
    device="x.device",
    sizes={"hidden": "x.shape[-1]"},
    companion="rmsnorm_fwd",
    backward=True,
)
def rmsnorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    rstd: torch.Tensor,
    *,
    zero_centered_gamma: bool = False,
    add: torch.Tensor | None = None,
) -> NormBackward:
    """Gradients of `rmsnorm_fwd`.

    Args:
        dy: (..., N), gradient of y.
        x: what was normalized (`residual_out` where there was a residual).
        rstd: from the forward.
        add: like x: the residual branch's gradient, added to dx before it is rounded.

    Returns:
        dx like x; dgamma like gamma, summed in fp32 over all rows; dbeta None.
    """
    raise NotImplementedError
