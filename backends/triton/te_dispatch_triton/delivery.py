# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The host's half of `kernels.delivery`: the record that a fused cast fills, and what kernels are told of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.shapes import rows_of
from te_dispatch_triton.blocks import empty_record
from te_dispatch_triton.memory import empty
from te_dispatch_triton.targets import Target

_F32, _U8 = torch.float32, torch.uint8
#: SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO of no cast.
NO_CAST = ("", False, "", False, 0, False)
#: row_data, row_scales, column_data, column_scales of no cast.
NO_COPIES = (None, None, None, None)


class Delivery(NamedTuple):
    """A cast to come.

    Attributes:
        record: its result, uninitialized.
        copies: row_data, row_scales, column_data, column_scales; None for what is not wanted.
        scale, history: of a delayed cast.
        epsilon: floor under an amax.
        inverse: where the inverse of the scale of the whole tensor goes.
        constants: SCALING, TWO_D, ENCODING, COMMON, HARD, POWER_OF_TWO.
        needs_maxima: the scale of the whole tensor follows from its values.
    """

    record: Quantized
    copies: tuple[Any, Any, Any, Any]
    scale: torch.Tensor | None
    history: torch.Tensor | None
    epsilon: float
    inverse: torch.Tensor | None
    constants: tuple[Any, ...]
    needs_maxima: bool


def deliver_to(
    quantizer: Quantizer, usage: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, target: Target
) -> Delivery:
    """The cast of values of a shape; `dtype` is the record's nominal one."""
    scaling, encoding, kind = quantizer.scaling, quantizer.encoding, quantizer.kind
    row = column = row_scales = column_scales = None
    if scaling == "tensor":
        # One tensor, one scale: both copies share it.
        inverse = empty("col_scale_inv" if usage == "column" else "row_scale_inv", (1,), _F32, device)
        if usage != "column":
            row = empty("row_data", shape, _U8, device)
        if usage != "row":
            column = empty("col_data", (shape[-1], rows_of(shape)), _U8, device)
        record = Quantized(
            row, column, None if row is None else inverse, None if column is None else inverse, encoding, scaling,
            CANONICAL_SCALES, shape, dtype, device,
        )  # fmt: skip
    else:
        record = empty_record(shape, rows_of(shape), shape[-1], dtype, device, quantizer, usage)  # type: ignore[arg-type]
        row, column = record.row_data, record.col_data
        row_scales, column_scales, inverse = record.row_scale_inv, record.col_scale_inv, record.global_scale_inv
    constants = (
        scaling, getattr(quantizer, "two_d", False), encoding, quantizer.common, target.conversion(encoding),
        getattr(quantizer, "power_of_two", False),
    )  # fmt: skip
    return Delivery(
        record, (row, row_scales, column, column_scales), getattr(quantizer, "scale", None),
        getattr(quantizer, "amax", None), getattr(quantizer, "epsilon", 0.0), inverse, constants,
        kind == "current" or scaling == "nvfp4",
    )  # fmt: skip
