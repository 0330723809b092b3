# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The one place where implementations get memory: outputs, saved tensors, workspace.

Going through here lets the conformance kit surround every output with canaries and poison it first, and lets compiled
graphs hand an implementation the outputs that the graph already allocated. `role` is the output's name in the
operator's result (``out``, ``row_data``, ``lse``, ...), ``saved`` for what only the backward reads, or ``workspace``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Allocator = Callable[[str, "tuple[int, ...]", "torch.dtype", "torch.device"], "torch.Tensor"]

_override: Allocator | None = None


def empty(role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized contiguous tensor. The caller writes every element."""
    if _override is not None:
        return _override(role, shape, dtype, device)
    import torch

    return torch.empty(shape, dtype=dtype, device=device)


def set_allocator(allocator: Allocator | None) -> Allocator | None:
    """Replace the allocator (None restores PyTorch's) and return the one that was in force."""
    global _override
    previous, _override = _override, allocator
    return previous


def replaced() -> bool:
    """Whether another allocator than PyTorch's is in force."""
    return _override is not None
