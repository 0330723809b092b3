# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The one place where implementations get memory: outputs, saved tensors, workspace.

Going through here lets the conformance kit surround every output with canaries and poison it first, and lets compiled
graphs hand an implementation the outputs that the graph already allocated. `role` is the output's name in the
operator's result (``out``, ``row_data``, ``lse``, ...), ``saved`` for what only the backward reads, or ``workspace``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Allocator = Callable[[str, "tuple[int, ...]", "torch.dtype", "torch.device"], "torch.Tensor"]

_override: Allocator | None = None

#: For native code that allocates by itself: PyTorch's own entry, (shape, strides, dtype) -> a tensor on the current
#: CUDA device, or None where `empty` has to be asked (another allocator is in force, or this PyTorch lacks the entry);
#: and what tells the current device's index, or None where there is one device only.
direct: list[Any] = [None, None]

# PyTorch's own entry for compiled code, which takes a third of torch.empty's time; it allocates on the current device.
# Both are looked up at the first allocation on such a device, and stay None in builds that lack them.
_looked_up = False
_empty_strided_cuda: Any = None
_current_cuda: Any = None
#: The device where there is one only, which is then always the current one.
_only_cuda: torch.device | None = None


def empty(role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialized contiguous tensor. The caller writes every element."""
    if _override is not None:
        return _override(role, shape, dtype, device)
    if _empty_strided_cuda is not None and (
        device == _only_cuda or (device.type == "cuda" and device.index == _current_cuda())
    ):
        if shape.__class__ is not tuple:  # a torch.Size is refused
            shape = tuple(shape)
        rank = len(shape)
        if rank == 2:
            return _empty_strided_cuda(shape, (shape[1] or 1, 1), dtype)  # type: ignore[no-any-return]
        if rank == 1:
            return _empty_strided_cuda(shape, (1,), dtype)  # type: ignore[no-any-return]
        strides, step = [1] * rank, 1
        for i in range(rank - 1, 0, -1):
            step *= shape[i] or 1
            strides[i - 1] = step
        return _empty_strided_cuda(shape, tuple(strides), dtype)  # type: ignore[no-any-return]
    import torch

    if device.type == "cuda" and not _looked_up:
        _look_up()
    return torch.empty(shape, dtype=dtype, device=device)


def _look_up() -> None:
    global _looked_up, _empty_strided_cuda, _current_cuda, _only_cuda
    import torch

    from te_dispatch import torch_private

    _looked_up = True
    if torch_private.empty_strided_cuda is not None and torch.cuda.is_available():
        _current_cuda = torch_private.current_device
        _empty_strided_cuda = torch_private.empty_strided_cuda
        _only_cuda = torch.device("cuda", 0) if torch.cuda.device_count() == 1 else None
        direct[1] = None if _only_cuda is not None else _current_cuda
        direct[0] = _empty_strided_cuda if _override is None else None


def set_allocator(allocator: Allocator | None) -> Allocator | None:
    """Replace the allocator (None restores PyTorch's) and return the one that was in force."""
    global _override
    previous, _override = _override, allocator
    direct[0] = _empty_strided_cuda if allocator is None else None
    return previous


def replaced() -> bool:
    """Whether another allocator than PyTorch's is in force."""
    return _override is not None
