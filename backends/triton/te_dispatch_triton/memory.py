# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Outputs and workspace, which come from `te_dispatch.ops.alloc` alone, and dense operands."""

from __future__ import annotations

import torch

from te_dispatch.ops import alloc

empty = alloc.empty


def dense(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where its elements do not lie one after the other in row-major order."""
    if x.is_contiguous():
        return x
    target = empty("workspace", tuple(x.shape), x.dtype, x.device)
    target.copy_(x)
    return target
