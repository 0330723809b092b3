# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Lists of tensors as a table that kernels read. See `te_dispatch_triton.kernels.optimizer_table`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from te_dispatch_triton.kernels import optimizer_table as kernels
from te_dispatch_triton.launch import Config, Kernel
from te_dispatch_triton.memory import address, dense, empty

Tensors = Sequence[torch.Tensor]
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Entries of a table: few, for most lists, or as many as one launch serves.
FEW, MANY = 32, 1024
_OTHERS = 3  # fields beside addresses
#: Words that one launch writes: the fewest that do, else the most.
_LENGTHS = (32, 64, 128)
_MARK = 1 << 62
_PADDING = (_MARK,) * _LENGTHS[-1]
_CONFIG = Config(num_warps=1)
_write = Kernel(kernels.write_words)


class Table:
    """Attributes:
    words: int64, the table in device memory.
    entries: how many there are; `most` of them would fit.
    programs: as many as have a chunk.
    aligned: whether every tensor begins at a multiple of 16 bytes.
    """

    __slots__ = ("words", "entries", "most", "programs", "aligned")

    def __init__(self, words: torch.Tensor, entries: int, most: int, programs: int, aligned: bool) -> None:
        self.words, self.entries, self.most, self.programs, self.aligned = words, entries, most, programs, aligned


def tables(lists: Sequence[Tensors], chunk: int, code: Callable[[int], int] | None = None) -> Iterator[Table]:
    """Tables of equally long lists (an empty one: addresses 0), for `chunk` elements to a program. Tensors without
    elements are left out. `code` gives the dtypes' codes of an entry."""
    first = lists[0]
    most = FEW if len(first) <= FEW else MANY
    words: list[int] = []
    entries = programs = addresses = 0
    for place, x in enumerate(first):
        count = x.numel()
        if count == 0:
            continue
        if entries == most:
            yield Table(write(words, x.device), entries, most, programs, addresses & 15 == 0)
            words, entries, programs, addresses = [], 0, 0, 0
        for tensors in lists:
            at = address(tensors[place]) if tensors else 0
            addresses |= at
            words.append(at)
        words += (count, programs, 0 if code is None else code(place))
        entries += 1
        programs += -(-count // chunk)
    if entries:
        yield Table(write(words, first[0].device), entries, most, programs, addresses & 15 == 0)


def write(words: list[int], device: torch.device) -> torch.Tensor:
    """Numbers from 0 to below 2^62 in device memory, int64."""
    count = len(words)
    length = next((x for x in _LENGTHS if count <= x), _LENGTHS[-1])
    table = empty("workspace", (-(-count // length) * length,), torch.int64, device)
    marked = [word | _MARK for word in words]
    for start in range(0, count, length):
        part = tuple(marked[start : start + length])
        target = table[start:] if start else table
        _write(device, (1, 1, 1), (target, part + _PADDING[: length - len(part)]), (length,), _CONFIG)
    return table


def contiguous(tensors: Tensors) -> Tensors:
    """The list itself, or one with dense copies of those that are not."""
    if all(map(torch.Tensor.is_contiguous, tensors)):
        return tensors
    return [dense(x) for x in tensors]


def returned(targets: Tensors, sources: Tensors) -> None:
    """Write results back to where dense copies stood in for them."""
    if targets is not sources:
        for target, source in zip(targets, sources, strict=True):
            if target is not source:
                target.copy_(source)
