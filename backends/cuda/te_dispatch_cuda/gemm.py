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

from te_dispatch.backend_kit.call_plans import OFTEN, Planned, planned
from te_dispatch.backend_kit.memory import contiguous_out
from te_dispatch.backend_kit.products import allows_tf32
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import gemm as checks
from te_dispatch.ops.gemm import operand_format as default_format
from te_dispatch.ops.results import Gemm
from te_dispatch_cuda.codes import DTYPES, cast_code, state_of
from te_dispatch_cuda.gemm_calls import CODES, USUAL, multiple_of, planned_at, prepare_fused, prepare_product
from te_dispatch_cuda.gemm_plans import LAID_OUT, NONE, SCALES, UNALIGNED, type_code
from te_dispatch_cuda.memory import address, all_dense, dense, dense_aligned, dense_or_none

Operand = torch.Tensor | Quantized


@planned(bias=OFTEN)
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
) -> Gemm | Planned:
    """fp32, bf16 and fp16 operands."""
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    if alpha == 0.0:
        raise Declined("cuBLAS leaves the bias of a product times 0 out where it has a kernel for vectors")
    target = None if out is None else contiguous_out(out, accumulate)
    if target is not out or not all_dense(a, b, bias):
        result = gemm(
            dense(a), dense(b), layout=layout, alpha=alpha, out=target, accumulate=accumulate,
            bias=dense_or_none(bias), epilogue=epilogue, aux=aux, aux_quantizer=aux_quantizer, out_dtype=out_dtype,
            out_quantizer=out_quantizer,
        )  # fmt: skip
        return _copied(result, out, target)
    kind: Any = (a.dtype, allows_tf32()) if a.dtype is torch.float32 else a.dtype
    dtype = out_dtype or (a.dtype if out is None else out.dtype)
    return _product(
        a, b, None, None, layout, kind, shape, alpha, out, accumulate, bias, epilogue, aux, aux_quantizer, dtype,
        out_quantizer, (None, None),
    )  # fmt: skip


@planned("gemm", bias=OFTEN)
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
) -> Gemm | Planned:
    """Quantized operands, through their copies contracted along the last dimension. `None` accumulates fast where there
    is one scale per tensor; partial sums of blocks are always promoted.
    """
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    assert isinstance(a, Quantized) and isinstance(b, Quantized)
    a_data, a_scale, b_data, b_scale = copies(a, b, layout)
    if a_data is None or b_data is None:
        raise Declined(no_copy("b" if b_data is None else "a", layout))
    target = None if out is None else contiguous_out(out, accumulate, CODES if a.scaling == "tensor" else 1)
    if target is not out or not all_dense(bias):
        result = gemm_codes(
            a, b, layout=layout, alpha=alpha, out=target, accumulate=accumulate, bias=dense_or_none(bias),
            epilogue=epilogue, aux=aux, aux_quantizer=aux_quantizer, out_dtype=out_dtype, out_quantizer=out_quantizer,
            split_accumulator=split_accumulator,
        )  # fmt: skip
        return _copied(result, out, target)
    if a.scaling != "tensor":
        a_data, b_data, a_scale, b_scale = map(dense, (a_data, b_data, a_scale, b_scale))
    else:
        a_data, b_data, a_scale, b_scale = (dense_aligned(x, CODES) for x in (a_data, b_data, a_scale, b_scale))
    kind, layout = _kind(a, b, a_scale, b_scale, layout, split_accumulator)
    dtype = out_dtype or (a.dtype if out is None else out.dtype)
    return _product(
        a_data, b_data, a_scale, b_scale, layout, kind, shape, alpha, out, accumulate, bias, epilogue, aux,
        aux_quantizer, dtype, out_quantizer, (a.global_scale_inv, b.global_scale_inv),
    )  # fmt: skip


def _copied(result: Gemm | Planned, out: torch.Tensor | None, target: torch.Tensor | None) -> Gemm:
    """The result of a call, with `out` in the place of what was written for it."""
    assert isinstance(result, Gemm)
    return result if target is out or out is None or target is None else result._replace(out=out.copy_(target))


def copies(a: Quantized, b: Quantized, layout: str) -> tuple[Any, Any, Any, Any]:
    """Data and scale of a, then of b, as `layout` reads them; None for what there is none of."""
    if layout == "NT":
        return a.row_data, a.row_scale_inv, b.row_data, b.row_scale_inv
    if layout == "NN":
        return a.row_data, a.row_scale_inv, b.col_data, b.col_scale_inv
    return a.col_data, a.col_scale_inv, b.col_data, b.col_scale_inv


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
    epilogue: str | None,
    aux: torch.Tensor | Quantized | None,
    aux_quantizer: Quantizer | None,
    dtype: torch.dtype,
    out_quantizer: Quantizer | None,
    wholes: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Planned:
    """The product of contiguous operands; `wholes` are the scales of whole fp4 operands."""
    tensors: tuple[torch.Tensor | None, ...] = (a, b, a_scale, b_scale, bias, out)
    read, prepared = None, partial(prepare_product, a, b, layout, kind, shape, alpha, out is None, accumulate)
    if epilogue is None and out_quantizer is None and wholes[0] is None:
        prepared = partial(prepared, bias, dtype)
    else:
        casts, state = _casts(out_quantizer, aux_quantizer)
        read, read_scale, read_type = _read_aux(aux, epilogue)
        tensors = (*tensors, read, read_scale, *wholes, *state)
        prepared = partial(
            prepare_fused, a, b, layout, kind, shape, alpha, out is None, accumulate, bias, epilogue, read_type,
            aux_quantizer, dtype, out_quantizer, casts,
        )  # fmt: skip
    lies = partial(_lies, kind)
    usual = (USUAL, 0, *([False] * (2 if _has_scales_of_blocks(kind) else 0)))
    return planned_at(multiple_of(a, b, out, read), prepared, tensors, None if lies(*tensors) == usual else lies)


def _lies(
    kind: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    read: torch.Tensor | None = None,
    *others: Any,
) -> tuple[Any, ...]:
    """What a product depends on that its call's signature does not cover: the alignment of operands, bias and block
    scales, and whether fp32 is multiplied in TF32."""
    found: tuple[Any, ...] = (multiple_of(a, b, out, read), address(bias) & 15)
    if _has_scales_of_blocks(kind):
        return (*found, address(a_scale) % SCALES != 0, address(b_scale) % SCALES != 0)
    return (*found, allows_tf32()) if a.dtype is torch.float32 else found


def _has_scales_of_blocks(kind: Any) -> bool:
    return isinstance(kind, tuple) and len(kind) == 6


def _casts(*quantizers: Quantizer | None) -> tuple[tuple[int, ...], tuple[torch.Tensor | None, ...]]:
    """Codes of casts, and the tensors of delayed ones: scale and amax of each."""
    codes, state = [], []
    for quantizer in quantizers:
        codes.append(NONE if quantizer is None else cast_code(quantizer))
        state += (None, None) if quantizer is None else state_of(quantizer)
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
