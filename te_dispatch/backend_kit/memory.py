# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Contiguous operands and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from te_dispatch.ops import alloc

#: (role, shape, dtype, device) -> uninitialized memory, as `te_dispatch.ops.alloc.empty` is.
Empty = Callable[[str, "tuple[int, ...]", torch.dtype, torch.device], torch.Tensor]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each dimension of a contiguous tensor, as PyTorch counts them: a dimension of 0
    elements counts as one of 1."""
    strides, step = [1] * len(shape), 1
    for i in range(len(shape) - 1, 0, -1):
        step *= shape[i] or 1
        strides[i - 1] = step
    return tuple(strides)


def contiguous(x: torch.Tensor, empty: Empty | None = None) -> torch.Tensor:
    """x, or a contiguous copy of it in a workspace.

    Args:
        empty: where memory comes from; None for `te_dispatch.ops.alloc.empty`.
    """
    if x.is_contiguous():
        return x
    return (empty or alloc.empty)("workspace", tuple(x.shape), x.dtype, x.device).copy_(x)


def contiguous_out(out: torch.Tensor, accumulate: bool, multiple: int = 1, empty: Empty | None = None) -> torch.Tensor:
    """Where a kernel writes for `out`: out itself, or a contiguous workspace that the caller copies to it afterwards.

    Args:
        accumulate: whether the kernel adds to what is there, which a workspace then holds.
        multiple: bytes of which the address must be a multiple.
        empty: where memory comes from, aligned to `multiple`; None for `te_dispatch.ops.alloc.empty`.
    """
    if out.is_contiguous() and not out.data_ptr() % multiple:
        return out
    target = (empty or alloc.empty)("workspace", tuple(out.shape), out.dtype, out.device)
    return target.copy_(out) if accumulate else target
