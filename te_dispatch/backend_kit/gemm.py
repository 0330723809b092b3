# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The parameters of `gemm` that say what follows the product, as one `Epilogue`.

``@gemm_with_epilogue`` turns a function of it into an implementation, which has the operator's signature and checks its
arguments:

    @gemm_with_epilogue
    def gemm(a, b, layout, epilogue, split_accumulator):
        ...
        return Gemm(out, None, None)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import gemm as checks
from te_dispatch.ops.gemm import Epilogue
from te_dispatch.ops.results import Gemm

if TYPE_CHECKING:
    from te_dispatch.numerics.quantized import Operand


#: What an implementation has of the function that it is made of.
_NAMES = ("__module__", "__name__", "__qualname__", "__doc__")


def gemm_with_epilogue(multiply: Callable[..., Gemm]) -> Callable[..., Gemm]:
    """An implementation of `gemm`.

    Args:
        multiply: (a, b, layout, epilogue, split_accumulator), called by position with checked arguments.
    """

    def gemm(
        a: Operand,
        b: Operand,
        *,
        layout: str,
        alpha: float = 1.0,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        bias: torch.Tensor | None = None,
        epilogue: str | None = None,
        aux: Operand | None = None,
        aux_quantizer: Quantizer | None = None,
        out_dtype: torch.dtype | None = None,
        out_quantizer: Quantizer | None = None,
        split_accumulator: bool | None = None,
    ) -> Gemm:
        shape = checks.gemm(
            a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
        )  # fmt: skip
        dtype = out_dtype or (a.dtype if out is None else out.dtype)
        given = Epilogue(shape, dtype, alpha, out, accumulate, bias, epilogue, aux, aux_quantizer, out_quantizer)
        return multiply(a, b, layout, given, split_accumulator)

    functools.update_wrapper(gemm, multiply, _NAMES)
    del gemm.__wrapped__  # type: ignore[attr-defined]  # the signature is the operator's
    return gemm
