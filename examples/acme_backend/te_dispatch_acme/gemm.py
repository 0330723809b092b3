# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The x1's matrix products. Contracts: `te_dispatch.ops.gemm`."""

from __future__ import annotations

import numpy as np
import torch

from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import gemm as checks
from te_dispatch.ops.gemm import gemm_sizes, out_shape
from te_dispatch.ops.results import Gemm
from te_dispatch.ops.shapes import rows_of
from te_dispatch_acme import memory
from te_dispatch_acme.encodings import decode
from te_dispatch_acme.memory import F32

#: The FP8 unit reads this many bytes at a time.
_STEP = 16


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    layout: str,
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    aux: torch.Tensor | Quantized | None = None,
    aux_quantizer: Quantizer | None = None,
    out_dtype: torch.dtype | None = None,
    out_quantizer: Quantizer | None = None,
    split_accumulator: bool | None = None,
) -> Gemm:
    """Plain dtypes, fp32 sums. No epilogue: the manifest says so."""
    checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    product = _product(memory.single("a", a), memory.single("b", b), layout)
    return _finish(product, a, b, layout, alpha, out, accumulate, bias, out_dtype)


def fp8_matmul(
    a: Quantized,
    b: Quantized,
    *,
    layout: str,
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    aux: torch.Tensor | Quantized | None = None,
    aux_quantizer: Quantizer | None = None,
    out_dtype: torch.dtype | None = None,
    out_quantizer: Quantizer | None = None,
    split_accumulator: bool | None = None,
) -> Gemm:
    """FP8 operands with one scale each. Sums are fp32 throughout, so `split_accumulator` changes nothing."""
    checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    k = gemm_sizes(a, b, layout)[2]
    if k % _STEP:
        raise Declined(f"the FP8 unit needs a contracted size in multiples of {_STEP}, got {k}")
    a_values, a_scale = _read(a, "a")
    b_values, b_scale = _read(b, "b")
    # Codes are exact in fp32 and the scales factor out of the sum.
    product = _product(a_values, b_values, layout) * (a_scale * b_scale)
    return _finish(product, a, b, layout, alpha, out, accumulate, bias, out_dtype)


def _read(x: Quantized, name: str) -> tuple[F32, F32]:
    """Values without their scale, and the scale."""
    if x.row_data is None or x.row_scale_inv is None:
        raise Declined(f"{name} has no row-wise copy, the only one the x1 reads")
    return decode(x.row_data.numpy(), x.encoding), memory.single(f"{name}.row_scale_inv", x.row_scale_inv)


def operand_format(layout: str, operand: str, scaling: str) -> tuple[str, str]:
    """What modules ask for before they quantize (`te_dispatch.ops.gemm.operand_format`). The x1 transposes while it
    reads: in every layout the row-wise copy will do, and modules make no other."""
    return "row", "canonical"


def _product(a: F32, b: F32, layout: str) -> F32:
    """(m, n) of the flattened operands."""
    # Rows are counted, not left to reshape: of an empty operand it cannot tell.
    a2, b2 = (x.reshape(rows_of(x.shape), x.shape[-1]) for x in (a, b))
    with np.errstate(over="ignore", invalid="ignore"):
        product: F32 = np.matmul(a2.T if layout[0] == "T" else a2, b2.T if layout[1] == "T" else b2)
    return product


def _finish(
    product: F32,
    a: torch.Tensor | Quantized,
    b: torch.Tensor | Quantized,
    layout: str,
    alpha: float,
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> Gemm:
    """alpha, bias, accumulate in fp32, then one rounding."""
    z = product.reshape(out_shape(a, b, layout))
    if alpha != 1.0:
        with np.errstate(invalid="ignore"):  # 0 times Inf is NaN
            z = z * np.float32(alpha)
    if bias is not None:
        z = z + memory.single("bias", bias)
    if out is None:
        return Gemm(memory.result("out", z, memory.dtype_of("out_dtype", out_dtype, a.dtype), a.device), None, None)
    if accumulate:
        z = z + memory.single("out", out)
    return Gemm(memory.write(out, z), None, None)
