# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Outputs and workspace, which come from `te_dispatch.ops.alloc` alone, and dense operands."""

from __future__ import annotations

import torch

from te_dispatch.backend_kit.memory import contiguous
from te_dispatch.ops import alloc
from te_dispatch_triton.tape import active


def empty(role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`te_dispatch.ops.alloc.empty`, recorded where a call is (`tape`)."""
    if (tape := active()) is not None:
        return tape.allocated(alloc.empty, role, shape, dtype, device)
    return alloc.empty(role, shape, dtype, device)


def address(x: torch.Tensor) -> int:
    """x's, for a table of addresses: a recording of numbers with it follows it (`tape`)."""
    tape = active()
    return x.data_ptr() if tape is None else tape.address(x)


def dense(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where its elements do not lie one after the other in row-major order."""
    return contiguous(x, empty)
