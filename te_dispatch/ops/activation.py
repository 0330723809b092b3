# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations of the MLP, gated ones included.

With s the logistic function and, for gated kinds, x = [u, v] split in halves along the last dimension:

============== =====================================================================================
kind           out
============== =====================================================================================
gelu           0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel, 2016, tanh form)
qgelu          x s(1.702 x)
relu, srelu    max(x, 0), max(x, 0)^2
silu           x s(x)
geglu, qgeglu, reglu, sreglu, swiglu   act(u) v, with gelu, qgelu, relu, srelu, silu (Shazeer, 2020)
glu            s(u) v
clamped_swiglu u' s(alpha u') (v' + 1) with u' = min(u, limit), v' = clamp(v, -limit, limit)
============== =====================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_dispatch.core.facts import Derived, fact
from te_dispatch.core.operator import operator
from te_dispatch.ops.results import ActivationBackward, ActivationForward
from te_dispatch.ops.shapes import USAGES, empty_quantized

if TYPE_CHECKING:
    import torch

    from te_dispatch.numerics.quantized import Operand
    from te_dispatch.numerics.quantizers import Quantizer

PLAIN = ("gelu", "qgelu", "relu", "srelu", "silu")
GATED = ("geglu", "qgeglu", "reglu", "sreglu", "swiglu", "glu", "clamped_swiglu")
KINDS = PLAIN + GATED

#: Defaults of `clamped_swiglu`: (limit, alpha).
CLAMPED_SWIGLU = (7.0, 1.702)


def _forward_shape(
    x: Any,
    *,
    kind: str,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_out: bool = False,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> ActivationForward:
    import torch

    shape = (*x.shape[:-1], x.shape[-1] // 2) if kind in GATED else tuple(x.shape)
    dtype = out_dtype or x.dtype
    quantized = None if quantizer is None else empty_quantized(shape, quantizer, usage, dtype, x.device)
    out = torch.empty(shape, dtype=dtype, device=x.device) if quantizer is None or with_out else None
    return ActivationForward(out, quantized)


@operator(
    family="activation",
    version=1,
    shape=_forward_shape,
    device="x.device",
    options=("params",),
    words={"kind": KINDS, "usage": USAGES},
    sizes={"k": "x.shape[-1]"},
    companion="activation_bwd",
    companion_facts=lambda call: Derived(
        call,
        {
            "dy.dtype": fact("out_dtype", "x.dtype"),
            **{name: fact(name) for name in ("x.dtype", "x.scaling", "kind", "params", "k")},
        },
    ),
    mutates=("quantizer.amax",),
)
def activation_fwd(
    x: Operand,
    *,
    kind: str,
    params: tuple[float, float] | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_out: bool = False,
    out_dtype: torch.dtype | None = None,
) -> ActivationForward:
    """Apply an activation, computed in fp32 and rounded once, and optionally cast the result.

    Args:
        x: (..., K) float32, bfloat16, float16, or `Quantized` (its values are used).
        kind: formulas in ``docs/numerics.md``, Formulas; gated kinds need an even K and give K / 2.
        params: ``clamped_swiglu`` only: (limit, alpha), None for (7, 1.702).
        quantizer, usage: also cast the result (from fp32) as `quantize` would.
        with_out: return `out` beside `out_quantized`; without a quantizer it is always returned.
        out_dtype: None for x's (nominal) dtype.

    Raises:
        ValueError: an unknown kind (lists them), or an odd K for a gated one.
    """
    raise NotImplementedError


def _backward_shape(
    dy: Any,
    x: Any,
    *,
    kind: str,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_dx: bool = False,
    with_dbias: bool = False,
    **_: Any,
) -> ActivationBackward:
    import torch

    dtype = dy.dtype
    quantized = None if quantizer is None else empty_quantized(tuple(x.shape), quantizer, usage, dtype, x.device)
    dx = torch.empty(x.shape, dtype=dtype, device=x.device) if quantizer is None or with_dx else None
    dbias = torch.empty((x.shape[-1],), dtype=dtype, device=x.device) if with_dbias else None
    return ActivationBackward(dx, quantized, dbias)


@operator(
    family="activation",
    version=1,
    shape=_backward_shape,
    device="x.device",
    options=("params",),
    words={"kind": KINDS, "usage": USAGES},
    sizes={"k": "x.shape[-1]"},
    companion="activation_fwd",
    backward=True,
    mutates=("quantizer.amax",),
)
def activation_bwd(
    dy: torch.Tensor,
    x: Operand,
    *,
    kind: str,
    params: tuple[float, float] | None = None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_dx: bool = False,
    with_dbias: bool = False,
) -> ActivationBackward:
    """Gradient of `activation_fwd`, computed in fp32.

    Args:
        dy: gradient of the forward's result.
        x: the forward's input.
        kind, params: as in the forward.
        quantizer, usage: also cast dx (from fp32).
        with_dx: return dx beside dx_quantized; without a quantizer it is always returned.
        with_dbias: also return dbias (K,): dx summed in fp32 over all other dimensions.

    Returns:
        dx (of x's shape and dy's dtype), dx_quantized, dbias (dy's dtype).
    """
    raise NotImplementedError
