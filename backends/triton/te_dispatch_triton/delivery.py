# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The host's half of `kernels.delivery`: the record that a fused cast fills, and what kernels are told of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.shapes import rows_of
from te_dispatch_triton.records import empty_record, empty_tensor_record
from te_dispatch_triton.targets import Target

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
    row_scales = column_scales = None
    if scaling == "tensor":
        record, inverse = empty_tensor_record(shape, dtype, device, quantizer, usage)
        row, column = record.row_data, record.col_data
    else:
        record = empty_record(shape, rows_of(shape), shape[-1], dtype, device, quantizer, usage)  # type: ignore[arg-type]
        row, column = record.row_data, record.col_data
        row_scales, column_scales, inverse = record.row_scale_inv, record.col_scale_inv, record.global_scale_inv
    constants = (
        scaling, getattr(quantizer, "two_d", False), encoding, quantizer.common, target.conversion_of_cast(encoding),
        getattr(quantizer, "power_of_two", False),
    )  # fmt: skip
    return Delivery(
        record, (row, row_scales, column, column_scales), getattr(quantizer, "scale", None),
        getattr(quantizer, "amax", None), getattr(quantizer, "epsilon", 0.0), inverse, constants,
        kind == "current" or scaling == "nvfp4",
    )  # fmt: skip
