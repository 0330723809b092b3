# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A product with whatever follows it: operands as they lie in memory, outputs, and the launch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.memory import contiguous_out
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import DelayedQuantizer, Quantizer
from te_dispatch.ops.gemm import Epilogue, gemm_sizes, operand_format
from te_dispatch.ops.results import Gemm
from te_dispatch_triton.descriptor import Descriptor
from te_dispatch_triton.gemm_plans import SCALINGS, UNIT_TYPES, Plan, Problem, planned
from te_dispatch_triton.gemm_sums import column_sums, dbias_of
from te_dispatch_triton.kernels import gemm as kernels
from te_dispatch_triton.launch import Kernel
from te_dispatch_triton.memory import dense, empty
from te_dispatch_triton.quantize_forms import laid_out

Operand = torch.Tensor | Quantized

PRODUCT = Kernel(kernels.gemm)


@functools.cache
def turns() -> Kernel:
    """The kernel of plans with `turns`. Gluon is imported where it is used."""
    from te_dispatch_triton.kernels.gemm_turns import gemm_turns

    return Kernel(gemm_turns)


class Side(NamedTuple):
    """One operand as it lies in memory: rows of `data`, `stride` elements (of fp4: bytes) apart.

    Attributes:
        along_k: whether the rows run along K.
        code: the encoding, or ``none``.
        scale, whole: scales of the copy, and nvfp4's of the whole operand.
        tiles: whether a block's scale serves 128 rows.
    """

    data: torch.Tensor
    along_k: bool
    stride: int
    code: str = "none"
    scale: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    tiles: bool = False


def pair_of(a: Operand, b: Operand) -> str:
    """How the kernel scales a pair of operands."""
    if not isinstance(a, Quantized) or not isinstance(b, Quantized):
        return "none"
    scaling, other = SCALINGS[a.scaling], SCALINGS[b.scaling]
    if scaling != other:
        raise Declined(f"a has {a.scaling} scaling and b {b.scaling}: scales that a kernel applies at different places")
    return scaling


def side_of(x: Operand, name: str, layout: str) -> Side:
    """An operand as it is multiplied."""
    if isinstance(x, Quantized):
        return code_side(x, name, layout)
    return plain_side(x, layout[0] == "N" if name == "a" else layout[1] == "T")


def plain_side(x: torch.Tensor, along_k: bool) -> Side:
    if not (x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1 and x.stride(0) >= x.shape[1])):
        x = dense(x)
    return Side(x, along_k, x.stride(0) if x.ndim == 2 and x.shape[0] > 1 else x.shape[-1])


def code_side(x: Quantized, name: str, layout: str) -> Side:
    """The copy of an operand that is multiplied."""
    along = layout[0] == "N" if name == "a" else layout[1] == "T"
    row = along  # the copy contracted along its last dimension
    data = x.row_data if row else x.col_data
    along_k = True
    if x.scaling == "mxfp8":
        along_k = along  # whose column-wise copy is not turned
    elif data is None and x.scaling == "tensor":
        row, along_k = not row, False
        data = x.row_data if row else x.col_data
    scale = x.row_scale_inv if row else x.col_scale_inv
    if data is None or scale is None:
        usage, _ = operand_format(layout, name, x.scaling)
        raise Declined(f"{name} has no {usage}-wise copy, whose blocks lie along what layout {layout} contracts")
    if x.scale_layout != CANONICAL_SCALES:
        scale = _canonical_scale(x, row)
    if not (data.is_contiguous() or (data.ndim == 2 and data.stride(1) == 1 and data.stride(0) >= data.shape[1])):
        data = dense(data)
    stride = data.stride(0) if data.ndim == 2 and data.shape[0] > 1 else data.shape[-1]
    return Side(data, along_k, stride, x.encoding, dense(scale), x.global_scale_inv, x.scaling == "block_2d")


