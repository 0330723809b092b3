# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Lists of tensors as tables that kernels read. See `te_dispatch_triton.kernels.optimizer_table`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_

import torch

from te_dispatch_triton.kernels import optimizer_table as kernels
from te_dispatch_triton.launch import Config, Kernel
from te_dispatch_triton.memory import dense, empty

Tensors = Sequence[torch.Tensor]
#: The dtypes' codes of the entry at a place.
Code = Callable[[int], int]
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
_address = torch.Tensor.data_ptr


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


class Layout:
    """What tables of lists of one length have in common whose tensors have the same sizes and dtypes.

    Attributes:
        lists, length: how many lists (an empty one: addresses 0), tensors of each.
        device: where they lie.
        most: entries that would fit into a table.
        parts: of each table the tensors' places in their lists, the words of its entries behind addresses, and its
            programs. Tensors without elements are left out.
        ranges: where each tensor's programs begin, counted through all tables, and where the last one's end.
    """

    __slots__ = ("lists", "length", "device", "most", "parts", "ranges")

    def __init__(self, lists: Sequence[Tensors], chunk: int, code: Code | None = None) -> None:
        first = lists[0]
        self.lists, self.length, self.device = len(lists), len(first), first[0].device
        self.most = FEW if len(first) <= FEW else MANY
        self.parts: list[tuple[list[int], list[tuple[int, int, int]], int]] = []
        self.ranges = [0]
        places: list[int] = []
        words: list[tuple[int, int, int]] = []
        before = 0
        for place, x in enumerate(first):
            count, at = x.numel(), self.ranges[-1]
            self.ranges.append(at + -(-count // chunk))
            if count == 0:
                continue
            if len(places) == self.most:
                self.parts.append((places, words, at - before))
                places, words, before = [], [], at
            places.append(place)
            words.append((count, at - before, 0 if code is None else code(place)))
        if places:
            self.parts.append((places, words, self.ranges[-1] - before))

    def addresses(self, lists: Sequence[Tensors]) -> list[list[int]]:
        return [[*map(_address, tensors)] or [0] * self.length for tensors in lists]

    def tables(self, columns: list[list[int]], memory: Callable[[int, torch.device], torch.Tensor]) -> list[Table]:
        """Tables of lists with these addresses, in memory for as many words."""
        aligned = reduce(or_, map(low_bits, columns)) == 0
        made = []
        for places, others, programs in self.parts:
            words = [
                word for place, rest in zip(places, others) for word in (*[column[place] for column in columns], *rest)
            ]
            table = memory(len(words), self.device)
            write(words, table)
            made.append(Table(table, len(places), self.most, programs, aligned))
        return made

    def rewrite(self, tables: list[Table], number: int, column: list[int]) -> None:
        """Put other addresses of one list in place of those that tables hold."""
        for table, (places, _, _) in zip(tables, self.parts):
            write([column[place] for place in places], table.words, number, self.lists + _OTHERS)


def low_bits(addresses: Sequence[int]) -> int:
    """0 where all are multiples of 16."""
    return reduce(or_, addresses) & 15


def tables(lists: Sequence[Tensors], layout: Layout) -> list[Table]:
    """Tables for one call."""
    return layout.tables(layout.addresses(lists), workspace)


def workspace(count: int, device: torch.device) -> torch.Tensor:
    return empty("workspace", (count,), torch.int64, device)


def sent(words: list[int], device: torch.device) -> torch.Tensor:
    """Numbers from 0 to below 2^62 in device memory, int64, for one call."""
    table = workspace(len(words), device)
    write(words, table)
    return table


def write(words: Sequence[int], table: torch.Tensor, start: int = 0, step: int = 1) -> None:
    """table[start + i * step] = words[i], numbers from 0 to below 2^62."""
    count, done = len(words), 0
    length = next((x for x in _LENGTHS if count <= x), _LENGTHS[-1])
    while done < count:
        part = [word | _MARK for word in words[done : done + length]]
        where = _MARK | (start + done * step) << 32 | step << 16 | len(part)
        _write(table.device, (1, 1, 1), (table, (where, *part, *_PADDING[len(part) : length])), (length,), _CONFIG)
        done += length


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
