# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations and their gradients, in fp32 with one rounding. Formulas and contracts: `te_dispatch.ops.activation`."""

from __future__ import annotations

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.activation import GATED
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import ActivationBackward, ActivationForward
from te_dispatch_cuda import sources
from te_dispatch_cuda.memory import dense, empty
from te_dispatch_cuda.quantize import cast, evaluate
from te_dispatch_cuda.quantize_forms import values

_F32 = torch.float32


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
    """Any activation, with an optional cast from fp32, in one pass (two for a cast by the current amax)."""
    checks.activation_fwd(x, kind, params, quantizer, usage, out_dtype)
    dtype = out_dtype or x.dtype
    shape = (*x.shape[:-1], x.shape[-1] // 2) if kind in GATED else tuple(x.shape)
    x = _decodable(x)
    source = sources.forward(x, kind, params)
    out = empty("out", shape, dtype, x.device) if quantizer is None or with_out else None
    return ActivationForward(out, _deliver(source, shape, dtype, x.device, quantizer, usage, out, None))


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
    dtype, shape, device = dy.dtype, tuple(x.shape), dy.device
    dy, x = dense(dy), _decodable(x)
    if isinstance(x, Quantized):
        if dtype != torch.bfloat16:  # codes beside other dtypes are not worth kernels of their own
            dy, x = sources.in_dtype(dy, _F32), values(x, _F32)
    elif x.dtype != dtype:
        dy, x = sources.in_dtype(dy, _F32), sources.in_dtype(x, _F32)
    source = sources.backward(dy, x, kind, params)
    dx = empty("dx", shape, dtype, device) if quantizer is None or with_dx else None
    dbias = empty("dbias", shape[-1:], dtype, device) if with_dbias else None
    return ActivationBackward(dx, _deliver(source, shape, dtype, device, quantizer, usage, dx, dbias), dbias)


def _deliver(
    source: sources.Source,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    quantizer: Quantizer | None,
    usage: str,
    out: torch.Tensor | None,
    dbias: torch.Tensor | None,
) -> Quantized | None:
    """Cast a source, and write its values and sums where they are asked for."""
    if quantizer is None:
        evaluate(source, device, out, dbias)
        return None
    return cast(source, shape, dtype, device, quantizer, usage, out=out, dbias=dbias)


def _decodable(x: torch.Tensor | Quantized) -> torch.Tensor | Quantized:
    """x as `sources` reads it: dense, or a tensor-scaled record with row-wise codes; other records as fp32 values."""
    if not isinstance(x, Quantized):
        return dense(x)
    if x.scaling == "tensor" and x.row_data is not None and x.row_data.is_contiguous():
        return x
    return values(x, _F32)
