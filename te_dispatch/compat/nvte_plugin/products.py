# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products, in high precision and of tensors with one FP8 scale.

The native function reads matrices by columns, as cuBLAS does: its A is the operators' `b`, its B the operators' `a`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.compat.nvte_plugin.passing import floats, high_precision, require, torch_dtype
from te_dispatch.compat.nvte_plugin.records import is_float8, record
from te_dispatch.core import scopes
from te_dispatch.numerics.quantized import Quantized

#: (transa, transb) -> the layout of B and A by rows.
_LAYOUTS = {(True, False): "NT", (False, False): "NN", (False, True): "TN"}


@functools.lru_cache(maxsize=256)
def _copies(token: Any, device: torch.device, a: str, b: str, layout: str) -> tuple[str, str]:
    """Which copy of each operand the product reads that is bound for these encodings.

    Args:
        token: of the bindings in force, so that a policy of its own has an answer of its own.
    """
    (first, _), (second, _) = ops.gemm_operand_format(device, a, "tensor", b, "tensor", layout)
    return first, second


def _needs_copies(a: Quantized, b: Quantized, layout: str) -> None:
    """Pass on records without a copy that is read: Transformer Engine makes those that its own product reads."""
    needed = _copies(scopes.capture().token, a.device, a.encoding, b.encoding, layout)
    for operand, copy in zip((a, b), needed):
        codes = operand.row_data if copy == "row" else operand.col_data
        require(codes is not None, f"an operand without its {copy}-wise copy in {layout}")


def _operands(A: Any, B: Any, layout: str) -> tuple[Any, Any]:
    """The operators' a and b."""
    if is_float8(A) or is_float8(B):
        a, b = record(B), record(A)
        _needs_copies(a, b, layout)
        return a, b
    floats(A, B)
    require(A.dtype == B.dtype, f"a product of {A.dtype} and {B.dtype}")
    return B, A


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: Any,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """The product, the bias's gradient, the input of GELU, and the extra output.

    With `grad`, a bias asks for its gradient, the sum over the rows of B. The workspace is the native library's: an
    implementation has its own.
    """
    high_precision(quantizer)
    layout = _LAYOUTS.get((bool(transA), bool(transB)), "")
    require(bool(layout), "two transposed operands")
    a, b = _operands(A, B, layout)
    fp8 = isinstance(a, Quantized)
    require(comm_overlap is None and extra_output is None and not bulk_overlap, "overlapped communication")
    require(beta is None or beta == float(accumulate), f"beta={beta} with accumulate={accumulate}")
    require(not (gelu and (grad or gelu_in is not None)), "GELU in a gradient, or with a tensor to write to")
    require(not (fp8 and (gelu or (grad and bias is not None))), "GELU or the gradient of a bias in FP8")
    if D is not None:
        floats(D)
    dtype = D.dtype if D is not None else torch_dtype(output_dtype) if output_dtype is not None else a.dtype
    dbias_dtype = None
    if bias is not None:
        floats(bias)
        if grad:
            require(layout == "TN", "the gradient of a bias in a product that is no weight gradient")
            dbias_dtype = torch_dtype(bias_type)
            require(dbias_dtype == dtype or dtype == torch.float32, f"a bias of {dbias_dtype} beside {dtype}")
    out, aux, dbias = ops.gemm(
        a,
        b,
        layout=layout,
        alpha=alpha,
        out=D,
        accumulate=bool(accumulate),
        bias=None if grad else bias,
        epilogue="gelu" if gelu else "bgrad_a" if dbias_dtype is not None else None,
        out_dtype=dtype,
        split_accumulator=bool(use_split_accumulator) if fp8 else None,
    )
    return [out, dbias.to(dbias_dtype) if dbias_dtype is not None else None, aux, None]


ADAPTERS: dict[str, Callable[..., Any]] = {"generic_gemm": generic_gemm}
