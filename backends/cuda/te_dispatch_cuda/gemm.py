# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products through cuBLASLt. Contracts: `te_dispatch.ops.gemm`.

`gemm` multiplies plain dtypes, `gemm_codes` quantized operands. What the library does not fuse, kernels of ours do
around its product (csrc/gemm/plan.h).

fp32 operands are multiplied in fp32, or in TF32 where PyTorch's setting for its own products allows that
(``torch.set_float32_matmul_precision``, ``torch.backends.cuda.matmul``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from te_dispatch.backend_kit.memory import contiguous_out
from te_dispatch.backend_kit.products import allows_tf32
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import gemm as checks
from te_dispatch.ops.gemm import operand_format as default_format
from te_dispatch.ops.results import Gemm
from te_dispatch_cuda import known_products
from te_dispatch_cuda.codes import DTYPES, cast_code, cast_facts
from te_dispatch_cuda.gemm_calls import CODES, of_codes, placed, prepare_fused, prepare_product
from te_dispatch_cuda.gemm_plans import CALLS, LAID_OUT, NONE, SCALES, UNALIGNED, type_code
from te_dispatch_cuda.gemm_repeated import copies, repeated
from te_dispatch_cuda.known_products import Products
from te_dispatch_cuda.memory import dense, dense_aligned

Operand = torch.Tensor | Quantized
_OF_TENSORS, _OF_RECORDS = Products(), Products()


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
    known = None
    if out is epilogue is aux is aux_quantizer is out_quantizer is None:
        known = known_products.of_tensors(a, b, layout, alpha, accumulate, bias, out_dtype)
        if known is not None and (result := _OF_TENSORS.again(known)) is not None:
            return result  # type: ignore[no-any-return]
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    if alpha == 0.0:
        raise Declined("cuBLAS leaves the bias of a product times 0 out where it has a kernel for vectors")
    kind = (a.dtype, allows_tf32()) if a.dtype is torch.float32 else a.dtype
    dtype = out_dtype or (a.dtype if out is None else out.dtype)
    if not (a.is_contiguous() and b.is_contiguous()):
        a, b = dense(a), dense(b)
    if epilogue is None and out_quantizer is None:
        result, call = _product(a, b, None, None, layout, kind, shape, alpha, out, accumulate, bias, dtype)
        if known is not None and call is not None:
            _OF_TENSORS.keep(known, call)
        return result
    return _fused(
        a,
        b,
        None,
        None,
        layout,
        kind,
        shape,
        alpha,
        out,
        accumulate,
        bias,
        epilogue,
        aux,
        aux_quantizer,
        dtype,
        out_quantizer,
    )


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
    """Quantized operands, through their copies contracted along the last dimension. `None` accumulates fast where there
    is one scale per tensor; partial sums of blocks are always promoted.
    """
    known = None
    if out is epilogue is aux is aux_quantizer is out_quantizer is None:
        known = known_products.of_records(a, b, layout, alpha, accumulate, bias, out_dtype, split_accumulator)
        if known is not None and (result := _OF_RECORDS.again(known)) is not None:
            return result  # type: ignore[no-any-return]
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    a_data, a_scale, b_data, b_scale = copies(a, b, layout)
    if a_data is None or b_data is None:
        raise Declined(no_copy("b" if b_data is None else "a", layout))
    if not (a_data.is_contiguous() and b_data.is_contiguous()):
        a_data, b_data = dense(a_data), dense(b_data)
    if a.scaling != "tensor":
        a_scale, b_scale = dense(a_scale), dense(b_scale)
    elif (a_data.data_ptr() | b_data.data_ptr() | a_scale.data_ptr() | b_scale.data_ptr()) % CODES:
        a_data, b_data, a_scale, b_scale = (dense_aligned(x, CODES) for x in (a_data, b_data, a_scale, b_scale))
    kind, layout = _kind(a, b, a_scale, b_scale, layout, split_accumulator)
    dtype = out_dtype or (a.dtype if out is None else out.dtype)
    if epilogue is None and out_quantizer is None and a.global_scale_inv is None:
        result, call = _product(
            a_data, b_data, a_scale, b_scale, layout, kind, shape, alpha, out, accumulate, bias, dtype
        )  # fmt: skip
        if known is not None and call is not None:
            _OF_RECORDS.keep(known, call)
        return result
    return _fused(
        a_data, b_data, a_scale, b_scale, layout, kind, shape, alpha, out, accumulate, bias,
        epilogue, aux, aux_quantizer, dtype, out_quantizer, (a.global_scale_inv, b.global_scale_inv),
    )  # fmt: skip


def plan_gemm(varying: tuple[str, ...], **given: Any) -> Any:
    """`gemm` of operands that look like these (`te_dispatch.core.repeating`)."""

    def key_of(a: torch.Tensor, b: torch.Tensor, shape: tuple[int, ...], given: dict[str, Any]) -> Any:
        # Whether fp32 is multiplied in TF32 is asked at every call.
        if a.dtype is torch.float32 or not (a.is_contiguous() and b.is_contiguous()):
            return None
        dtype, epilogue = given["out_dtype"] or a.dtype, given["epilogue"]
        key = _product_key(
            a, b, given["layout"], a.dtype, shape, given["alpha"], True, given["accumulate"], given["bias"], dtype
        )
        return key if epilogue is None else _fused_key(key, epilogue)

    return repeated(gemm, key_of, varying, given)


def plan_gemm_codes(varying: tuple[str, ...], **given: Any) -> Any:
    """`gemm_codes` of operands that look like these; those of fp4 are not served."""

    def key_of(a: Quantized, b: Quantized, shape: tuple[int, ...], given: dict[str, Any]) -> Any:
        a_data, a_scale, b_data, b_scale = copies(a, b, given["layout"])
        if a.global_scale_inv is not None or a_data is None or b_data is None or given["epilogue"] is not None:
            return None
        if not all(x.is_contiguous() for x in (a_data, a_scale, b_data, b_scale)):
            return None
        kind, layout = _kind(a, b, a_scale, b_scale, given["layout"], given["split_accumulator"])
        dtype = given["out_dtype"] or a.dtype
        return _product_key(
            a_data, b_data, layout, kind, shape, given["alpha"], True, given["accumulate"], given["bias"], dtype
        )

    return repeated(gemm_codes, key_of, varying, given)


def operand_format(layout: str, operand: str, scaling: str) -> tuple[str, str]:
    """The default's copies; scales as the library reads them, those of blocks, which it lays out itself if they are
    canonical, too."""
    usage, scales = default_format(layout, operand, scaling)
    return usage, _SCALE_LAYOUTS.get(scaling, scales)


_SCALE_LAYOUTS = {
    "block_1d": "gemm_1d", "block_2d": "gemm_2d", "mxfp8": "swizzled_32x4x4", "nvfp4": "swizzled_32x4x4",
}  # fmt: skip


def no_copy(name: str, layout: str) -> str:
    """Why codes are declined: block scales belong to the copy they were made for, and a tensor's would need turning."""
    row = layout[0] == "N" if name == "a" else layout[1] == "T"
    return f"{name} has no {'row' if row else 'column'}-wise copy, which FP8 units read in layout {layout}"


def _kind(
    a: Quantized, b: Quantized, a_scale: Any, b_scale: Any, layout: str, split_accumulator: bool | None
) -> tuple[Any, str]:
    """(`kind` as of `problem_of`, how the copies that `layout` reads lie)."""
    if a.scaling == "tensor":
        return (a.encoding, b.encoding, not split_accumulator), "NT"
    flags = scale_flags(a, a_scale), scale_flags(b, b_scale)
    # Column-wise copies of mxfp8 are not transposed.
    return (a.encoding, b.encoding, a.scaling, b.scaling, *flags), layout if a.scaling == "mxfp8" else "NT"


def scale_flags(x: Quantized, scale: torch.Tensor) -> int:
    """How block scales lie."""
    return (x.scale_layout != CANONICAL_SCALES) * LAID_OUT + (scale.data_ptr() % SCALES != 0) * UNALIGNED


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    layout: str,
    kind: Any,
    shape: tuple[int, ...],
    alpha: float,
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[Gemm, Any]:
    """The product without an epilogue; the call that made it, if it was prepared before."""
    if bias is not None:
        bias = dense(bias)
    key = _product_key(a, b, layout, kind, shape, alpha, out is None, accumulate, bias, dtype)
    target = None if out is None else contiguous_out(out, accumulate, CODES if of_codes(kind) else 1)
    call = CALLS.get(key)
    result = None if call is None else call(a, b, a_scale, b_scale, bias, target)
    if result is None:
        prepared = partial(prepare_product, a, b, layout, kind, shape, alpha, target is None, accumulate, bias, dtype)
        result = placed(key, (a, b, target), (a, b, a_scale, b_scale, bias, target), prepared)
        call = None
    if target is not out:
        result = result._replace(out=out.copy_(target))  # type: ignore[union-attr]
    return result, call


def _product_key(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: str,
    kind: Any,
    shape: tuple[int, ...],
    alpha: float,
    fresh: bool,
    accumulate: bool,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    # alpha's sign: 0.0 and -0.0 are equal keys.
    key = (a.shape, b.shape, shape, layout, kind, dtype, accumulate, a.get_device(), fresh, alpha or str(alpha))
    return key if bias is None else (*key, bias.dtype, bias.data_ptr() & 15)


def _fused(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    layout: str,
    kind: Any,
    shape: tuple[int, ...],
    alpha: float,
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
    epilogue: str | None,
    aux: torch.Tensor | Quantized | None,
    aux_quantizer: Quantizer | None,
    dtype: torch.dtype,
    out_quantizer: Quantizer | None,
    wholes: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> Gemm:
    """The product with an epilogue, a cast of the output, or (`wholes`) scales of whole fp4 operands."""
    casts, state = _casts(out_quantizer, aux_quantizer)
    read, read_scale, read_type = _read_aux(aux, epilogue)
    if bias is not None:
        bias = dense(bias)
    key = _product_key(a, b, layout, kind, shape, alpha, out is None, accumulate, bias, dtype)
    key = _fused_key(key, epilogue, read_type, casts)
    target = None if out is None else contiguous_out(out, accumulate, CODES if of_codes(kind) else 1)
    tensors = (a, b, a_scale, b_scale, bias, target, read, read_scale, *wholes, *state)
    call = CALLS.get(key)
    result = None if call is None else call(*tensors)
    if result is None:
        prepared = partial(
            prepare_fused, a, b, layout, kind, shape, alpha, target is None, accumulate, bias, epilogue, read_type,
            aux_quantizer, dtype, out_quantizer, casts,
        )  # fmt: skip
        result = placed(key, (a, b, target, read), tensors, prepared)
    return result if target is out else result._replace(out=out.copy_(target))  # type: ignore[union-attr,no-any-return]


def _fused_key(
    product: tuple[Any, ...], epilogue: str | None, read_type: int = NONE, casts: tuple[int, ...] = (NONE, NONE)
) -> tuple[Any, ...]:
    """Of a product with this key, and what is done to it."""
    return "fused", product, epilogue, read_type, casts


def _casts(*quantizers: Quantizer | None) -> tuple[tuple[int, ...], tuple[torch.Tensor | None, ...]]:
    """Codes of casts, and the tensors of delayed ones: scale and amax of each."""
    codes, state = [], []
    for quantizer in quantizers:
        codes.append(NONE if quantizer is None else cast_code(quantizer))
        state += (None, None) if quantizer is None else cast_facts(quantizer)[1]
    return tuple(codes), tuple(state)


def _read_aux(
    aux: torch.Tensor | Quantized | None, epilogue: str | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """What gelu's derivative reads: (the aux, its scale, type code)."""
    if epilogue != "dgelu" or aux is None:
        return None, None, NONE
    if isinstance(aux, Quantized):
        if aux.row_data is None or aux.row_scale_inv is None:
            raise Declined("aux has no row-wise copy, which gelu's derivative reads")
        return dense(aux.row_data), aux.row_scale_inv, type_code(aux.encoding)
    aux = dense(aux)
    return aux, None, DTYPES[aux.dtype]
