# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products that are made again and again (`te_dispatch.core.repeating`): of operands that look like those of one call.

Their key (`gemm._product_key`) is that call's but for addresses, so it is made once. A call that finds the bias or
scales at less aligned addresses, or `CALLS` forgotten since, is made as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.checks import gemm as checks
from te_dispatch_cuda.gemm_plans import CALLS

_VARYING = (("a", "b"), ("a", "b", "bias"))
_SUMS = (None, "bgrad_a", "bgrad_b")
#: Tensors that a fused product takes behind those of any.
_NO_MORE = (None,) * 8


def repeated(
    gemm: Callable[..., Any], key_of: Callable[..., Any], varying: tuple[str, ...], given: dict[str, Any]
) -> Callable[..., Any] | None:
    """A function of a, b and perhaps bias; None where such products are not served past `gemm`.

    Args:
        gemm: makes any of them. given: all arguments of one.
        key_of: (a, b, shape, arguments) -> the key of the product, its data and its scales; None if it is not served.
    """
    options = {name: value for name, value in given.items() if name not in ("a", "b", "bias")}
    unusual = ("out", "aux", "aux_quantizer", "out_quantizer")
    if varying not in _VARYING or any(options[name] is not None for name in unusual):
        return None
    if options["epilogue"] not in _SUMS:
        return None
    a, b, bias = given["a"], given["b"], given["bias"]
    if ("bias" in varying) != (bias is not None) or (bias is not None and not bias.is_contiguous()):
        return None
    shape = checks.gemm(
        a, b, options["layout"], None, options["accumulate"], bias, options["epilogue"], None, None,
        options["out_dtype"], None, options["alpha"],
    )  # fmt: skip
    key = key_of(a, b, shape, given)
    call = None if key is None else CALLS.get(key)
    if call is None:
        return None
    layout, records = options["layout"], isinstance(a, Quantized)
    generation, low = CALLS.generation, 0 if bias is None else bias.data_ptr() & 15
    more = () if options["epilogue"] is None else _NO_MORE

    def product(a: Any, b: Any, bias: torch.Tensor | None = None) -> Any:
        if CALLS.generation == generation and (bias is None or bias.data_ptr() & 15 == low):
            a_data, a_scale, b_data, b_scale = copies(a, b, layout) if records else (a, None, b, None)
            result = call(a_data, b_data, a_scale, b_scale, bias, None, *more)
            if result is not None:
                return result
        return gemm(a, b, bias=bias, **options)

    return product


def copies(a: Quantized, b: Quantized, layout: str) -> tuple[Any, Any, Any, Any]:
    """Data and scale of a, then of b, as `layout` reads them; None for what there is none of."""
    if layout == "NT":
        return a.row_data, a.row_scale_inv, b.row_data, b.row_scale_inv
    if layout == "NN":
        return a.row_data, a.row_scale_inv, b.col_data, b.col_scale_inv
    return a.col_data, a.col_scale_inv, b.col_data, b.col_scale_inv