def _canonical_scale(x: Quantized, row: bool) -> torch.Tensor:
    """The scales of one copy, in the layout that kernels read: a launch."""
    scales = (x.row_scale_inv, None) if row else (None, x.col_scale_inv)
    read = Quantized(None, None, *scales, x.encoding, x.scaling, x.scale_layout, x.shape, x.dtype, x.device)
    made = laid_out(read, CANONICAL_SCALES, False)
    scale = made.row_scale_inv if row else made.col_scale_inv
    assert scale is not None  # what was laid out
    return scale


def run(
    a: Operand, b: Operand, layout: str, e: Epilogue, *, tf32: bool = False, split: bool = False, decoded: bool = False
) -> Gemm:
    """The product and what follows it."""
    m, n, k = gemm_sizes(a, b, layout)
    left, right, scaling = side_of(a, "a", layout), side_of(b, "b", layout), pair_of(a, b)
    device = left.data.device
    if scaling == "nv" and e.kind in ("bgrad_a", "bgrad_b"):
        raise Declined("epilogue: sums over an nvfp4 operand have no kernel")
    out_code, out_common = _cast_of(e.out_quantizer, "out_quantizer", m * n)
    aux_code, aux_common = _cast_of(e.aux_quantizer, "aux_quantizer", m * n)
    record = None
    if e.out_quantizer is not None:
        record = _record("out", e.shape, e.out_quantizer, e.dtype, device)
        target = record.row_data
    elif e.out is None:
        target = empty("out", e.shape, e.dtype, device)
    else:
        target = contiguous_out(e.out, e.accumulate, empty=empty)
    aux_out, aux_scale, aux_data = None, None, None
    if e.kind == "gelu":
        if e.aux_quantizer is None:
            aux_out = aux_data = empty("aux", e.shape, e.dtype, device)
        else:
            aux_out = _record("aux", e.shape, e.aux_quantizer, e.dtype, device)
            aux_data, aux_scale = aux_out.row_data, e.aux_quantizer.scale
    elif e.kind == "dgelu":
        aux_data, aux_scale, aux_code = _given_aux(e.aux)
    found = planned(
        device,
        problem_of(
            left, right, (m, n, k), scaling, tf32, split, decoded, target, e.accumulate,
            e.kind if e.kind in ("gelu", "dgelu") else "none", out_code, out_common, aux_code, aux_common,
        ),
    )  # fmt: skip
    sums = dbias = None
    if e.kind == "dgelu":
        dbias = empty("dbias", (n,), e.dtype, device)
        sums = empty("workspace", (-(-m // found.block_m), n), torch.float32, device)
    bias = None if e.bias is None else dense(e.bias)
    if m and n and found.turns:
        turns()(
            device, found.grid,
            (
                *_given(found, left, right, target, (m, n, k)), left.scale, right.scale,
                bias, float(e.alpha), m, n, k,
            ),
            found.constants, found.config,
        )  # fmt: skip
    elif m and n:
        PRODUCT(
            device, found.grid,
            (
                *_given(found, left, right, target, (m, n, k)), left.scale, right.scale, left.whole, right.whole,
                bias, aux_data, aux_scale,
                *_state(e.aux_quantizer, aux_out), *_cast_state(e.out_quantizer, record), sums, float(e.alpha), m, n, k,
                left.stride, right.stride,
            ),
            found.constants, found.config,
        )  # fmt: skip
    if sums is not None:
        column_sums(sums, dbias)
    elif e.kind in ("bgrad_a", "bgrad_b"):
        side, size = (left, m) if e.kind == "bgrad_a" else (right, n)
        dbias = dbias_of(side, k, size, scaling, e.dtype)
    if record is None and e.out is not None and target is not e.out:
        e.out.copy_(target)
    return Gemm(record if record is not None else target if e.out is None else e.out, aux_out, dbias)


def problem_of(
    left: Side,
    right: Side,
    sizes: tuple[int, int, int],
    scaling: str,
    tf32: bool,
    split: bool,
    decoded: bool,
    target: torch.Tensor,
    accumulate: bool,
    epilogue: str = "none",
    out_code: str = "none",
    out_common: bool = False,
    aux_code: str = "none",
    aux_common: bool = False,
) -> Problem:
    """What decides how a product into `target` is launched."""
    item = left.data.element_size()
    low = left.data.data_ptr() | right.data.data_ptr() | left.stride * item | right.stride * item
    out_low = target.data_ptr() | sizes[1] * target.element_size()
    return Problem(
        *sizes, left.along_k, right.along_k, left.code, right.code, left.tiles, right.tiles, scaling, left.data.dtype,
        tf32, split, low & 15 == 0, out_low & 15 == 0, decoded, epilogue, accumulate, out_code, out_common, aux_code,
        aux_common,
    )  # fmt: skip


def tiles_of(
    plan: Plan, left: Side, right: Side, target: torch.Tensor, sizes: tuple[int, int, int]
) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None, tuple[Any, ...] | None]:
    """`Descriptor`'s arguments after the tensor, of a, b and the output; None for what is given as a pointer."""
    m, n, k = sizes
    if not plan.described:
        return None, None, None
    found = []
    for x, size, block in ((left, m, plan.block_m), (right, n, plan.block_n)):
        dtype = x.data.dtype if x.code == "none" else UNIT_TYPES[x.code]
        shapes = ((size, k), (block, plan.block_k)) if x.along_k else ((k, size), (plan.block_k, block))
        found.append((dtype, shapes[0], (x.stride, 1), shapes[1]))
    # As much of fp32 as of 16 bits, which the memory of operands leaves room for.
    part = 256 // target.element_size() if plan.turns else plan.part
    stored = (target.dtype, (m, n), (n, 1), (plan.block_m, part)) if plan.store else None
    return found[0], found[1], stored


def _given(
    plan: Plan, left: Side, right: Side, target: torch.Tensor, sizes: tuple[int, int, int]
) -> tuple[Any, Any, Any]:  # fmt: skip
    """a, b and the output as the kernel takes them."""
    a, b, out = tiles_of(plan, left, right, target, sizes)
    return (
        left.data if a is None else Descriptor(left.data, *a), right.data if b is None else Descriptor(right.data, *b),
        target if out is None else Descriptor(target, *out),
    )  # fmt: skip


def _cast_of(quantizer: Quantizer | None, name: str, count: int) -> tuple[str, bool]:
    """(encoding, common) of a cast that the epilogue does."""
    if quantizer is None:
        return "none", False
    if quantizer.__class__ is not DelayedQuantizer:
        raise Declined(f"{name}: the scale of a {quantizer.kind} cast is only known after the product")
    if count == 0:
        raise Declined(f"{name}: an empty output, which no program writes a scale for")
    return quantizer.encoding, quantizer.common


def _record(
    role: str, shape: tuple[int, ...], quantizer: Any, dtype: torch.dtype, device: torch.device
) -> Quantized:  # fmt: skip
    """What a delayed cast writes."""
    data = empty(f"{role}.row_data", shape, torch.uint8, device)
    scale_inv = empty(f"{role}.row_scale_inv", (1,), torch.float32, device)
    return Quantized(
        data, None, scale_inv, None, quantizer.encoding, "tensor", CANONICAL_SCALES, tuple(shape), dtype, device
    )


def _state(quantizer: Any, record: Any) -> tuple[Any, Any]:
    """A delayed cast's scale_inv to write and the amax."""
    return (None, None) if quantizer is None else (record.row_scale_inv, quantizer.amax)


def _cast_state(quantizer: Any, record: Any) -> tuple[Any, Any, Any]:
    return (None, None, None) if quantizer is None else (quantizer.scale, record.row_scale_inv, quantizer.amax)


def _given_aux(aux: Any) -> tuple[torch.Tensor, torch.Tensor | None, str]:
    """(memory, scale_inv, encoding) of the z that dgelu reads."""
    if not isinstance(aux, Quantized):
        return dense(aux), None, "none"
    if aux.scaling != "tensor" or aux.row_data is None or aux.row_scale_inv is None:
        raise Declined(f"aux: {aux.scaling} scaling, or no row-wise copy, which gelu's derivative reads")
    return dense(aux.row_data), aux.row_scale_inv, aux.encoding
