# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Memory that tells what was done to it: canaries around every allocation, poison inside.

Implementations allocate through `te_dispatch.ops.alloc`; while `GuardedMemory` is entered, that gives memory between
two guard zones. A guard byte that changed is a write past the end. An element that still holds the poison in two runs
with different poison was never written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

import torch

from te_dispatch.ops import alloc

#: Bytes before and after every allocation. Wide enough for a whole vectorized store of a warp (32 x 16).
GUARD = 512
_CANARY = 0xC5


@dataclass(frozen=True)
class Allocation:
    """One call of the allocator: what for, the whole memory with its guards, and the tensor that was given out.

    Attributes:
        handed: it is the caller's, who hands it in to be written.
    """

    role: str
    whole: torch.Tensor
    given: torch.Tensor
    handed: bool = False

    def overrun(self) -> str | None:
        """What was written outside, in words; None if nothing was."""
        size = self.whole.numel() - 2 * GUARD
        zones = (self.whole[:GUARD].flip(0), "before the start"), (self.whole[GUARD + size :], "past the end")
        for zone, where in zones:
            changed = (zone != _CANARY).nonzero()
            if changed.numel():
                return (
                    f"wrote {changed.numel()} bytes {where} of {self.role} {tuple(self.given.shape)}, the nearest "
                    f"{int(changed[0]) + 1} bytes outside"
                )
        return None


class GuardedMemory:
    """Replaces the allocator of `te_dispatch.ops.alloc` while entered.

    Args:
        poison: the byte that fills fresh memory: 0xFF reads as NaN in every float format here, another byte as a
            number; use both to see what was not written.
    """

    def __init__(self, poison: int) -> None:
        self.poison = poison
        self.allocations: list[Allocation] = []
        self._lock = threading.Lock()
        self._previous: alloc.Allocator | None = None

    def __enter__(self) -> GuardedMemory:
        self._previous = alloc.set_allocator(self._allocate)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        alloc.set_allocator(self._previous)

    def _allocate(
        self, role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, handed: bool = False
    ) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        size = count * torch.empty((), dtype=dtype).element_size()
        whole = torch.full((size + 2 * GUARD,), _CANARY, dtype=torch.uint8, device=device)
        whole[GUARD : GUARD + size] = self.poison
        given = torch.empty(0, dtype=dtype, device=device)
        offset = GUARD // given.element_size()
        strides = torch.empty(shape, device="meta").stride()
        given.set_(whole.untyped_storage(), offset, shape, strides)
        with self._lock:
            self.allocations.append(Allocation(role, whole, given, handed))
        return given

    def around(self, role: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy between guards of what the caller hands in to be written; itself where it is a view of more."""
        size = tensor.numel() * tensor.element_size()
        if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() != size:
            return tensor
        return self._allocate(role, tuple(tensor.shape), tensor.dtype, tensor.device, True).copy_(tensor)

    def overruns(self) -> list[str]:
        """Everything that was written outside, in words."""
        return [found for found in (one.overrun() for one in self.allocations) if found is not None]

    def unused(self, made: Iterable[torch.Tensor]) -> str | None:
        """The role of memory that was asked for as a result's, and in which none of the call's results lies."""
        storages = {x.untyped_storage().data_ptr() for x in made}
        for one in self.allocations:
            workspace = one.handed or one.role == "workspace" or not one.given.numel()
            if not workspace and one.whole.untyped_storage().data_ptr() not in storages:
                return f"{one.role} {tuple(one.given.shape)}"
        return None


def extent(x: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the one behind its last; gaps between rows are inside."""
    if not x.numel():
        return x.data_ptr(), x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def overlapping(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the extents of two tensors share a byte. Disjoint parts of one piece of memory do not."""
    (start, end), (other_start, other_end) = extent(one), extent(other)
    return one.device == other.device and start < other_end and other_start < end


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, flat. A dimension of size 1 may have any stride, which a view as bytes would refuse."""
    flat = x.contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are of one shape and dtype and hold the same bytes."""
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(as_bytes(one), as_bytes(other))


def same_results(one: torch.Tensor, other: torch.Tensor) -> bool:
    """`same_bits`, but a NaN that is computed is met by any NaN: processors give it the sign of the operand that comes
    first, and which one does depends on where in a vectorized loop an element is."""
    if same_bits(one, other):
        return True
    if not one.is_floating_point() or one.shape != other.shape or one.dtype != other.dtype:
        return False
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and same_bits(one.masked_fill(nan, 0.0), other.masked_fill(nan, 0.0))


def unwritten(one: torch.Tensor, other: torch.Tensor, poisons: tuple[int, int]) -> torch.Tensor:
    """bool: the elements that hold the first poison in one run's result and the second in the other's."""

    def holds(tensor: torch.Tensor, poison: int) -> torch.Tensor:
        size = tensor.element_size()
        data = as_bytes(tensor).reshape(*tensor.shape, size)
        return (data == poison).all(-1)

    return holds(one, poisons[0]) & holds(other, poisons[1])
