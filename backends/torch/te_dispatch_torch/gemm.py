# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products. Contracts: `te_dispatch.ops.gemm`.

Four implementations share the epilogue arithmetic: `matmul` for plain dtypes, `scaled_mm` for FP8 matrix units with
one scale per tensor, `scaled_mm_blocks` for those with a scale per 128 elements or per 128x128 tile, `emulated` for
every quantized operand on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dispatch.backend_kit import products as torch_products
from te_dispatch.backend_kit.gemm import gemm_with_epilogue
from te_dispatch.core.autograd import below_autograd
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import Quantized, row_parts
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import gemm as checks
from te_dispatch.ops.gemm import Epilogue, operand_format
from te_dispatch.ops.results import Gemm
from te_dispatch.ops.shapes import rows_of
from te_dispatch_torch.activation import gelu_grad
from te_dispatch_torch.encodings import DTYPES, decode
from te_dispatch_torch.products import mm
from te_dispatch_torch.quantize import cast, dequantize, values
from te_dispatch_torch.scales_layout import canonical

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
        product = _shaped(mm(a2, b2, bias), shape)
        return Gemm(product if out is None else out.copy_(product), None, None)
    plain_sum = epilogue in (None, "bgrad_a", "bgrad_b") and bias is None and out_quantizer is None
    in_place = out is not None and out.dtype == a2.dtype == torch.float32 and out.is_contiguous()
    if accumulate and plain_sum and out is not None and in_place:
        out.view(rows_of(shape), shape[-1]).addmm_(a2, b2, alpha=alpha)
        return Gemm(out, None, _operand_sum(a, b, layout, epilogue, dtype))
    e = Epilogue(shape, dtype, alpha, out, accumulate, bias, epilogue, aux, aux_quantizer, out_quantizer)
    return _finish(_product(a2, b2), a, b, layout, e)


@gemm_with_epilogue
def emulated(
    a: Quantized,
    b: Quantized,
    layout: str,
    e: Epilogue,
    split_accumulator: bool | None,
) -> Gemm:
    """Quantized operands of any scaling: decode, multiply, sum in fp32, as `split_accumulator` would."""
    if _per_tensor(a) and _per_tensor(b):
        # Codes are exact in bf16, and the scales factor out of the sum.
        on_units = torch.bfloat16 if a.device.type == "cuda" else torch.float32
        a2, b2 = _codes(a, layout[0] == "T", on_units), _codes(b, layout[1] == "T", on_units)
        z = _product(a2, b2) * (_scale(a) * _scale(b))
    else:
        a2, b2 = _matrices(_values(a, layout, "a"), _values(b, layout, "b"), layout)
        z = torch.mm(a2, b2)
    return _finish(z, a, b, layout, e)


@gemm_with_epilogue
def scaled_mm(
    a: Quantized,
    b: Quantized,
    layout: str,
    e: Epilogue,
    split_accumulator: bool | None,
) -> Gemm:
    """FP8 matrix units, through the copies contracted along their last dimension. `None` accumulates fast."""
    a8, a_scale = _contracted_last(a, layout, "a")
    b8, b_scale = _contracted_last(b, layout, "b")
    a_scale, b_scale = _aligned(a_scale), _aligned(b_scale)
    (m, k), n = a8.shape, b8.shape[0]
    if not m or not k or k % 16 or n % 16:
        raise Declined(f"FP8 units need rows, and K and N in multiples of 16, got M={m}, K={k} and N={n}")
    if e.alpha != 1.0:
        a_scale, e = a_scale * e.alpha, e._replace(alpha=1.0)
    return _on_units(a8, a_scale, b8, b_scale, not split_accumulator, a, b, layout, e, e.dtype)


@below_autograd
@gemm_with_epilogue
def scaled_mm_blocks(
    a: Quantized,
    b: Quantized,
    layout: str,
    e: Epilogue,
    split_accumulator: bool | None,
) -> Gemm:
    """FP8 matrix units with block scales: partial sums of 128 products are scaled and added in fp32, so they are
    always split. Reads the same copies as `scaled_mm`, scales in any layout.
    """
    a8, a_scale = _contracted_last(canonical(a), layout, "a")
    b8, b_scale = _contracted_last(canonical(b), layout, "b")
    (m, k), n = a8.shape, b8.shape[0]
    if not m or not n or not k or m % 16 or n % 16 or k % 16:
        raise Declined(f"block-scaled FP8 units need M, N and K in multiples of 16, got M={m}, N={n} and K={k}")
    # The library takes tiles for one operand only. It reads their scales in rows of a multiple of 4, but PyTorch's
    # checks allow such padding in some releases and refuse it in others: tiles stay where none is needed.
    tiles = b.scaling == "block_2d" and k % 512 == 0
    b_scale = _aligned(b_scale) if tiles else _block_scales(b, b_scale, n)
    spread = a.scaling == "block_1d" or tiles or k % 512
    a_scale = _block_scales(a, a_scale, m) if spread else _aligned(a_scale)
    if e.alpha != 1.0:
        a_scale, e = a_scale * e.alpha, e._replace(alpha=1.0)  # keeps the strides
    # Libraries promise fp32 and bf16 results only.
    unit_dtype = torch.float32 if e.dtype == torch.float16 else e.dtype
    return _on_units(a8, a_scale, b8, b_scale.t(), False, a, b, layout, e, unit_dtype)


