# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations and their gradients, in fp32 with one rounding. Formulas and contracts: `te_dispatch.ops.activation`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dispatch.backend_kit.call_plans import Planned, planned
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.activation import GATED
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import ActivationBackward, ActivationForward
from te_dispatch_cuda import sources
from te_dispatch_cuda.casts import cast, evaluation
from te_dispatch_cuda.memory import dense
from te_dispatch_cuda.prepared import Made
from te_dispatch_cuda.quantize_forms import values

_F32 = torch.float32


@planned()
def activation_fwd(
    x: torch.Tensor | Quantized,
    *,
    kind: str,
    params: tuple[float, float] | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_out: bool = False,
    out_dtype: torch.dtype | None = None,
) -> ActivationForward | Planned:
    """Any activation, with an optional cast from fp32, in one pass (two for a cast by the current amax)."""
    checks.activation_fwd(x, kind, params, quantizer, usage, out_dtype)
    dtype = out_dtype or x.dtype
    decodable = _decodable(x)
    if decodable is not x:
        return activation_fwd(
            decodable, kind=kind, params=params, quantizer=quantizer, usage=usage, with_out=with_out, out_dtype=dtype
        )
    shape = (*x.shape[:-1], x.shape[-1] // 2) if kind in GATED else tuple(x.shape)
    out = Made("out", shape, dtype) if quantizer is None or with_out else None
    return _planned(
        sources.forward(x, kind, params), _read(x), shape, dtype, quantizer, usage, out, None,
        lambda record: ActivationForward(out, record),  # type: ignore[arg-type]
    )  # fmt: skip


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
    return _backward(dy, x, kind, params, quantizer, usage, with_dx, with_dbias, None)  # type: ignore[return-value]


@planned("activation_bwd")
def _backward(
    dy: torch.Tensor,
    x: torch.Tensor | Quantized,
    kind: str,
    params: tuple[float, float] | None,
    quantizer: Quantizer | None,
    usage: str,
    with_dx: bool,
    with_dbias: bool,
    dtype: torch.dtype | None,
) -> ActivationBackward | Planned:
    """The gradient with results of another dtype than dy's, where `dtype` says so: dy was widened to be read."""
    if dtype is None:
        checks.activation_bwd(dy, x, kind, params, quantizer, usage)
    given, result = (dy, x), dtype or dy.dtype
    dy, x = dense(dy), _decodable(x)
    # Codes beside other dtypes than bf16 are not worth kernels of their own.
    if x.dtype != dy.dtype if isinstance(x, torch.Tensor) else dy.dtype != torch.bfloat16:
        x = values(x, _F32) if isinstance(x, Quantized) else sources.in_dtype(x, _F32)
        dy = sources.in_dtype(dy, _F32)
    if dy is not given[0] or x is not given[1]:
        return _backward(dy, x, kind, params, quantizer, usage, with_dx, with_dbias, result)
    shape = tuple(x.shape)
    dx = Made("dx", shape, result) if quantizer is None or with_dx else None
    dbias = Made("dbias", shape[-1:], result) if with_dbias else None
    return _planned(
        sources.backward(dy, x, kind, params), (dy, *_read(x)), shape, result, quantizer, usage, dx, dbias,
        lambda record: ActivationBackward(dx, record, dbias),  # type: ignore[arg-type]
    )  # fmt: skip


def plan_backward(varying: Sequence[str], **given: Any) -> Any:
    return _backward.plans.repeat(varying, dtype=None, **given)  # type: ignore[attr-defined]


def _read(x: torch.Tensor | Quantized) -> tuple[torch.Tensor, ...]:
    """The tensors of an operand that is `_decodable`."""
    if isinstance(x, Quantized):
        assert x.row_data is not None and x.row_scale_inv is not None
        return x.row_data, x.row_scale_inv
    return (x,)


def _planned(
    source: sources.Source,
    read: tuple[torch.Tensor, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quantizer: Quantizer | None,
    usage: str,
    out: Made | None,
    dbias: Made | None,
    result: Callable[[Any], Any],
) -> Planned:
    """A cast of a source, which writes its values and sums where they are asked for."""
    if quantizer is None:
        return evaluation(source, read, out, dbias, result(None))
    return cast(source, read, shape, dtype, quantizer, usage, result, out=out, dbias=dbias)


def _decodable(x: torch.Tensor | Quantized) -> torch.Tensor | Quantized:
    """x as `sources` reads it: dense, or a tensor-scaled record with row-wise codes; other records as fp32 values."""
    if not isinstance(x, Quantized):
        return dense(x)
    if x.scaling == "tensor" and x.row_data is not None and x.row_data.is_contiguous():
        return x
    return values(x, _F32)
