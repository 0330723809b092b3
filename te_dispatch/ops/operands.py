# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Describes the operands of the operators to the runtime, which does not know the classes of `te_dispatch.numerics`.

Imported before the first operator is declared: the values that an operand's facts can have are part of the declaration.
"""

from __future__ import annotations

from typing import Any

from te_dispatch.core.arguments import is_tensor
from te_dispatch.core.operands import OPERANDS
from te_dispatch.core.parameters import OPERAND, QUANTIZER, RECORD, SAVED
from te_dispatch.numerics.quantized import SCALINGS, FakeQuantized, Quantized, row_count
from te_dispatch.numerics.quantizers import KINDS


def _is_record(value: Any) -> bool:
    return isinstance(value, Quantized)


def _is_operand(value: Any) -> bool:
    return isinstance(value, Quantized) or is_tensor(value)


def _is_quantizer(value: Any) -> bool:
    return all(isinstance(getattr(value, name, None), str) for name in ("kind", "scaling", "encoding"))


def _is_saved(value: Any) -> bool:
    return hasattr(value, "implementation")


OPERANDS.describe(
    record=Quantized,
    imitated_record=FakeQuantized,
    row_count=row_count,
    scalings=SCALINGS,
    quantizers=KINDS,
    arguments={
        RECORD: ("a Quantized", _is_record),
        OPERAND: ("a torch.Tensor or a Quantized", _is_operand),
        QUANTIZER: ("a quantizer (te_dispatch.numerics.quantizers)", _is_quantizer),
        SAVED: ("what the forward saved (te_dispatch.ops.results.Saved)", _is_saved),
    },
)
