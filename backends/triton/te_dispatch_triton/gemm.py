# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products. Contracts: `te_dispatch.ops.gemm`.

`gemm` multiplies plain dtypes, `gemm_codes` quantized operands on units of the chip that know them, `gemm_decoded` any
quantized operands. One launch does the product and what follows it; only sums over a dimension that the product does
not have (`dbias`) take more.

fp32 operands are multiplied in fp32, or in TF32 where PyTorch's setting for its own products allows that and the chip
has it (``torch.set_float32_matmul_precision``, ``torch.backends.cuda.matmul``).
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.backend_kit.products import allows_tf32
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import gemm as checks
from te_dispatch.ops.results import Gemm
from te_dispatch_triton.gemm_plans import candidates, force
from te_dispatch_triton.gemm_product import run, run_plain
from te_dispatch_triton.prepared import prepared

__all__ = ["allows_tf32", "candidates", "force", "gemm", "gemm_codes", "gemm_decoded"]

Operand = torch.Tensor | Quantized


@prepared(also=allows_tf32)
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
    aux: torch.Tensor | Quantized | None = None,
    aux_quantizer: Quantizer | None = None,
    out_dtype: torch.dtype | None = None,
    out_quantizer: Quantizer | None = None,
    split_accumulator: bool | None = None,
) -> Gemm:
    """fp32, bf16 and fp16 operands."""
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    tf32 = a.dtype is torch.float32 and allows_tf32()
    dtype = out_dtype or (a.dtype if out is None else out.dtype)
    bare = epilogue is None and out_quantizer is None and (out is None or out.is_contiguous())
    if bare and a.is_contiguous() and b.is_contiguous():
        kind = (layout, tf32, False, False, a.dtype)
        target = run_plain(a, b, None, None, (a, b), kind, shape, alpha, out, accumulate, bias, dtype)
        return Gemm(target, None, None)
    return run(
        a, b, layout, tf32, False, False, shape, alpha, out, accumulate, bias, epilogue, aux, aux_quantizer, dtype,
        out_quantizer,
    )  # fmt: skip


@prepared("gemm")
def gemm_codes(
    a: Operand,
    b: Operand,
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
    """Quantized operands on the chip's units, through their copies contracted along the last dimension. With one scale
    per tensor the other copy serves too, decoded. `split_accumulator`: `None` accumulates fast; partial sums of blocks
    are always promoted.
    """
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    return _codes(
        a, b, layout, bool(split_accumulator), False, shape, alpha, out, accumulate, bias, epilogue, aux, aux_quantizer,
        out_dtype or (a.dtype if out is None else out.dtype), out_quantizer,
    )  # fmt: skip


@prepared("gemm")
def gemm_decoded(
    a: Operand,
    b: Operand,
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
    """Quantized operands of any encoding and scaling on any chip: decoded by the kernel, multiplied in 16 bits (which
    hold the codes exactly) and summed in fp32, as `split_accumulator` would.
    """
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    return _codes(
        a, b, layout, False, True, shape, alpha, out, accumulate, bias, epilogue, aux, aux_quantizer,
        out_dtype or (a.dtype if out is None else out.dtype), out_quantizer,
    )  # fmt: skip


def _codes(
    a: Any,
    b: Any,
    layout: str,
    split: bool,
    decoded: bool,
    shape: tuple[int, ...],
    alpha: float,
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
    epilogue: str | None,
    aux: Operand | None,
    aux_quantizer: Quantizer | None,
    dtype: torch.dtype,
    out_quantizer: Quantizer | None,
) -> Gemm:
    if (
        epilogue is None
        and out_quantizer is None
        and a.global_scale_inv is None
        and (out is None or out.is_contiguous())
    ):
        x, x_scale = (a.row_data, a.row_scale_inv) if layout[0] == "N" else (a.col_data, a.col_scale_inv)
        y, y_scale = (b.row_data, b.row_scale_inv) if layout[1] == "T" else (b.col_data, b.col_scale_inv)
        if (
            x is not None and y is not None and a.scale_layout == b.scale_layout == CANONICAL_SCALES
            and x.is_contiguous() and y.is_contiguous() and x_scale.is_contiguous() and y_scale.is_contiguous()
        ):  # fmt: skip
            kind = (layout, False, split, decoded, a.encoding, b.encoding, a.scaling, b.scaling)
            target = run_plain(x, y, x_scale, y_scale, (a, b), kind, shape, alpha, out, accumulate, bias, dtype)
            return Gemm(target, None, None)
    return run(
        a, b, layout, False, split, decoded, shape, alpha, out, accumulate, bias, epilogue, aux, aux_quantizer, dtype,
        out_quantizer,
    )  # fmt: skip
