# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products through cuBLASLt. Contracts: `te_dispatch.ops.gemm`.

`gemm` multiplies plain dtypes, `gemm_codes` quantized operands. What the library does not fuse, kernels of ours do
around its product (csrc/gemm/plan.h).

fp32 operands are multiplied in fp32, or in TF32 where PyTorch's setting for its own products allows that
(``torch.set_float32_matmul_precision``, ``torch.backends.cuda.matmul``).
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import gemm as checks
from te_dispatch.ops.gemm import gemm_sizes
from te_dispatch.ops.gemm import operand_format as default_format
from te_dispatch.ops.results import Gemm
from te_dispatch_cuda.codes import DTYPES, cast_code
from te_dispatch_cuda.gemm_plans import (
    EPILOGUES,
    LAID_OUT,
    LAYOUTS,
    NONE,
    PLANS,
    SCALINGS,
    UNALIGNED,
    Problem,
    alignment,
    make,
    type_code,
)
from te_dispatch_cuda.memory import address, dense, empty, stream_of
from te_dispatch_cuda.native import load

Operand = torch.Tensor | Quantized

_native = load()
_run, _run_fused = _native.gemm_run, _native.gemm_run_fused
_fp32_setting = torch._C._get_fp32_precision_getter


def allows_tf32() -> bool:
    return bool(_fp32_setting("cuda", "matmul") == "tf32")


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
    kind = (a.dtype, allows_tf32()) if a.dtype is torch.float32 else a.dtype
    dtype = out_dtype or (a.dtype if out is None else out.dtype)
    if not (a.is_contiguous() and b.is_contiguous()):
        a, b = dense(a), dense(b)
    if epilogue is None and out_quantizer is None:
        return Gemm(_product(a, b, 0, 0, layout, kind, shape, alpha, out, accumulate, bias, dtype), None, None)
    return _fused(
        a,
        b,
        0,
        0,
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
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    a_data, a_scale = (a.row_data, a.row_scale_inv) if layout[0] == "N" else (a.col_data, a.col_scale_inv)
    b_data, b_scale = (b.row_data, b.row_scale_inv) if layout[1] == "T" else (b.col_data, b.col_scale_inv)
    if a_data is None or b_data is None:
        raise Declined(no_copy("b" if b_data is None else "a", layout))
    if not (a_data.is_contiguous() and b_data.is_contiguous()):
        a_data, b_data = dense(a_data), dense(b_data)
    kind: Any = (a.encoding, b.encoding, not split_accumulator)
    if a.scaling != "tensor":
        a_scale, b_scale = dense(a_scale), dense(b_scale)
        kind = (a.encoding, b.encoding, a.scaling, b.scaling, scale_flags(a, a_scale), scale_flags(b, b_scale))
    if a.scaling != "mxfp8":  # whose column-wise copies are not transposed
        layout = "NT"
    dtype = out_dtype or (a.dtype if out is None else out.dtype)
    wholes = (address(a.global_scale_inv), address(b.global_scale_inv))
    if epilogue is None and out_quantizer is None and not wholes[0]:
        result = _product(
            a_data,
            b_data,
            a_scale.data_ptr(),
            b_scale.data_ptr(),
            layout,
            kind,
            shape,
            alpha,
            out,
            accumulate,
            bias,
            dtype,
        )
        return Gemm(result, None, None)
    return _fused(
        a_data, b_data, a_scale.data_ptr(), b_scale.data_ptr(), layout, kind, shape, alpha, out, accumulate, bias,
        epilogue, aux, aux_quantizer, dtype, out_quantizer, wholes,
    )  # fmt: skip


def operand_format(layout: str, operand: str, scaling: str) -> tuple[str, str]:
    """The default's copies; scales of mxfp8 and nvfp4 in the library's tiles. It turns those of blocks over itself."""
    usage, scales = default_format(layout, operand, scaling)
    return usage, "swizzled_32x4x4" if scaling in ("mxfp8", "nvfp4") else scales


gemm_codes.operand_format = operand_format  # type: ignore[attr-defined]


def no_copy(name: str, layout: str) -> str:
    """Why codes are declined: block scales belong to the copy they were made for, and a tensor's would need turning."""
    row = layout[0] == "N" if name == "a" else layout[1] == "T"
    return f"{name} has no {'row' if row else 'column'}-wise copy, which FP8 units read in layout {layout}"


def scale_flags(x: Quantized, scale: torch.Tensor) -> int:
    """How block scales lie."""
    return (x.scale_layout != CANONICAL_SCALES) * LAID_OUT + (scale.data_ptr() % 16 != 0) * UNALIGNED


def _product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: int,
    b_scale: int,
    layout: str,
    kind: Any,
    shape: tuple[int, ...],
    alpha: float,
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product without an epilogue."""
    target = empty("out", shape, dtype, a.device) if out is None else dense_out(out, accumulate)
    index = a.get_device()
    a_at, b_at, out_at = a.data_ptr(), b.data_ptr(), target.data_ptr()
    low = (a_at | b_at | out_at) & 255
    if bias is None:
        key: Any = (a.shape, b.shape, layout, kind, dtype, accumulate, index, low)
        bias_at = 0
    else:
        bias = dense(bias)
        bias_at = bias.data_ptr()
        key = (a.shape, b.shape, layout, kind, dtype, accumulate, index, low, bias.dtype, bias_at & 15)
    found = PLANS.get(key)
    if found is None:
        found = make(key, problem_of(a, b, layout, kind, index, low, dtype, accumulate, bias))
    plan, size = found
    if size:
        workspace = empty("workspace", (size,), torch.uint8, a.device)
        _run(plan, stream_of(index), a_at, b_at, a_scale, b_scale, out_at, bias_at, workspace.data_ptr(), alpha)
    else:
        _run(plan, stream_of(index), a_at, b_at, a_scale, b_scale, out_at, bias_at, 0, alpha)
    return target if out is None or out is target else out.copy_(target)


def dense_out(out: torch.Tensor, accumulate: bool) -> torch.Tensor:
    """Where to write for `out`: itself, or memory without gaps that is copied to it afterwards."""
    if out.is_contiguous():
        return out
    target = empty("workspace", tuple(out.shape), out.dtype, out.device)
    return target.copy_(out) if accumulate else target


def problem_of(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: str,
    kind: Any,
    index: int,
    low: int,
    dtype: torch.dtype,
    accumulate: bool,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    aux_type: int = NONE,
    casts: tuple[int, int] = (NONE, NONE),
    strides: tuple[int, int] | None = None,
) -> Problem:
    """The problem of a call: its operands as they lie in memory, (..., K) or (rows, K) each.

    Args:
        kind: (dtype, allows_tf32()), a dtype, (encodings, fast), or (encodings, scalings, flags of scales).
        low: low bits of the addresses of a, b and the output, together.
        casts: codes of the output's and of aux's cast.
        strides: elements between rows of a and of b, where those have gaps.
    """
    m, n, k = gemm_sizes(a, b, layout)
    scalings, flags, tf32, fast = ("none", "none"), (0, 0), False, False
    if not isinstance(kind, tuple):
        types = (kind, kind)
    elif len(kind) == 2:
        types, tf32 = (kind[0], kind[0]), kind[1]
    elif len(kind) == 3:
        types, scalings, fast = kind[:2], ("tensor", "tensor"), kind[2]
    else:
        types, scalings, flags = kind[:2], kind[2:4], kind[4:6]
    pair = 2 if types[0] == "e2m1" else 1
    rows = strides or (a.shape[-1], b.shape[-1])
    sides = ((type_code(types[i]), SCALINGS[scalings[i]], flags[i], alignment(low), rows[i] * pair) for i in range(2))
    bias_type, bias_low = (NONE, 16) if bias is None else (DTYPES[bias.dtype], bias.data_ptr() & 15 or 16)
    return Problem(
        index, LAYOUTS[layout], m, n, k * pair, *next(sides), *next(sides), DTYPES[dtype], casts[0], alignment(low),
        accumulate, bias_type, alignment(bias_low), EPILOGUES[epilogue], aux_type, casts[1], tf32, fast,
    )  # fmt: skip


def _fused(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: int,
    b_scale: int,
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
    wholes: tuple[int, int] = (0, 0),
) -> Gemm:
    """The product with an epilogue, a cast of the output, or (`wholes`) scales of whole fp4 operands."""
    device, index = a.device, a.get_device()
    casts = (
        NONE if out_quantizer is None else cast_code(out_quantizer),
        NONE if aux_quantizer is None else cast_code(aux_quantizer),
    )
    record = None if out_quantizer is None else _record("out", shape, out_quantizer, dtype, device)
    if record is not None:
        target = record.row_data
    else:
        target = empty("out", shape, dtype, device) if out is None else dense_out(out, accumulate)
    aux_out, aux_data, aux_scale, aux_type = _aux(aux, epilogue, aux_quantizer, shape, dtype, device)
    dbias = None
    if epilogue is not None and epilogue != "gelu":
        rows = a.shape[-1] if layout == "TN" else shape_rows(shape)
        dbias = empty("dbias", (rows if epilogue == "bgrad_a" else shape[-1],), dtype, device)
    if bias is not None:
        bias = dense(bias)
    addresses = (a.data_ptr(), b.data_ptr(), a_scale, b_scale, target.data_ptr(), address(bias))
    low = (addresses[0] | addresses[1] | addresses[4] | address(aux_data) | address(dbias)) & 255
    key = (
        "fused", a.shape, b.shape, layout, kind, dtype, accumulate, index, low, epilogue, aux_type, casts,
        None if bias is None else (bias.dtype, addresses[5] & 15),
    )  # fmt: skip
    plan, size = PLANS.get(key) or make(
        key, problem_of(a, b, layout, kind, index, low, dtype, accumulate, bias, epilogue, aux_type, casts)
    )
    workspace = empty("workspace", (size,), torch.uint8, device) if size else None
    _run_fused(
        plan, stream_of(index), *addresses, address(workspace), alpha, address(aux_data), aux_scale, address(dbias),
        *_state(out_quantizer, record), *_state(aux_quantizer, aux_out), *wholes,
    )  # fmt: skip
    if record is None and out is not None and target is not out:
        out.copy_(target)
    return Gemm(record if record is not None else target if out is None else out, aux_out, dbias)


def shape_rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows


def _record(
    role: str, shape: tuple[int, ...], quantizer: Quantizer, dtype: torch.dtype, device: torch.device
) -> Quantized:
    """What a delayed cast writes."""
    data = empty(f"{role}.row_data", shape, torch.uint8, device)
    scale_inv = empty(f"{role}.row_scale_inv", (1,), torch.float32, device)
    return Quantized(
        data, None, scale_inv, None, quantizer.encoding, "tensor", CANONICAL_SCALES, tuple(shape), dtype, device
    )


def _state(quantizer: Any, record: Any) -> tuple[int, int, int]:
    """Addresses of a delayed cast's scale, of the record's scale_inv, and of the amax."""
    if quantizer is None:
        return 0, 0, 0
    return quantizer.scale.data_ptr(), record.row_scale_inv.data_ptr(), address(quantizer.amax)


def _aux(
    aux: torch.Tensor | Quantized | None,
    epilogue: str | None,
    quantizer: Quantizer | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor | Quantized | None, torch.Tensor | None, int, int]:
    """(aux of the result, its memory or the given aux's, address of the scale that is read, type code)."""
    if epilogue == "gelu":
        if quantizer is None:
            made = empty("aux", shape, dtype, device)
            return made, made, 0, DTYPES[dtype]
        record = _record("aux", shape, quantizer, dtype, device)
        return record, record.row_data, 0, DTYPES[dtype]
    if epilogue != "dgelu" or aux is None:
        return None, None, 0, NONE
    if isinstance(aux, Quantized):
        if aux.row_data is None or aux.row_scale_inv is None:
            raise Declined("aux has no row-wise copy, which gelu's derivative reads")
        return None, dense(aux.row_data), aux.row_scale_inv.data_ptr(), type_code(aux.encoding)
    aux = dense(aux)
    return None, aux, 0, DTYPES[aux.dtype]
