# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults with NaN and Inf in the operands beside the main one: weights, biases, residuals, statistics, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Behaviour, nan_lost, operand, table


def _saturated(x: torch.Tensor) -> torch.Tensor:
    """The largest finite number in place of Inf."""
    largest = torch.finfo(x.dtype).max
    return torch.where(x.isinf(), x.clamp(-largest, largest), x)


def _read_as(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Behaviour:
    """An operand is changed as it is read."""

    def behave(call: Call) -> Any:
        x = operand(call, name)
        if x is None or not x.is_floating_point():
            return call.sound()
        with torch.no_grad():
            return call.sound(**{name: change(x)})

    return behave


def _loses_nan(operator: str, *names: str, on: str = "") -> tuple[Fault, ...]:
    return table(
        operator,
        {f"{operator}_loses_nan_of_{name}": (f"reads 0 for NaN in {name}", _read_as(name, nan_lost)) for name in names},
        on=on,
    )


def _saturates(operator: str, *names: str) -> tuple[Fault, ...]:
    return table(
        operator,
        {
            f"{operator}_saturates_{name}": (f"reads the largest number for Inf in {name}", _read_as(name, _saturated))
            for name in names
        },
    )


FAULTS: tuple[Fault, ...] = (
    *_loses_nan("layernorm_fwd", "gamma", "beta", "residual"),
    *_loses_nan("layernorm_bwd", "gamma", "rstd", "add"),
    *_loses_nan("rmsnorm_bwd", "add"),
    *_loses_nan("gemm", "bias", on="matmul"),
    *_loses_nan("moe_unpermute", "probs"),
    *_loses_nan("rope_bwd", "dy"),
    *_saturates("layernorm_fwd", "beta"),
    *_saturates("rmsnorm_bwd", "dy"),
)
