# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A product per group, all of them in one launch. Contracts: `te_dispatch.ops.gemm`.

Rows are dealt to groups in one of three ways: as the host knows, as programs find out from splits on the device, or as
the host reads back from there, because they decide the results' shapes. Each way has a function for operands that the
chip's units know, and one for codes that are decoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import row_parts
from te_dispatch.ops.checks import gemm as checks
from te_dispatch.ops.checks import values as check
from te_dispatch.ops.shapes import rows_of
from te_dispatch_triton.gemm import Operand
from te_dispatch_triton.gemm_groups import run
from te_dispatch_triton.memory import dense
from te_dispatch_triton.replay import replayed


@replayed()
def grouped_gemm(
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
    """Plain operands, or codes for the chip's units; a tensor per group, or splits; a device's are read back."""
    return _known(a, b, splits, layout, out, accumulate, bias, out_dtype, bool(split_accumulator), False)


@replayed("grouped_gemm")
def grouped_gemm_on_device(
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
    """Plain operands, or codes for the chip's units; splits on the device, which programs read (`_dealt`)."""
    return _dealt(a, b, splits, layout, out, accumulate, bias, out_dtype, bool(split_accumulator), False)


@replayed("grouped_gemm")
def grouped_gemm_decoded(
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
    """Codes that are decoded; a tensor per group, or splits; a device's are read back."""
    return _known(a, b, splits, layout, out, accumulate, bias, out_dtype, bool(split_accumulator), True)


@replayed("grouped_gemm")
def grouped_gemm_on_device_decoded(
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
    """Codes that are decoded; splits on the device, which programs read (`_dealt`)."""
    return _dealt(a, b, splits, layout, out, accumulate, bias, out_dtype, bool(split_accumulator), True)


def _known(
    a: Sequence[Operand],
    b: Sequence[Operand],
    splits: Sequence[int] | torch.Tensor | None,
    layout: str,
    out: Sequence[torch.Tensor] | None,
    accumulate: bool,
    bias: Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype | None,
    split: bool,
    decoded: bool,
) -> list[torch.Tensor]:
    rows = checks.groups(a, b, splits)
    parts = a if rows is None else row_parts(a[0], rows)
    return run(parts, b, None, None, layout, out, accumulate, bias, out_dtype, split, decoded)


def _dealt(
    a: Sequence[Operand],
    b: Sequence[Operand],
    splits: Sequence[int] | torch.Tensor | None,
    layout: str,
    out: Sequence[torch.Tensor] | None,
    accumulate: bool,
    bias: Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype | None,
    split: bool,
    decoded: bool,
) -> list[torch.Tensor]:
    """Other arguments tell the results' shapes: `out`, or b's groups in layout TN. Rows of a group beyond those are
    neither read nor written.
    """
    check.sequence("a", a)
    if len(a) != 1:
        raise ValueError(f"a: got {len(a)} tensors with splits, expected one whose rows are dealt to the groups")
    check.operand("a[0]", a[0])
    if len(a[0].shape) != 2:
        raise ValueError(f"a: got shape {tuple(a[0].shape)}, expected (M, K) to split")
    check.sequence("b", b)
    check.shaped("splits", splits, (len(b),), (torch.int64, torch.int32), a[0].device)
    assert isinstance(splits, torch.Tensor)
    told = b if layout == "TN" else out
    if told is None:
        raise Declined("splits on the device decide the results' shapes, and neither out nor layout TN tells them")
    check.sequence("b" if layout == "TN" else "out", told, len(b), "group")
    rows = [rows_of(tuple(x.shape)) for x in told]
    if sum(rows) != a[0].shape[0]:
        raise ValueError(f"splits: got groups of {rows} rows, expected numbers that add up to {a[0].shape[0]} rows")
    return run(row_parts(a[0], rows), b, a[0], dense(splits), layout, out, accumulate, bias, out_dtype, split, decoded)
