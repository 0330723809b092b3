# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tensors laid into memory as callers have them: with gaps, off alignment, in another order, expanded.

Each arrangement keeps a tensor's values. What lies around them is filled with NaN and Inf (or the largest integer), so
that reading it shows, and is looked at again after the call, so that writing it shows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from te_dispatch.conformance.memory import as_bytes
from te_dispatch.conformance.transfer import mapped
from te_dispatch.core.memory import ANY, ROWS, SAVED, WRITTEN

#: Elements between two rows of a strided operand, and behind each operand: not a multiple of any vector width.
_GAP = 3
#: Rows of a slice of a wider tensor start at multiples of so many elements, with as many between them at least: vectors
#: of any width are aligned, and fit in behind a row's end.
_ALIGNED = 64
#: Elements that an operand has more than its own in `offset`, at the most.
APART = _GAP + 1


@dataclasses.dataclass(frozen=True)
class Room:
    """Memory of which a tensor is a part.

    Attributes:
        name: of the operand.
        whole: all of it, one dimension.
        view: the operand's tensor.
        before: the bytes of `whole` as the call found them.
    """

    name: str
    whole: torch.Tensor
    view: torch.Tensor
    before: torch.Tensor

    def written_around(self) -> str | None:
        """What was written outside of the operand's elements, in words; None if nothing was."""
        own = torch.zeros(self.whole.shape, dtype=torch.bool, device=self.whole.device)
        start = self.view.storage_offset() - self.whole.storage_offset()
        own.as_strided(self.view.shape, self.view.stride(), start).fill_(True)
        size = self.whole.element_size()
        after = as_bytes(self.whole).view(-1, size)
        changed = (after != self.before.view(-1, size)).any(1) & ~own
        count = int(changed.sum())
        return f"wrote {count} elements between those of {self.name} {tuple(self.view.shape)}" if count else None


#: (tensor, its form) -> how it is to lie: (elements of memory, strides, first element), or None to leave it.
Plan = Callable[[torch.Tensor, str], "tuple[int, tuple[int, ...], int] | None"]
#: (parameter, number of a tensor in its argument) -> whether that tensor is laid otherwise.
Chosen = Callable[[str, int], bool]
#: (elements, what they are like) -> memory of one dimension for them.
Allocate = Callable[[int, torch.Tensor], torch.Tensor]


def anywhere(size: int, like: torch.Tensor) -> torch.Tensor:
    """Memory from PyTorch's allocator."""
    return torch.empty((size,), dtype=like.dtype, device=like.device)


def every(parameter: str, number: int) -> bool:
    return True


def only(parameter: str) -> Chosen:
    """The tensors of one parameter."""
    return lambda name, _: name == parameter


class Pool:
    """Memory of which operands are parts, one piece of it for each dtype.

    Args:
        size: elements of a piece.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._left: dict[torch.dtype, torch.Tensor] = {}

    def allocate(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """What lies behind everything that was given out before."""
        left = self._left.get(like.dtype)
        if left is None:
            left = torch.empty((self._size,), dtype=like.dtype, device=like.device)
        self._left[like.dtype] = left[size:]
        return left[:size]


class Arranged:
    """Arguments whose operands lie as a plan says.

    Args:
        arguments: of a call; what is written is copied too.
        memory: form of each parameter (`Operator.memory`).
        plan: what is done to each tensor.
        chosen: which tensors to change.
        allocate: where memory comes from.

    Attributes:
        arguments: the changed ones.
        changed: names of the parameters of which a tensor lies otherwise now.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        memory: Mapping[str, str],
        plan: Plan,
        chosen: Chosen = every,
        allocate: Allocate = anywhere,
    ) -> None:
        self._allocate, self._chosen = allocate, chosen
        self._rooms: list[Room] = []
        self.changed: list[str] = []
        self.arguments: dict[str, Any] = {}
        seen: dict[int, torch.Tensor] = {}
        for name, value in arguments.items():
            form = memory.get(name, WRITTEN if _is_quantizer(value) else SAVED)
            if form == SAVED:
                self.arguments[name] = value
                continue
            laid = functools.partial(self._laid, name, form, plan, seen, itertools.count())
            self.arguments[name] = mapped(value, laid)

    def _laid(
        self,
        name: str,
        form: str,
        plan: Plan,
        seen: dict[int, torch.Tensor],
        numbers: Iterator[int],
        x: torch.Tensor,
    ) -> torch.Tensor:
        """The same tensor given twice stays one."""
        if id(x) not in seen:
            seen[id(x)] = self._fresh(name, form, x, plan) if self._chosen(name, next(numbers)) else x
        return seen[id(x)]

    def _fresh(self, name: str, form: str, x: torch.Tensor, plan: Plan) -> torch.Tensor:
        how = plan(x, form) if x.numel() else None
        if how is None:
            return x
        size, strides, start = how
        whole = _filled(self._allocate(size, x))
        view = whole.as_strided(x.shape, strides, whole.storage_offset() + start)
        if _numbers(x) and x.dim() == 1 and strides[0] > 1:
            whole[start + 1 :: strides[0]][: x.numel()] = x
        if all(stride for stride, n in zip(strides, x.shape) if n > 1):
            view.copy_(x)
        else:  # expanded: of equal elements one is written
            first = [slice(0, 1) if not stride else slice(None) for stride in strides]
            view[tuple(first)].copy_(x[tuple(first)])
        self._rooms.append(Room(name, whole, view, as_bytes(whole).clone()))
        self.changed += [] if name in self.changed else [name]
        return view

    def written_around(self) -> list[str]:
        """Everything that was written between operands' elements, in words."""
        return [found for found in (room.written_around() for room in self._rooms) if found is not None]


