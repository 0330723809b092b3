# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations and their gradients, in fp32 with one rounding. Formulas and contracts: `te_dispatch.ops.activation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.activation import GATED
from te_dispatch.ops.checks import rows as checks
from te_dispatch.ops.results import ActivationBackward, ActivationForward
from te_dispatch_cuda import sources
from te_dispatch_cuda.casts import prepare_cast, prepare_evaluation
from te_dispatch_cuda.codes import cast_facts
from te_dispatch_cuda.memory import dense
from te_dispatch_cuda.prepared import Calls, Made
from te_dispatch_cuda.quantize_forms import values

_F32 = torch.float32
_FORWARD, _BACKWARD = Calls(), Calls()


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
    facts, state = (None, ()) if quantizer is None else cast_facts(quantizer)
    read, tensors = _read(x)
    device = tensors[0].device
    key = (read, shape, dtype, device, kind, _exact(params), facts, usage, with_out)
    call = _FORWARD.get(key)
    if call is None:
        out = Made("out", shape, dtype) if quantizer is None or with_out else None
        call = _FORWARD.keep(
            key,
            _prepare(
                sources.forward(x, kind, params), shape, dtype, device, quantizer, usage, out, None,
                lambda record: ActivationForward(out, record),
            ),
        )  # fmt: skip
    return call(*tensors, *state)  # type: ignore[no-any-return]


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
    facts, state = (None, ()) if quantizer is None else cast_facts(quantizer)
    read, tensors = _read(x)
    key = (read, dy.dtype, shape, dtype, device, kind, _exact(params), facts, usage, with_dx, with_dbias)
    call = _BACKWARD.get(key)
    if call is None:
        dx = Made("dx", shape, dtype) if quantizer is None or with_dx else None
        dbias = Made("dbias", shape[-1:], dtype) if with_dbias else None
        call = _BACKWARD.keep(
            key,
            _prepare(
                sources.backward(dy, x, kind, params), shape, dtype, device, quantizer, usage, dx, dbias,
                lambda record: ActivationBackward(dx, record, dbias),
            ),
        )  # fmt: skip
    return call(dy, *tensors, *state)  # type: ignore[no-any-return]


def _exact(params: tuple[float, float] | None) -> Any:
    """For a key: 0.0 and -0.0 are equal."""
    return None if params is None else (*params, str(params))


def _read(x: torch.Tensor | Quantized) -> tuple[Any, tuple[Any, ...]]:
    """What tells kinds of operands apart, but for shape and device; and the tensors that they are."""
    if isinstance(x, Quantized):
        return x.encoding, (x.row_data, x.row_scale_inv)
    return x.dtype, (x,)


def _prepare(
    source: sources.Source,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    quantizer: Quantizer | None,
    usage: str,
    out: Made | None,
    dbias: Made | None,
    result: Callable[[Any], Any],
) -> Any:
    """A call that casts a source, and writes its values and sums where they are asked for."""
    if quantizer is None:
        return prepare_evaluation(source, device, out, dbias, result(None))
    return prepare_cast(source, shape, dtype, device, quantizer, usage, result, out=out, dbias=dbias)


def _decodable(x: torch.Tensor | Quantized) -> torch.Tensor | Quantized:
    """x as `sources` reads it: dense, or a tensor-scaled record with row-wise codes; other records as fp32 values."""
    if not isinstance(x, Quantized):
        return dense(x)
    if x.scaling == "tensor" and x.row_data is not None and x.row_data.is_contiguous():
        return x
    return values(x, _F32)


# What follows serves `te_dispatch.core.repeating`: calls that were just made, so that each is kept. A call for tensors
# that look like theirs has their key; the quantizer's tensors are the same ones.


def plan_forward(
    varying: tuple[str, ...],
    x: Any,
    kind: str,
    params: Any,
    quantizer: Any,
    usage: str,
    with_out: bool,
    out_dtype: torch.dtype | None,
) -> Any:
    if varying != ("x",) or isinstance(x, Quantized) or not x.is_contiguous():
        return None
    shape = (*x.shape[:-1], x.shape[-1] // 2) if kind in GATED else tuple(x.shape)
    facts, state = (None, ()) if quantizer is None else cast_facts(quantizer)
    key = (x.dtype, shape, out_dtype or x.dtype, x.device, kind, _exact(params), facts, usage, with_out)
    call = _FORWARD.get(key)
    return None if call is None else lambda x: call(x, *state)


def plan_backward(
    varying: tuple[str, ...],
    dy: torch.Tensor,
    x: Any,
    kind: str,
    params: Any,
    quantizer: Any,
    usage: str,
    with_dx: bool,
    with_dbias: bool,
) -> Any:
    if varying != ("dy", "x") or isinstance(x, Quantized) or x.dtype != dy.dtype:
        return None
    if not (dy.is_contiguous() and x.is_contiguous()):
        return None
    facts, state = (None, ()) if quantizer is None else cast_facts(quantizer)
    key = (
        x.dtype, dy.dtype, tuple(x.shape), dy.dtype, dy.device, kind, _exact(params), facts, usage, with_dx, with_dbias,
    )  # fmt: skip
    call = _BACKWARD.get(key)
    return None if call is None else lambda dy, x: call(dy, x, *state)
