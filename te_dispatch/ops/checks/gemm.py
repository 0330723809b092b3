# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Arguments of matrix products. Contracts: `te_dispatch.ops.gemm`."""

from __future__ import annotations

import math
from typing import Any

import torch

from te_dispatch.numerics.encodings import ENCODINGS
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.checks import values as check
from te_dispatch.ops.checks.check_cache import cached_check
from te_dispatch.ops.checks.signatures import LEADING_OPERAND, OFTEN
from te_dispatch.ops.gemm import EPILOGUES, LAYOUTS, shape_from, sizes_of
from te_dispatch.ops.shapes import rows_of


def operands(a: Any, b: Any, layout: Any) -> tuple[int, int, int]:
    """Two matrices of one kind that fit together; returns (m, n, k)."""
    check.one_of("layout", layout, LAYOUTS)
    for name, x in (("a", a), ("b", b)):
        if isinstance(x, Quantized) and x.scaling == "nvfp4_rht":
            raise ValueError(
                f"{name}: got nvfp4_rht scaling, whose copies hold different values, expected the one to multiply "
                "(te_dispatch.numerics.quantized.single_copy)"
            )
    check.operand("a", a)
    check.operand("b", b, a.device)
    shapes = a.shape, b.shape
    for name, shape in zip("ab", shapes):
        if len(shape) < 2:
            raise ValueError(f"{name}: got shape {tuple(shape)}, expected at least two dimensions")
    quantized = isinstance(a, Quantized)
    if quantized != isinstance(b, Quantized):
        raise ValueError(
            f"b: got a {type(b).__name__} with a {type(a).__name__} for a, expected both operands quantized or neither"
        )
    if quantized and ENCODINGS[a.encoding].fnuz != ENCODINGS[b.encoding].fnuz:
        raise ValueError(f"b: got encoding {b.encoding}, expected the flavour of a's {a.encoding}")
    if not quantized and a.dtype != b.dtype:
        raise ValueError(f"b: got dtype {b.dtype}, expected a's, {a.dtype}")
    of_a, of_b = shapes
    m, n, k = sizes_of(of_a, of_b, layout)
    k_b = of_b[-1] if layout == "NT" else rows_of(of_b)
    if k != k_b:
        raise ValueError(f"b: got {tuple(of_b)} for a {tuple(of_a)} in layout {layout}, expected k = {k}, not {k_b}")
    return m, n, k


@cached_check("gemm", b=LEADING_OPERAND, bias=OFTEN)
def gemm(
    a: Any,
    b: Any,
    layout: Any,
    out: Any = None,
    accumulate: bool = False,
    bias: Any = None,
    epilogue: Any = None,
    aux: Any = None,
    aux_quantizer: Any = None,
    out_dtype: Any = None,
    out_quantizer: Any = None,
    alpha: Any = 1.0,
) -> tuple[int, ...]:
    """Returns the result's shape."""
    m, n, _ = operands(a, b, layout)
    shape = shape_from(a.shape, m, n, layout)
    check.number("alpha", alpha)
    check.dtype("out_dtype", out_dtype)
    if accumulate and out is None:
        raise ValueError("accumulate: given without out, expected out to add to")
    if out is not None:
        _out(out, shape, a.device, out_dtype)
        if out_quantizer is not None:
            raise ValueError("out_quantizer: given with out, expected one or the other")
    if bias is not None:
        check.shaped("bias", bias, (n,), check.FLOATS, a.device)
    if epilogue is not None or aux is not None or aux_quantizer is not None:
        _epilogue(epilogue, aux, aux_quantizer, shape, a.device)
    if out_quantizer is not None:
        check.quantizer("out_quantizer", out_quantizer, a.device)
    return shape


def _out(out: Any, shape: tuple[int, ...], device: torch.device, out_dtype: Any) -> None:
    check.shaped("out", out, shape, check.FLOATS, device)
    check.writable("out", out)
    if out_dtype is not None and out_dtype != out.dtype:
        raise ValueError(f"out_dtype: got {out_dtype}, expected out's, {out.dtype}")


def _epilogue(epilogue: Any, aux: Any, aux_quantizer: Any, shape: tuple[int, ...], device: torch.device) -> None:
    if epilogue is not None:
        check.one_of("epilogue", epilogue, EPILOGUES)
    if (aux is not None) != (epilogue == "dgelu"):
        raise ValueError(
            f"aux: {'given' if aux is not None else 'not given'} with epilogue {epilogue}, expected for dgelu"
        )
    if aux is not None:
        check.operand("aux", aux, device)
        if math.prod(aux.shape) != math.prod(shape):
            raise ValueError(f"aux: got shape {tuple(aux.shape)}, expected {shape}")
    if aux_quantizer is not None:
        if epilogue != "gelu":
            raise ValueError(f"aux_quantizer: given with epilogue {epilogue}, expected gelu, whose aux it quantizes")
        check.quantizer("aux_quantizer", aux_quantizer, device)


def groups(a: Any, b: Any, splits: Any) -> list[int] | None:
    """The lists of a grouped product; returns the rows of each group where `splits` deals them out.

    Splits on a device are read back, so an implementation that must not synchronize checks for itself.
    """
    check.sequence("a", a)
    if splits is None:
        check.sequence("b", b, len(a), "group")
        return None
    if len(a) != 1:
        raise ValueError(f"a: got {len(a)} tensors with splits, expected one whose rows are dealt to the groups")
    check.operand("a[0]", a[0])
    if len(a[0].shape) != 2:
        raise ValueError(f"a: got shape {tuple(a[0].shape)}, expected (M, K) to split")
    rows = splits
    if isinstance(splits, torch.Tensor):
        if splits.dtype not in (torch.int64, torch.int32) or splits.ndim != 1:
            raise ValueError(f"splits: got {splits.dtype} {tuple(splits.shape)}, expected int64 (groups,)")
        if splits.is_meta:
            raise ValueError("splits: got a meta tensor, expected one with data, or a list of ints")
        rows = splits.tolist()
    check.integers("splits", rows)
    if sum(rows) != a[0].shape[0]:
        raise ValueError(f"splits: got {list(rows)}, expected non-negative numbers that add up to {a[0].shape[0]} rows")
    check.sequence("b", b, len(rows), "group")
    return list(rows)


def grouped_options(count: int, out: Any, bias: Any) -> None:
    """One output and one bias per group, where given."""
    for name, items in (("out", out), ("bias", bias)):
        if items is not None:
            check.sequence(name, items, count, "group")
