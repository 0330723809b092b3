# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Prepared calls of matrix products: from a call's operands to the plan's problem, and what its steps read and make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from te_dispatch.backend_kit.call_plans import Planned
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.gemm import gemm_sizes
from te_dispatch.ops.results import Gemm
from te_dispatch.ops.shapes import rows_of
from te_dispatch_cuda.codes import DTYPES
from te_dispatch_cuda.gemm_plans import (
    EPILOGUES,
    LAYOUTS,
    NONE,
    PLANS,
    SCALES,
    SCALINGS,
    UNALIGNED,
    Problem,
    alignment,
    make,
    type_code,
)
from te_dispatch_cuda.memory import address
from te_dispatch_cuda.prepared import Given, Made, Record, prepare

#: What addresses usually are multiples of: PyTorch's allocator gives larger ones.
USUAL = 256


def planned_at(
    multiple: int,
    prepared: Callable[[int, Sequence[int | None], int], Any],
    tensors: tuple[torch.Tensor | None, ...],
    lies: Callable[..., Any] | None,
) -> Planned:
    """A product's plan for addresses that are multiples of so many bytes; where its outputs lie worse, for fewer.

    Args:
        prepared: (multiple, places, count) -> the launch.
        lies: what of `tensors` no signature covers and the launch depends on; None where that is as it mostly is, which
            the launch itself sees.
    """
    usual = multiple == USUAL and lies is None
    expected = None if lies is None else lies(*tensors)

    def prepare(places: Sequence[int | None], count: int) -> Any:
        call = prepared(multiple, places, count)
        if lies is None:
            return call

        def launch(*given: torch.Tensor) -> Any:
            if lies(*[None if place is None else given[place] for place in places]) != expected:
                return NotImplemented
            return call(*given)

        return launch

    # Everything is a multiple of 1.
    weaker = partial(planned_at, multiple // 2, prepared, tensors, lies) if multiple > 1 else None
    return Planned(prepare, tensors, not usual, weaker)


def multiple_of(*tensors: torch.Tensor | None) -> int:
    """Bytes, a power of two up to 256, that the addresses of all are multiples of."""
    low = 0
    for x in tensors:
        low |= address(x)
    return alignment(low)


def prepare_product(
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
    multiple: int,
    places: Sequence[int | None],
    count: int,
) -> Any:
    """A call without an epilogue, with a, b, their scales, bias, and out, unless that is `fresh`."""
    plan, size = _plan(a, b, layout, kind, multiple, dtype, accumulate, bias)
    at_a, at_b, scales = Given(0), Given(1), (Given(2), Given(3))
    out: Any = Made("out", shape, dtype) if fresh else Given(5)
    workspace = Made("workspace", (size,), torch.uint8) if size else 0
    arguments = (plan.address, at_a, at_b, *scales, out, Given(4), workspace, alpha)
    aligned = [(x, multiple) for x in (at_a, at_b, out)]
    if isinstance(kind, tuple) and len(kind) == 6:
        aligned += [(x, SCALES) for x, flags in zip(scales, kind[4:]) if not flags & UNALIGNED]
    elif of_codes(kind):
        aligned += [(x, CODES) for x in scales]
    if bias is not None:
        aligned.append((Given(4), _bias_alignment(bias)))
    return prepare(
        "gemm_run", a.device, arguments, Gemm(out, None, None), tensors=count, aligned=aligned, keep=plan, places=places
    )


def prepare_fused(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: str,
    kind: Any,
    shape: tuple[int, ...],
    alpha: float,
    fresh: bool,
    accumulate: bool,
    bias: torch.Tensor | None,
    epilogue: str | None,
    read_type: int,
    aux_quantizer: Quantizer | None,
    dtype: torch.dtype,
    out_quantizer: Quantizer | None,
    casts: tuple[int, int],
    multiple: int,
    places: Sequence[int | None],
    count: int,
) -> Any:
    """A call with a, b, their scales, bias, out, the aux that is read and its scale, scales of whole operands, and the
    scale and amax of both quantizers."""
    at_a, at_b, at_out, at_aux = Given(0), Given(1), Given(5), Given(6)
    made: Any = at_out
    written: Any = at_out
    if out_quantizer is not None:
        made = _record("out", shape, out_quantizer, dtype, a.device)
        written = made.row_data
    elif fresh:
        made = written = Made("out", shape, dtype)
    aux: Any = None
    aux_type, aux_at = read_type, at_aux
    if epilogue == "gelu":
        aux = (
            Made("aux", shape, dtype)
            if aux_quantizer is None
            else _record("aux", shape, aux_quantizer, dtype, a.device)
        )
        aux_type, aux_at = DTYPES[dtype], aux if aux_quantizer is None else aux.row_data
    dbias = None
    if epilogue is not None and epilogue != "gelu":
        rows = a.shape[-1] if layout == "TN" else rows_of(shape)
        dbias = Made("dbias", (rows if epilogue == "bgrad_a" else shape[-1],), dtype)
    plan, size = _plan(a, b, layout, kind, multiple, dtype, accumulate, bias, epilogue, aux_type, casts)
    arguments = (
        plan.address, at_a, at_b, Given(2), Given(3), written, Given(4),
        Made("workspace", (size,), torch.uint8) if size else 0, alpha, aux_at, Given(7), dbias or 0,
        *(_state(made, 10) if out_quantizer is not None else (0, 0, 0)),
        *(_state(aux, 12) if aux_quantizer is not None and aux is not None else (0, 0, 0)),
        Given(8), Given(9),
    )  # fmt: skip
    aligned = [(x, multiple) for x in (at_a, at_b, written, aux_at, dbias)]
    if of_codes(kind):
        aligned += [(x, CODES) for x in (Given(2), Given(3))]
    if bias is not None:
        aligned.append((Given(4), _bias_alignment(bias)))
    result = Gemm(made, aux, dbias)  # type: ignore[arg-type]
    return prepare(
        "gemm_run_fused", a.device, arguments, result, tensors=count, aligned=aligned, keep=plan, places=places
    )


def _record(
    role: str, shape: tuple[int, ...], quantizer: Quantizer, dtype: torch.dtype, device: torch.device
) -> Record:
    """What a delayed cast writes."""
    data = Made(f"{role}.row_data", shape, torch.uint8)
    scale_inv = Made(f"{role}.row_scale_inv", (1,), torch.float32)
    return Record(data, None, scale_inv, None, quantizer.encoding, "tensor", tuple(shape), dtype, device)


def _state(record: Record, at: int) -> tuple[Any, Any, Any]:
    """A delayed cast's scale, the record's scale_inv, and the amax; `at`: where scale and amax are."""
    return Given(at), record.row_scale_inv, Given(at + 1)


def _plan(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: str,
    kind: Any,
    multiple: int,
    dtype: torch.dtype,
    accumulate: bool,
    bias: torch.Tensor | None,
    epilogue: str | None = None,
    aux_type: int = NONE,
    casts: tuple[int, int] = (NONE, NONE),
) -> tuple[Any, int]:
    """The plan of a product, and its bytes of workspace; arguments as of `problem_of`."""
    problem = problem_of(
        a, b, layout, kind, a.get_device(), multiple, dtype, accumulate, bias, epilogue, aux_type, casts
    )
    return PLANS.get(problem) or make(problem, problem)


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
    bias_type, bias_alignment = (NONE, _BIAS) if bias is None else (DTYPES[bias.dtype], _bias_alignment(bias))
    return Problem(
        index, LAYOUTS[layout], m, n, k * pair, *next(sides), *next(sides), DTYPES[dtype], casts[0], alignment(low),
        accumulate, bias_type, bias_alignment, EPILOGUES[epilogue], aux_type, casts[1], tf32, fast,
    )  # fmt: skip


#: Bytes, a power of two, beyond which the alignment of a bias does not matter.
_BIAS = 16


def _bias_alignment(bias: torch.Tensor) -> int:
    return alignment(bias.data_ptr() & (_BIAS - 1) or _BIAS)


#: What addresses of FP8 operands, of their scales and of their product must be multiples of: cuBLASLt refuses others.
CODES = 16


def of_codes(kind: Any) -> bool:
    """Whether operands are FP8 with one scale each; `kind` as of `problem_of`."""
    return isinstance(kind, tuple) and len(kind) == 3