def _block_scales(x: Quantized, scale: torch.Tensor, rows: int) -> torch.Tensor:
    """(rows, ceil(K / 128)) with unit stride down the rows; a tile's scale is that of each of its rows."""
    if x.scaling == "block_2d":
        scale = scale.repeat_interleave(128, 0)[:rows]
    return _aligned(scale.t()).t()


def _on_units(
    a8: torch.Tensor,
    a_scale: torch.Tensor,
    b8: torch.Tensor,
    b_scale: torch.Tensor,
    fast: bool,
    a: Quantized,
    b: Quantized,
    layout: str,
    e: Epilogue,
    unit_dtype: torch.dtype,
) -> Gemm:
    """(m, k) times (n, k) transposed on the FP8 units: one launch where nothing or a bf16 bias follows and the units
    write the result's dtype, else `_finish` on an fp32 product.
    """
    fused_bias = e.bias if e.bias is not None and e.bias.dtype == e.dtype == torch.bfloat16 else None
    direct = e.kind is None and e.out_quantizer is None and not e.accumulate and e.bias is fused_bias
    direct = direct and unit_dtype == e.dtype
    product = torch_products.scaled_mm(
        a8, b8.t(), a_scale, b_scale, bias=fused_bias if direct else None,
        out_dtype=e.dtype if direct else torch.float32, use_fast_accum=fast,
    )  # fmt: skip
    if direct:
        product = _shaped(product, e.shape)
        return Gemm(product if e.out is None else e.out.copy_(product), None, None)
    return _finish(product, a, b, layout, e)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """(rows, x.shape[-1]): leading dimensions flattened."""
    # Not reshape(-1, k): an empty tensor has no such shape.
    return x if x.ndim == 2 else x.reshape(rows_of(tuple(x.shape)), x.shape[-1])


def _matrices(a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, k) and (k, n) views."""
    a2, b2 = _matrix(a), _matrix(b)
    return a2.t() if layout[0] == "T" else a2, b2.t() if layout[1] == "T" else b2


def _shaped(product: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The rows of a product in `shape`, as a tensor that is no view: PyTorch lets nobody write into a view that an
    autograd Function returns, such as ``y = linear(x); y += residual``.
    """
    return product if len(shape) == 2 else product.view(shape).detach()


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
        found = decode(_matrix(x.row_data), x.encoding, dtype)
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
    return _aligned(_matrix(data)).view(DTYPES[x.encoding]), scale


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x contiguous and from a multiple of 16 bytes on, which the library asks of codes and of scales."""
    if x.is_contiguous() and x.storage_offset() * x.element_size() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _operand_sum(a: Operand, b: Operand, layout: str, epilogue: str | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The sum of an operand over the dimension that is contracted."""
    if epilogue not in ("bgrad_a", "bgrad_b"):
        return None
    name, operand, rows_contracted = ("a", a, layout[0] == "T") if epilogue == "bgrad_a" else ("b", b, layout[1] == "N")
    rows = _values(operand, layout, name) if isinstance(operand, Quantized) else operand
    return _matrix(rows).sum(0 if rows_contracted else 1, dtype=torch.float32).to(dtype)


def _finish(z: torch.Tensor, a: Operand, b: Operand, layout: str, e: Epilogue) -> Gemm:
    """alpha, bias, epilogue, accumulate on the fp32 product, then one rounding or cast."""
    z = _shaped(z, e.shape)
    if e.alpha != 1.0:
        z = z * e.alpha
    if e.bias is not None:
        z = z + e.bias
    aux_out: torch.Tensor | Quantized | None = None
    dbias = _operand_sum(a, b, layout, e.kind, e.dtype)
    if e.kind == "gelu":
        # A copy, never a view of z: an fp32 z would otherwise be both results.
        aux_out = z.to(e.dtype) if e.aux_quantizer is None else cast(z, e.aux_quantizer, "row", e.dtype)
        z = torch.nn.functional.gelu(z, approximate="tanh")
    elif e.kind == "dgelu" and e.aux is not None:
        before = dequantize(e.aux, dtype=torch.float32) if isinstance(e.aux, Quantized) else e.aux.float()
        z = gelu_grad(z, before.reshape(e.shape))
        dbias = _matrix(z).sum(0).to(e.dtype)
    if e.accumulate and e.out is not None:
        z = z + e.out
    if e.out_quantizer is not None:
        return Gemm(cast(z, e.out_quantizer, "row", e.dtype), aux_out, dbias)
    return Gemm(z.to(e.dtype) if e.out is None else e.out.copy_(z), aux_out, dbias)


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
    parts = a if rows is None else row_parts(a[0], rows)
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


@below_autograd
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