def _is_quantizer(value: Any) -> bool:
    items = value if isinstance(value, (list, tuple)) else [value]
    return any(hasattr(item, "max_value") and hasattr(item, "kind") for item in items)


def _numbers(x: torch.Tensor) -> bool:
    """Whether it holds bounds or indices. Between them lie numbers that are as good: with others, a call that reads
    elements as if they were adjacent might be refused, or stop at a number that is none."""
    return x.dtype in (torch.int32, torch.int64)


def _filled(memory: torch.Tensor) -> torch.Tensor:
    """With NaN and Inf in turn, as a maximum leaves NaN out; integers with the largest, which reads as NaN in FP8."""
    if memory.dtype.is_floating_point:
        memory.fill_(torch.nan)[1::2] = torch.inf
        return memory
    return memory.fill_(memory.dtype != torch.bool and torch.iinfo(memory.dtype).max)


def _dense(sizes: tuple[int, ...]) -> list[int]:
    strides, step = [1] * len(sizes), 1
    for i in range(len(sizes) - 1, -1, -1):
        strides[i], step = step, step * sizes[i]
    return strides


def _room(shape: torch.Size, strides: list[int], start: int = 0) -> tuple[int, tuple[int, ...], int]:
    last = sum((n - 1) * stride for n, stride in zip(shape, strides))
    return start + last + 1 + _GAP, tuple(strides), start


def strided(x: torch.Tensor, form: str) -> tuple[int, tuple[int, ...], int] | None:
    """A gap behind every row of the last dimension."""
    if x.dim() < 2:
        return None
    return _room(x.shape, _dense((*x.shape[:-1], x.shape[-1] + _GAP))[:-1] + [1])


def sliced(x: torch.Tensor, form: str) -> tuple[int, tuple[int, ...], int] | None:
    """The first columns of a wider tensor whose rows are aligned."""
    if x.dim() < 2:
        return None
    return _room(x.shape, _dense((*x.shape[:-1], (x.shape[-1] // _ALIGNED + 2) * _ALIGNED))[:-1] + [1])


def offset(x: torch.Tensor, form: str) -> tuple[int, tuple[int, ...], int] | None:
    """Contiguous, starting one element into its memory: no vector load is aligned. Scales are part of a larger
    tensor then."""
    return _room(x.shape, _dense(tuple(x.shape)), 1)


def permuted(x: torch.Tensor, form: str) -> tuple[int, tuple[int, ...], int] | None:
    """Dimensions in memory in the reverse order, all but the last one where that has to be contiguous; of vectors,
    every other element."""
    if x.dim() < 2:
        return _room(x.shape, [2] * x.dim()) if form != ROWS and x.dim() else None
    if form != ROWS:
        return _room(x.shape, _dense(tuple(x.shape)[::-1])[::-1])
    return turned(x, form)


def turned(x: torch.Tensor, form: str) -> tuple[int, tuple[int, ...], int] | None:
    """Leading dimensions in memory in the reverse order, each row in one piece, as a batch of sequences is whose
    first dimensions were exchanged."""
    if x.dim() < 3:
        return None
    leading = _dense(tuple(x.shape[:-1])[::-1])[::-1]
    return _room(x.shape, [stride * x.shape[-1] for stride in leading] + [1])


def expanded(x: torch.Tensor, form: str) -> tuple[int, tuple[int, ...], int] | None:
    """Stride 0 along one dimension (of tensors whose elements are equal along it)."""
    dim = expandable(x, form)
    if dim is None:
        return None
    kept = _dense((*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    return _room(x.shape, [*kept[:dim], 0, *kept[dim + 1 :]])


def constant(x: torch.Tensor, form: str) -> tuple[int, tuple[int, ...], int] | None:
    """One element for all, as the gradient of a sum is."""
    return _room(x.shape, [0] * x.dim()) if form == ANY and x.dim() > 1 and x.is_floating_point() else None


def expandable(x: torch.Tensor, form: str) -> int | None:
    """The first dimension along which a tensor may have stride 0: of more than one element, and not the last one where
    that has to be contiguous. None for integers, whose numbers may not be equal, but for masks of 0 and 1."""
    mask = x.dtype == torch.bool or (x.dtype == torch.uint8 and bool((x <= 1).all()))
    if form not in (ANY, ROWS) or not (x.is_floating_point() or mask):
        return None
    dims = range(x.dim() - (1 if form == ROWS else 0))
    return next((dim for dim in dims if x.shape[dim] > 1), None)
