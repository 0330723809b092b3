# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Between PyTorch's tensors and native calls: addresses, the current stream, outputs, dense operands.

Every native call takes (device index, stream, addresses, sizes). Outputs and workspace come from
`te_dispatch.ops.alloc` alone.
"""

from __future__ import annotations

import torch

from te_dispatch.backend_kit.device import raw_stream
from te_dispatch.ops import alloc
from te_dispatch.ops.shapes import rows_of

#: stream_of(device index) -> the address of PyTorch's current stream there.
stream_of = raw_stream
empty = alloc.empty
direct = alloc.direct


def address(x: torch.Tensor | None) -> int:
    """0 for an absent tensor."""
    return 0 if x is None else x.data_ptr()


def copied(x: torch.Tensor) -> torch.Tensor:
    """A row-major copy of x, in memory of its own: the allocator's is aligned to more than any kernel asks for."""
    target = empty("workspace", tuple(x.shape), x.dtype, x.device)
    target.copy_(x)
    return target


def dense(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where its elements do not lie one after the other in row-major order."""
    return x if x.is_contiguous() else copied(x)


def dense_or_none(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else dense(x)


def all_dense(*tensors: torch.Tensor | None) -> bool:
    """Whether `dense` copies none of these."""
    return all(x is None or x.is_contiguous() for x in tensors)


def dense_aligned(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """x where it is dense and starts at a multiple of so many bytes, else a copy."""
    return x if x.is_contiguous() and not x.data_ptr() % multiple else copied(x)


def matrix_shape(x: torch.Tensor) -> tuple[int, int]:
    """(M, K) of the matrix that leading dimensions flatten to."""
    return rows_of(x.shape), x.shape[-1]
