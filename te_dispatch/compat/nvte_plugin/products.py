# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products in high precision.

The native function reads matrices by columns, as cuBLAS does: its A is the operators' `b`, its B the operators' `a`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.compat.nvte_plugin.passing import floats, high_precision, require, torch_dtype

#: (transa, transb) -> the layout of B and A by rows.
_LAYOUTS = {(True, False): "NT", (False, False): "NN", (False, True): "TN"}


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
    implementation has its own. `use_split_accumulator` is about FP8.
    """
    high_precision(quantizer)
    floats(A, B)
    layout = _LAYOUTS.get((bool(transA), bool(transB)))
    require(layout is not None, "two transposed operands")
    require(A.dtype == B.dtype, f"a product of {A.dtype} and {B.dtype}")
    require(comm_overlap is None and extra_output is None and not bulk_overlap, "overlapped communication")
    require(beta is None or beta == float(accumulate), f"beta={beta} with accumulate={accumulate}")
    require(not (gelu and (grad or gelu_in is not None)), "GELU in a gradient, or with a tensor to write to")
    if D is not None:
        floats(D)
    dtype = D.dtype if D is not None else torch_dtype(output_dtype) if output_dtype is not None else A.dtype
    dbias_dtype = None
    if bias is not None:
        floats(bias)
        if grad:
            require(layout == "TN", "the gradient of a bias in a product that is no weight gradient")
            dbias_dtype = torch_dtype(bias_type)
            require(dbias_dtype == dtype or dtype == torch.float32, f"a bias of {dbias_dtype} beside {dtype}")
    out, aux, dbias = ops.gemm(
        B,
        A,
        layout=layout,
        alpha=alpha,
        out=D,
        accumulate=bool(accumulate),
        bias=None if grad else bias,
        epilogue="gelu" if gelu else "bgrad_a" if dbias_dtype is not None else None,
        out_dtype=dtype,
    )
    return [out, dbias.to(dbias_dtype) if dbias_dtype is not None else None, aux, None]


ADAPTERS: dict[str, Callable[..., Any]] = {"generic_gemm": generic_gemm}
