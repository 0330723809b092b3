# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which copies of quantized operands a product reads, and products that have nothing to sum."""

from __future__ import annotations

import torch

from te_dispatch.backend_kit.memory import contiguous
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.ops.gemm import gemm_sizes
from te_dispatch_rocm.gemm_plans import Operand
from te_dispatch_rocm.memory import empty, usable


def quantized_operands(a: Quantized, b: Quantized, layout: str) -> tuple[Operand, Operand, tuple[int, int, int]]:
    """The sides of a product of codes, contiguous and aligned, and (m, n, k).

    Raises:
        Declined: an operand has no copy with which the library could multiply.
    """
    for name, x in (("a", a), ("b", b)):
        if x.scale_layout != CANONICAL_SCALES:
            raise Declined(f"{name} has scales in layout {x.scale_layout}, which hipBLASLt does not read")
    rows_contracted = layout[0] == "T", layout[1] == "N"
    return (
        _side("a", a, rows_contracted[0], turned=rows_contracted[0]),
        _side("b", b, rows_contracted[1], turned=not rows_contracted[1]),
        gemm_sizes(a, b, layout),
    )


def _side(name: str, x: Quantized, rows_contracted: bool, turned: bool) -> Operand:
    """The copy that is contracted along its last dimension, or with one scale for all values the other one.

    Args:
        rows_contracted: whether the product contracts the rows of x.
        turned: `Operand.turned` of the row-wise copy; the column-wise copy has the opposite.
    """
    if x.scaling != "tensor":
        # Scales belong to the copy they were made for; neither is transposed.
        data, scale = (x.col_data, x.col_scale_inv) if rows_contracted else (x.row_data, x.row_scale_inv)
        if data is None or scale is None:
            raise Declined(f"{name} has no {'column' if rows_contracted else 'row'}-wise copy")
        return Operand(usable(data), contiguous(scale), x.encoding, turned)
    row, column = (x.row_data, x.row_scale_inv, turned), (x.col_data, x.col_scale_inv, not turned)
    for data, scale, lies in (column, row) if rows_contracted else (row, column):
        if data is not None and scale is not None:
            return Operand(usable(data), contiguous(scale), x.encoding, lies)
    raise Declined(f"{name} has no copy")


def empty_product(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The result of a product that has no elements, or sums nothing: the bias alone."""
    target = empty("out", shape, dtype, device) if out is None else out
    bias = None if bias is None else bias.detach()
    if not accumulate:
        return target.zero_() if bias is None else target.copy_(bias.expand(shape))
    return target if bias is None else target.copy_(target.float() + bias.float())
