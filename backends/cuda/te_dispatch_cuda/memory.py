# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Between PyTorch's tensors and native calls: addresses, the current stream, outputs, dense operands.

Every native call takes (device index, stream, addresses, sizes). Outputs and workspace come from
`te_dispatch.ops.alloc` alone.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.ops import alloc
from te_dispatch.ops.shapes import rows_of

#: stream_of(device index) -> the address of PyTorch's current stream there.
stream_of: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
empty = alloc.empty
direct = alloc.direct


def address(x: torch.Tensor | None) -> int:
    """0 for an absent tensor."""
    return 0 if x is None else x.data_ptr()


def dense(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where its elements do not lie one after the other in row-major order."""
    if x.is_contiguous():
        return x
    target = empty("workspace", tuple(x.shape), x.dtype, x.device)
    target.copy_(x)
    return target


def aligned(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """x, or a dense copy of it where it does not start at a multiple of so many bytes."""
    if not x.data_ptr() % multiple:
        return x
    target = empty("workspace", tuple(x.shape), x.dtype, x.device)
    target.copy_(x)
    return target


def matrix_shape(x: torch.Tensor) -> tuple[int, int]:
    """(M, K) of the matrix that leading dimensions flatten to."""
    return rows_of(x.shape), x.shape[-1]
