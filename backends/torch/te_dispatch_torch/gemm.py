# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products. Contracts: `te_dispatch.ops.gemm`.

Three implementations share the epilogue arithmetic: `matmul` for plain dtypes, `scaled_mm` for FP8 matrix units with
one scale per tensor, `emulated` for every quantized operand on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import gemm as checks
from te_dispatch.ops.gemm import operand_format
from te_dispatch.ops.results import Gemm
from te_dispatch_torch.activation import gelu_grad
from te_dispatch_torch.encodings import DTYPES, decode
from te_dispatch_torch.quantize import cast, dequantize, values

Operand = torch.Tensor | Quantized


def matmul(
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
    """Plain dtypes. On an accelerator torch.backends.cuda.matmul's reduced-precision flags apply."""
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    dtype = out_dtype or (out.dtype if out is not None else a.dtype)
    a2, b2 = _matrices(a, b, layout)
    simple = alpha == 1.0 and epilogue is None and out_quantizer is None and not accumulate
    if simple and dtype == a2.dtype and (bias is None or bias.dtype == dtype):
        product = torch.mm(a2, b2) if bias is None else torch.addmm(bias, a2, b2)
        product = product.view(shape)
        return Gemm(product if out is None else out.copy_(product), None, None)
    plain_sum = epilogue in (None, "bgrad_a", "bgrad_b") and bias is None and out_quantizer is None
    in_place = out is not None and out.dtype == a2.dtype == torch.float32 and out.is_contiguous()
    if accumulate and plain_sum and out is not None and in_place:
        out.view(-1, shape[-1]).addmm_(a2, b2, alpha=alpha)
        return Gemm(out, None, _operand_sum(a, b, epilogue, dtype))
    z = _product(a2, b2)
    return _finish(z, a, b, shape, dtype, alpha, out, accumulate, bias, epilogue, aux, aux_quantizer, out_quantizer)


def emulated(
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
    """Quantized operands of any scaling: decode, multiply, sum in fp32, as `split_accumulator` would."""
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    dtype = out_dtype or (out.dtype if out is not None else a.dtype)
    if _per_tensor(a) and _per_tensor(b):
        # Codes are exact in bf16, and the scales factor out of the sum.
        on_units = torch.bfloat16 if a.device.type == "cuda" else torch.float32
        a2, b2 = _codes(a, layout[0] == "T", on_units), _codes(b, layout[1] == "T", on_units)
        z = _product(a2, b2) * (_scale(a) * _scale(b))
    else:
        a2, b2 = _matrices(_values(a, layout, "a"), _values(b, layout, "b"), layout)
        z = torch.mm(a2, b2)
    return _finish(z, a, b, shape, dtype, alpha, out, accumulate, bias, epilogue, aux, aux_quantizer, out_quantizer)


def scaled_mm(
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
    """FP8 matrix units, through the copies contracted along their last dimension. `None` accumulates fast."""
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    dtype = out_dtype or (out.dtype if out is not None else a.dtype)
    a8, a_scale = _contracted_last(a, layout, "a")
    b8, b_scale = _contracted_last(b, layout, "b")
    if a8.shape[0] == 0 or a8.shape[1] == 0 or a8.shape[1] % 16 or b8.shape[0] % 16:
        raise Declined(f"FP8 units need K and N in multiples of 16, got K={a8.shape[1]} and N={b8.shape[0]}")
    if alpha != 1.0:
        a_scale = a_scale * alpha
    simple = epilogue is None and out_quantizer is None and not accumulate
    fused_bias = bias if bias is not None and bias.dtype == dtype == torch.bfloat16 else None
    direct = simple and (bias is None or fused_bias is not None)
    product = torch._scaled_mm(
        a8, b8.t(), a_scale, b_scale, bias=fused_bias if direct else None,
        out_dtype=dtype if direct else torch.float32, use_fast_accum=not split_accumulator,
    )  # fmt: skip
    if direct:
        product = product.view(shape)
        return Gemm(product if out is None else out.copy_(product), None, None)
    return _finish(product, a, b, shape, dtype, 1.0, out, accumulate, bias, epilogue, aux, aux_quantizer, out_quantizer)


def _matrices(a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, k) and (k, n) views."""
    a2, b2 = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return a2.t() if layout[0] == "T" else a2, b2.t() if layout[1] == "T" else b2


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """fp32 product of (m, k) and (k, n): low-precision inputs stay so where the units return fp32 sums."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def _per_tensor(x: Operand) -> bool:
    return isinstance(x, Quantized) and x.scaling == "tensor"


def _scale(x: Quantized) -> torch.Tensor:
    scale = x.row_scale_inv if x.row_scale_inv is not None else x.col_scale_inv
    if scale is None:
        raise ValueError("a and b must carry scale_inv, got a record without")
    return scale


def _codes(x: Quantized, transposed: bool, dtype: torch.dtype) -> torch.Tensor:
    """The matrix of undecoded scale that a layout multiplies: x (M, K), or its transpose."""
    if x.row_data is not None:
        found = decode(x.row_data.reshape(-1, x.shape[-1]), x.encoding, dtype)
        return found.t() if transposed else found
    if x.col_data is None:
        raise ValueError("a and b must have a row-wise or a column-wise copy, got a record with neither")
    found = decode(x.col_data, x.encoding, dtype)
    return found if transposed else found.t()


def _values(x: Operand, layout: str, operand: str) -> torch.Tensor:
    """fp32 values: of the copy blocked along the contracted dimension, or of the only one there is."""
    if not isinstance(x, Quantized):
        return x.float()
    usage, _ = operand_format(layout, operand, x.scaling)
    if (x.row_data if usage == "row" else x.col_data) is None:
        usage = "column" if usage == "row" else "row"
    return values(x, usage)


def _contracted_last(x: Quantized, layout: str, operand: str) -> tuple[torch.Tensor, torch.Tensor]:
    usage, _ = operand_format(layout, operand, x.scaling)
    data, scale = (x.row_data, x.row_scale_inv) if usage == "row" else (x.col_data, x.col_scale_inv)
    if data is None or scale is None:
        raise Declined(f"{operand} has no {usage}-wise copy, which layout {layout} reads")
    return data.reshape(-1, data.shape[-1]).view(DTYPES[x.encoding]), scale


def _operand_sum(a: Operand, b: Operand, epilogue: str | None, dtype: torch.dtype) -> torch.Tensor | None:
    if epilogue not in ("bgrad_a", "bgrad_b"):
        return None
    operand = a if epilogue == "bgrad_a" else b
    rows = dequantize(operand, dtype=torch.float32) if isinstance(operand, Quantized) else operand
    return rows.reshape(-1, rows.shape[-1]).sum(0, dtype=torch.float32).to(dtype)


def _finish(
    z: torch.Tensor,
    a: Operand,
    b: Operand,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    alpha: float,
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
    epilogue: str | None,
    aux: Operand | None,
    aux_quantizer: Quantizer | None,
    out_quantizer: Quantizer | None,
) -> Gemm:
    """alpha, bias, epilogue, accumulate on the fp32 product, then one rounding or cast."""
    z = z.view(shape)
    if alpha != 1.0:
        z = z * alpha
    if bias is not None:
        z = z + bias
    aux_out: torch.Tensor | Quantized | None = None
    dbias = _operand_sum(a, b, epilogue, dtype)
    if epilogue == "gelu":
        # A copy, never a view of z: an fp32 z would otherwise be both results.
        aux_out = z.to(dtype) if aux_quantizer is None else cast(z, aux_quantizer, "row", dtype)
        z = torch.nn.functional.gelu(z, approximate="tanh")
    elif epilogue == "dgelu" and aux is not None:
        before = dequantize(aux, dtype=torch.float32) if isinstance(aux, Quantized) else aux.float()
        z = gelu_grad(z, before.reshape(shape))
        dbias = z.reshape(-1, shape[-1]).sum(0).to(dtype)
    if accumulate and out is not None:
        z = z + out
    if out_quantizer is not None:
        return Gemm(cast(z, out_quantizer, "row", dtype), aux_out, dbias)
    return Gemm(z.to(dtype) if out is None else out.copy_(z), aux_out, dbias)


def grouped(
    a: Sequence[Operand],
    b: Sequence[Operand],
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    layout: str,
    out: Sequence[torch.Tensor] | None = None,
    accumulate: bool = False,
    bias: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    split_accumulator: bool | None = None,
) -> list[torch.Tensor]:
    """A product per group; splits in host integers."""
    rows = checks.groups(a, b, splits)
    checks.grouped_options(len(b), out, bias)
    parts = a if rows is None else _parts(a[0], rows)
    for i, (x, y) in enumerate(zip(parts, b, strict=True)):  # all of them before the first is written
        checks.gemm(
            x, y, layout, None if out is None else out[i], accumulate, None if bias is None else bias[i],
            out_dtype=out_dtype,
        )  # fmt: skip
    results = []
    for i, (x, y) in enumerate(zip(parts, b, strict=True)):
        run = matmul
        if isinstance(x, Quantized) or isinstance(y, Quantized):
            run = emulated
        results.append(
            run(
                x, y, layout=layout, out=None if out is None else out[i], accumulate=accumulate,
                bias=None if bias is None else bias[i], out_dtype=out_dtype or a[0].dtype if out is None else None,
            ).out
        )  # fmt: skip
    return results


def grouped_device_splits(
    a: Sequence[Operand],
    b: Sequence[Operand],
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    layout: str,
    out: Sequence[torch.Tensor] | None = None,
    accumulate: bool = False,
    bias: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    split_accumulator: bool | None = None,
) -> list[torch.Tensor]:
    """`grouped` with splits on the device, which are read back."""
    return grouped(
        a, b, splits, layout=layout, out=out, accumulate=accumulate, bias=bias, out_dtype=out_dtype,
        split_accumulator=split_accumulator,
    )  # fmt: skip


def _parts(a: Operand, rows: list[int]) -> Sequence[torch.Tensor]:
    # A block of a column-wise copy may span two groups, so quantized rows are split by value.
    return (dequantize(a, dtype=torch.float32) if isinstance(a, Quantized) else a).split(rows)
